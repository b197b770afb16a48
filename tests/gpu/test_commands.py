"""What a user types: the demo on one GPU, and on eight the README's own commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, metrics
from on_gpu import ON_CPU, finished, gpu, launch

STEPS = 2 if ON_CPU else 3
OFFLINE = ("sft.py", "dpo.py", "rm.py")
# What README.md leaves to the reader.
NAMES = {"./sft/hf": "Qwen/Qwen3-1.7B", "runs/qwen3_grpo/hf": "Qwen/Qwen3-1.7B", "prompts.jsonl": "openai/gsm8k",
         "model:./rm/hf": "gsm8k"}  # fmt: skip
# On a CPU the built-in model and task stand in for what the commands name, and a rank or two for eight.
SMALL = ("--model", "tiny", "--dataset", "arithmetic", "--template_kwargs") if ON_CPU else ()
SMALL_ONLINE = ("--prompt_template", "{prompt}", "--max_new_tokens", 4, "--pack_tokens", 512, "--reward", "characters",
                "--engine", "transformers") if ON_CPU else ()  # fmt: skip


def readme_commands() -> list[tuple[str, ...]]:
    """The lines of README.md that launch a script on eight GPUs, but for those that need files of a user's own."""
    lines = re.findall(r"^\|.*`torchrun --nproc_per_node 8 (.*)` \|$", (ROOT / "README.md").read_text(), re.M)
    commands = [tuple(NAMES.get(word, word) for word in line.split()) for line in lines]
    return [words for words in commands if not any("./" in word or "checkpoints" in word for word in words)]


def test_the_readme_has_commands_to_run():
    """The ordinary suite's part: what the others take from README.md is there."""
    commands = readme_commands()
    assert {words[0] for words in commands} >= {*OFFLINE, "grpo.py", "dapo.py", "ppo.py", "online_dpo.py", "eval.py"}
    recipes = [words[words.index("--config") + 1] for words in commands if "--config" in words]
    assert len(recipes) >= 9 and all((ROOT / recipe).is_file() for recipe in recipes)


@gpu(1)
@pytest.mark.skipif(ON_CPU, reason="on a CPU it is `make demo` itself, and test_demo.py")
def test_the_demo_to_its_end(tmp_path):
    """`make demo` in a copy of the project: SFT and GRPO with their engine, evaluations, saves, exports and the end of
    each process, where an engine that is closed while it sleeps would print 'CUDA Error'. It learns as on a CPU, where
    it ends at 0.94. CPU twin: test_demo.py."""
    for path in [*ROOT.glob("*.py"), ROOT / "common", ROOT / "configs"]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    done = subprocess.run(
        [sys.executable, "demo.py"], cwd=tmp_path, capture_output=True, text=True, timeout=6 * PATIENCE
    )
    assert "greedy exact match" in finished(done).stdout
    scores = [line["eval/pass_at_1"] for line in metrics(tmp_path / "runs/demo/grpo") if "eval/pass_at_1" in line]
    assert scores[0] < 0.6 and scores[-1] > 0.8, scores


@pytest.fixture(scope="module")
def from_the_hub() -> None:
    """Skips in one line where the models of the commands are neither on disk nor to be had."""
    from common.model.hub import resolve_model

    try:
        for name in () if ON_CPU else ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base"):
            resolve_model(name)
    except ValueError as error:
        pytest.skip(str(error))


@gpu(8)
@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_the_readmes_commands(words, tmp_path, from_the_hub):
    """Three steps of each recipe as published, with its batch and its model on eight GPUs (of eval.py 64 prompts): it
    fits, engine and trainer agree, and every line says how long what took and how much memory it needed, which this
    test prints (pytest -s). CPU twin: test_groups.py for the recipes' flags; the scripts' own tests."""
    script, *flags = words
    online, ranks = script not in OFFLINE, 8
    mine = [*flags, *SMALL, "--output_dir", tmp_path, *(SMALL_ONLINE if online else ())]
    if script == "eval.py":
        mine += ["--max_prompts", 64]
    else:
        mine += ["--max_steps", STEPS, "--eval_every", 0, "--save_every", 100]
    if script == "ppo.py":
        mine += ["--value_warmup_steps", 1]  # of the recipe's five, none would be left to the policy
    if ON_CPU:
        mine += [] if online else ["--max_length", 512]
        mine += ["--prompts_per_step", 8] if online and script != "eval.py" else []
        mine += ["--rollout_ranks", 1] if "--rollout_ranks" in flags else []
        ranks = 2 if "--rollout_ranks" in flags else 1
    more = {} if ON_CPU else {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"), "OMP_NUM_THREADS": "8"}
    launch(ranks, script, *mine, **more)
    if script == "eval.py":
        assert json.loads((tmp_path / "results.json").read_text())["overall"]["prompts"] == 64
        return
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line in lines:
        assert line["time/step"] > 0 and line["tokens_per_second"] > 0
        assert not online or {"time/reward", "time/train"} <= line.keys()
        if online and "--rollout_ranks" not in flags:  # there the engine's weights may be older, and time/wait is all
            assert {"time/sync", "time/rollout"} <= line.keys()
            assert line["sampling/sampling_logp_difference/mean"] < 0.02
        assert ON_CPU or line["memory/device_peak_gb"] > 0
    told = {name: value for name, value in lines[-1].items() if name.startswith(("time/", "memory/")) or name == "mfu"}
    print("\n" + " ".join(words), *(f"{name} {value:.3g}" for name, value in told.items()), sep="\n  ")
    assert Path(tmp_path, "hf", "config.json").is_file()
