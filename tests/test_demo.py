"""The demo's promise, on a part of the recipe itself: SFT leaves room, GRPO fills it, and the engine agrees."""

import shutil

import checkpoints
import pytest
from helpers import ROOT, metrics, run

import demo

demo_sft = checkpoints.demo_sft


@pytest.mark.slow
def test_demo_learns_arithmetic_by_sft_and_then_by_grpo(demo_sft, tmp_path, monkeypatch, capsys):
    """demo.py itself, but for how it launches; the SFT run is the one that others start from too."""
    launched = []

    def train(script: str, *flags: str) -> None:
        launched.append((script, *flags))
        if script == "sft.py":
            shutil.copytree(demo_sft, tmp_path / "sft")
        else:
            folders = ("--model", tmp_path / "sft" / "hf", "--output_dir", tmp_path / "grpo")
            run(2, script, *flags, *folders, "--max_steps", 12, "--eval_every", 12)

    monkeypatch.setattr(demo, "OUT", tmp_path)
    monkeypatch.setattr(demo, "train", train)
    demo.main()
    assert launched == [
        ("sft.py", "--config", "configs/demo_sft.yaml"),
        ("grpo.py", "--config", "configs/demo_grpo.yaml"),
    ]
    lines = metrics(tmp_path / "grpo")
    scores = [line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line]
    assert scores[0] <= 0.5 and scores[-1] >= 0.65, scores  # 260 steps: 0.94
    assert max(line.get("sampling/sampling_logp_difference/max", 0) for line in lines) <= 1e-4
    assert "five held-out questions" in capsys.readouterr().out and (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_demo_launches_ranks_and_stops_when_they_fail(capfd):
    with pytest.raises(SystemExit, match="sft.py failed; its message is above"):
        demo.train("sft.py", "--config", "configs/absent.yaml")
    told = capfd.readouterr()
    assert "--nproc_per_node=2 --standalone sft.py --config configs/absent.yaml" in told.out
    assert "error: --config configs/absent.yaml: No such file" in told.err


def test_the_recipes_of_the_demo_fit_together():
    """What one leaves the next takes, where demo.py looks for it."""
    import yaml

    sft, grpo = (yaml.safe_load((ROOT / f"configs/demo_{name}.yaml").read_text()) for name in ("sft", "grpo"))
    assert sft["output_dir"] == f"{demo.OUT}/sft" and grpo["output_dir"] == f"{demo.OUT}/grpo"
    assert grpo["model"] == f"{demo.OUT}/sft/hf"
