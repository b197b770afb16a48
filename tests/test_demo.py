"""The demo's promise, on the recipe itself: SFT leaves room, GRPO fills it, and the engine agrees at every step.
PPO and RLOO, from the same SFT model, learn as well."""

import subprocess
import sys

import pytest
from helpers import ROOT, environment, metrics, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo():
    done = subprocess.run([sys.executable, "demo.py"], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_demo_learns_arithmetic_by_sft_and_then_by_grpo(demo):
    lines = metrics(ROOT / "runs/demo/grpo")
    scores = [line["eval/pass_at_1"] for line in lines if "eval/pass_at_1" in line]
    assert scores[0] <= 0.5 and scores[-1] >= 0.9, scores
    assert max(line.get("sampling/sampling_logp_difference/max", 0) for line in lines) <= 1e-4
    assert "five held-out questions" in demo.stdout and (ROOT / "runs/demo/curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_others_learn_from_the_same_start(demo, script, tmp_path):
    """A sixth or less of their recipes; docs/ppo.md and docs/rloo.md have the whole ones."""
    run(
        2, f"{script}.py", "--config", ROOT / f"configs/demo_{script}.yaml", "--max_steps", 20, "--output_dir", tmp_path
    )
    first, *_, last = [line["eval/pass_at_1"] for line in metrics(tmp_path) if "eval/pass_at_1" in line]
    assert first <= 0.5 and last >= 0.7, (first, last)
