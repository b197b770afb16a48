"""Commands of the documentation: the demo on one GPU, and those of docs/launch.md on eight."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, finished, metrics
from on_gpu import ON_CPU, gpu, launch

STEPS = 2 if ON_CPU else 3
OFFLINE = ("sft.py", "dpo.py", "rm.py")
# stand-ins for the user-supplied models and data in docs/launch.md
NAMES = {
    "./sft/hf": "Qwen/Qwen3-1.7B",
    "runs/qwen3_grpo/hf": "Qwen/Qwen3-1.7B",
    "prompts.jsonl": "openai/gsm8k",
    "model:./rm/hf": "gsm8k",
}
# On a CPU the built-in model and task replace those of the commands, and one or two ranks replace
# eight.
SMALL = ("--model", "tiny", "--dataset", "arithmetic", "--template_kwargs") if ON_CPU else ()
SMALL_ONLINE = (
    "--prompt_template", "{prompt}", "--max_new_tokens", 4, "--pack_tokens", 512,
    "--reward", "characters", "--engine", "transformers",
) if ON_CPU else ()  # fmt: skip


def page_commands() -> list[tuple[str, ...]]:
    """Return the lines of docs/launch.md that launch a script on eight GPUs, without those that
    need a user's files."""
    page = (ROOT / "docs/launch.md").read_text()
    lines = re.findall(r"^\|.*`torchrun --nproc_per_node 8 (.*)` \|$", page, re.M)
    commands = [tuple(NAMES.get(word, word) for word in line.split()) for line in lines]
    return [c for c in commands if not any("./" in word or "checkpoints" in word for word in c)]


def test_page_contains_the_tested_commands():
    """Part of the ordinary suite: the other tests take their commands from docs/launch.md."""
    commands = page_commands()
    assert {words[0] for words in commands} >= {*OFFLINE, "grpo.py", "online_dpo.py", "eval.py"}
    recipes = [words[words.index("--config") + 1] for words in commands if "--config" in words]
    assert len(recipes) >= 5 and all((ROOT / recipe).is_file() for recipe in recipes)


@gpu(1)
@pytest.mark.skipif(ON_CPU, reason="on a CPU it is `make demo` itself, and test_demo.py")
def test_demo_learns_and_exits_cleanly(tmp_path):
    """`make demo` in a copy of the project runs SFT and GRPO with engine, evaluations, saves and
    exports. At the end of each process, closing a sleeping engine would print 'CUDA Error'. The
    final accuracy is like that on a CPU, 0.94. CPU twin: test_demo.py."""
    for path in [*ROOT.glob("*.py"), ROOT / "common", ROOT / "configs"]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    done = subprocess.run(
        [sys.executable, "demo.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=6 * PATIENCE,
    )  # fmt: skip
    assert "greedy exact match" in finished(done).stdout
    lines = metrics(tmp_path / "runs/demo/grpo")
    scores = [line["eval/solved"] for line in lines if "eval/solved" in line]
    assert scores[0] < 0.6 and scores[-1] > 0.8, scores


@pytest.fixture(scope="module")
def from_the_hub() -> None:
    """Skip in one line if the models of the commands are neither on disk nor on a reachable hub."""
    from common.model.hub import resolve_model

    try:
        for name in () if ON_CPU else ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base"):
            resolve_model(name)
    except ValueError as error:
        pytest.skip(str(error))


@gpu(8)
@pytest.mark.parametrize("words", page_commands(), ids=" ".join)
def test_page_commands_run(words, tmp_path, from_the_hub):
    """Three steps of each published recipe, with its batch and model on eight GPUs (64 prompts for
    eval.py). Memory suffices, engine and trainer agree, and every line has times and peak memory,
    which this test prints (pytest -s). CPU twin: test_groups.py for the recipes' flags; the
    scripts' own tests."""
    script, *flags = words
    online, ranks = script not in OFFLINE, 8
    mine = [*flags, *SMALL, "--output_dir", tmp_path, *(SMALL_ONLINE if online else ())]
    if script == "eval.py":
        mine += ["--eval_size", 64]
    else:
        mine += ["--max_steps", STEPS, "--eval_every", 0, "--save_every", 100]
    if script == "ppo.py":  # the five steps of the recipe would leave no step to the policy
        mine += ["--value_warmup_steps", 1]
    if ON_CPU:
        mine += [] if online else ["--max_length", 512]
        mine += ["--prompts_per_step", 8] if online and script != "eval.py" else []
        mine += ["--rollout_ranks", 1] if "--rollout_ranks" in flags else []
        ranks = 2 if "--rollout_ranks" in flags else 1
    more = dict(HF_HUB_OFFLINE=os.environ.get("HF_HUB_OFFLINE", "0"), OMP_NUM_THREADS="8")
    launch(ranks, script, *mine, **({} if ON_CPU else more))
    if script == "eval.py":
        assert json.loads((tmp_path / "results.json").read_text())["overall"]["prompts"] == 64
        return
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line in lines:
        assert line["time/step"] > 0 and line["tokens_per_second"] > 0
        assert not online or {"time/reward", "time/train"} <= line.keys()
        # On rollout ranks the engine's weights may be older, and only time/wait is logged.
        if online and "--rollout_ranks" not in flags:
            assert {"time/sync", "time/rollout"} <= line.keys()
            assert line["sampling/sampling_logp_difference/mean"] < 0.02
        assert ON_CPU or line["memory/device_peak_gb"] > 0
    print(f"\n{' '.join(words)}")
    for name, value in lines[-1].items():
        if name.startswith(("time/", "memory/", "mfu")):
            print(f"  {name} {value:.3g}")
    assert Path(tmp_path, "hf", "config.json").is_file()
