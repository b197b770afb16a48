"""demo.py: which runs it launches and what it shows. `make curves` also checks its result, on a
part of its recipe: SFT learns a part, GRPO learns more, and the engine agrees with the trainer."""

import shutil

import pytest
from helpers import ROOT, metrics, write
from processes import run
from transformers import AutoModelForCausalLM

import demo
from common.model.tiny import tiny_model

SHORT = {
    "sft.py": "--max_steps 1 --batch_size 8 --eval_size 8 --eval_generate 0 --max_length 64",
    "grpo.py": "--max_steps 1 --prompts_per_step 4 --samples_per_prompt 2 --eval_size 8"
    " --engine transformers",
}
LESS = {  # than in the recipes
    "sft.py": "--batch_size 64 --eval_every 320 --eval_size 100 --eval_generate 0"
    " --max_new_tokens 256",
    "grpo.py": "--max_steps 16 --eval_every 16 --eval_size 200 --prompts_per_step 16",
}


@pytest.mark.parametrize("learns", [False, pytest.param(True, marks=pytest.mark.curve)])
def test_demo_trains_by_sft_and_then_by_grpo(learns, main, sums, tmp_path, monkeypatch, capsys):
    """demo.py runs unchanged, but launches the tiny model with two of its four layers."""
    model, out = shutil.copytree(tiny_model(), tmp_path / "model"), tmp_path / "demo"
    layers = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    AutoModelForCausalLM.from_pretrained(model, **layers).save_pretrained(model)
    launched = []

    def train(script: str, *flags: str) -> None:
        launched.append((script, *flags))
        name = script.removesuffix(".py")
        places = ("--model", model if name == "sft" else out / "sft" / "hf")
        places += ("--output_dir", out / name)
        if learns:
            run(1, script, *flags, *LESS[script].split(), *places)
        else:
            main(name, *flags, *SHORT[script].split(), "--dataset", sums, *places)

    monkeypatch.setattr(demo, "OUT", out)
    monkeypatch.setattr(demo, "train", train)
    for earlier in ("sft", "rm"):
        (out / earlier).mkdir(parents=True)
        write(out / earlier / "metrics.jsonl", "{}\n")
    demo.main()
    assert launched == [
        ("sft.py", "--config", "configs/demo_sft.yaml", "--resume", "never"),
        ("grpo.py", "--config", "configs/demo_grpo.yaml", "--resume", "never"),
    ]
    for kept in ("sft.old-1", "rm"):
        assert (out / kept / "metrics.jsonl").read_text() == "{}\n"
    assert "five held-out questions" in capsys.readouterr().out
    assert (out / "curves.png").stat().st_size > 10_000
    lines = metrics(out / "grpo")
    assert max(line.get("sampling/sampling_logp_difference/max", 0) for line in lines) <= 1e-4
    scores = [line["eval/solved"] for line in lines if "eval/solved" in line]
    if learns:  # the whole recipe: 0.94
        assert 0.2 <= scores[0] <= 0.5 and scores[-1] >= scores[0] + 0.15, scores


@pytest.mark.slow
def test_demo_launches_ranks_and_stops_if_they_fail(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "print('rank', os.environ['RANK'], *sys.argv[1:], flush=True)\n"
        "Path(__file__).with_name(os.environ['RANK']).touch()\n"
        "while not all(Path(__file__).with_name(rank).exists() for rank in '01'): "
        "time.sleep(0.01)\nsys.exit(2)\n"
    )
    with pytest.raises(SystemExit, match="script.py failed; its message is above"):
        demo.train(str(script), "--config", "configs/absent.yaml")
    told = capfd.readouterr().out
    assert f"--nproc_per_node=2 --standalone {script} --config configs/absent.yaml" in told
    assert all(f"rank {rank} --config configs/absent.yaml" in told for rank in (0, 1))


def test_demo_recipes_share_their_paths():
    """The output of one recipe is the input of the next, in the folders that demo.py uses."""
    import yaml

    sft, grpo = (
        yaml.safe_load((ROOT / f"configs/demo_{name}.yaml").read_text()) for name in ("sft", "grpo")
    )
    assert sft["output_dir"] == f"{demo.OUT}/sft" and grpo["output_dir"] == f"{demo.OUT}/grpo"
    assert grpo["model"] == f"{demo.OUT}/sft/hf"
