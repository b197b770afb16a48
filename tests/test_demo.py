"""The demo's promise, on the recipe itself: SFT leaves room, GRPO fills it, and the engine agrees at every step."""

import subprocess
import sys

import pytest
from helpers import ROOT, environment, metrics


@pytest.mark.slow
def test_demo_learns_arithmetic_by_sft_and_then_by_grpo():
    done = subprocess.run([sys.executable, "demo.py"], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = metrics(ROOT / "runs/demo/grpo")
    scores = [line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line]
    assert scores[0] <= 0.5 and scores[-1] >= 0.9, scores
    assert max(line.get("sampling/sampling_logp_difference/max", 0) for line in lines) <= 1e-4
    assert "five held-out questions" in done.stdout and (ROOT / "runs/demo/curves.png").stat().st_size > 10_000
