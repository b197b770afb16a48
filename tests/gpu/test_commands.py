"""Commands of the documentation: those of docs/launch.md parse, and the demo learns on a GPU."""

import importlib
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, metrics
from on_gpu import ON_CPU, gpu
from processes import PATIENCE, finished
from scripts import SCRIPTS

from common.config.parse import parse

PAGE = (ROOT / "docs/launch.md").read_text()
COMMANDS = re.findall(r"`torchrun --nproc_per_node 8 (\w+)\.py ([^`]*)`", PAGE)
assert len(COMMANDS) >= 7


@pytest.mark.parametrize(("script", "flags"), COMMANDS)
def test_commands_for_eight_gpus_parse(script, flags, monkeypatch):
    """Part of the ordinary suite. A recipe's flags are checked, also against the ranks."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "8")
    args = parse(importlib.import_module(script).Args, flags.split())
    assert "--model" in flags or args.model.startswith("Qwen/")


@gpu(1)
@pytest.mark.skipif(ON_CPU, reason="on a CPU it is `make demo` itself, and test_demo.py")
def test_demo_learns_and_exits_cleanly(tmp_path):
    """`make demo` in a copy of the project runs SFT and GRPO with engine, evaluations, saves and
    exports. At the end of each process, closing a sleeping engine would print 'CUDA Error'. The
    final accuracy is like that on a CPU, 0.94."""
    for path in [*SCRIPTS.values(), ROOT / "common", ROOT / "configs"]:
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    done = subprocess.run(
        [sys.executable, "demo.py"], cwd=tmp_path, capture_output=True, text=True,
        timeout=6 * PATIENCE,
    )  # fmt: skip
    assert "greedy exact match" in finished(done).stdout
    lines = metrics(tmp_path / "runs/demo/grpo")
    scores = [line["eval/solved"] for line in lines if "eval/solved" in line]
    assert scores[0] < 0.6 and scores[-1] > 0.8, scores
