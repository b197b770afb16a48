"""A race runs a script and its patch with equal seeds, each run once, and says which is better."""

import difflib
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, write
from in_process import call_main
from processes import Ranks

from course import race

PATCH = """--- a/grpo.py
+++ b/grpo.py
@@ -1 +1 @@
-r\"\"\"GRPO: reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).
+r\"\"\"Mine: reinforcement learning with verifiable rewards (Shao et al. 2024, arXiv:2402.03300).
"""
SCRIPT = (ROOT / "grpo.py").read_text()
CONFIG = """model: {model}
dataset: [{sums}]
eval_size: 4
prompts_per_step: 2
samples_per_prompt: 2
max_new_tokens: 2
engine: transformers
reward: ["{reward}:first"]
"""


def patch_of(*changes: tuple[str, str]) -> tuple[str, str]:
    """Return grpo.py with texts replaced, and the patch that does so."""
    text = SCRIPT
    for old, new in changes:
        text = text.replace(old, new, 1)
    before, after = SCRIPT.splitlines(keepends=True), text.splitlines(keepends=True)
    return text, "".join(difflib.unified_diff(before, after, "a/grpo.py", "b/grpo.py"))


@pytest.fixture
def compete(tmp_path, monkeypatch, capsys):
    """`compete(patch, *flags, code=0)` returns stdout and stderr of a race."""

    def run(patch: str, *flags: object, code: int = 0) -> tuple[str, str]:
        file = write(tmp_path / "mine.patch", patch)
        places = ("--folder", tmp_path / "runs", "--table", tmp_path / "race.md")
        words = ("race.py", file, *places, *flags)
        return call_main(race.main, words, code, monkeypatch, capsys)

    return run


@pytest.mark.slow
def test_race_runs_each_seed_once(compete, small, sums, reward_file, tmp_path, monkeypatch):
    started = []

    def launch(script: Path, *flags: object):
        started.append((script.read_text(), flags[flags.index("--seed") + 1]))
        with Ranks(1, script, *flags) as ranks:
            return ranks.end()

    monkeypatch.setattr(race, "launch", launch)
    config = write(
        tmp_path / "race.yaml", CONFIG.format(model=small[1], sums=sums, reward=reward_file)
    )
    flags = ("--config", config, "--steps", 1, "--seeds", 2)
    coefficient = "entropy_coef: NotNegative[float] = "
    mine, patch = patch_of((f"{coefficient}0.0", f"{coefficient}1.0"))
    patch = patch.replace("+++ b/grpo.py", "+++ mine.py")  # as diff -u grpo.py mine.py writes it
    shown, _ = compete(patch, *flags)
    assert sorted(started) == sorted((text, seed) for text in (SCRIPT, mine) for seed in (0, 1))
    assert "mine.patch: not shown: " in shown and "difference +0.0 [0.0, 0.0]" in shown
    table = (tmp_path / "race.md").read_text()
    assert table.startswith(race.TABLE)
    row = table.removeprefix(race.TABLE).removesuffix(" |\n").split(" | ")
    assert row[1].startswith("mine.patch (") and "2 lines" in row[1]
    assert row[4] == "2 seeds, 1 steps" and row[-2:] == ["+0.0 [0.0, 0.0]", "not shown"]

    compete(patch, *flags)
    assert len(started) == 4 and (tmp_path / "race.md").read_text() == table

    raises = '\nraise ValueError("no such thing")\n\n\ndef main('
    _, shown = compete(patch_of(("\ndef main(", raises))[1], *flags, code=2)
    assert shown.startswith("error: mine.patch: the run of seed ") and shown.count("\n") == 1
    assert "ValueError: no such thing" in shown
    assert len(started) <= 6 and all(text != SCRIPT for text, _ in started[4:])
    _, shown = compete(PATCH, *flags, code=2)
    words = "mine.patch: no weight differs; its change must be on by default\n"
    assert shown.startswith("error: ") and shown.endswith(words) and shown.count("\n") == 1
    assert (tmp_path / "race.md").read_text() == table


@pytest.mark.parametrize(
    ("patch", "flags", "message"),
    [
        (PATCH, ("--seeds", 1), "--seeds 1: an interval needs 2"),
        (PATCH.replace("grpo", "ppo"), (), "changes ppo.py; a race is about grpo.py alone"),
        (PATCH, ("--steps", 0), "--steps 0: must be at least 1"),
        (PATCH.replace("-1 +1", "-1 +1,15") + "+x = 1\n" * 14, (), "16 changed lines; a race"),
        ("", (), "0 changed lines; a race takes 1 to 15"),
        (PATCH.replace("-r", "-s"), (), "does not apply to grpo.py; make it anew"),
        (PATCH, ("--config", "no.yaml"), "No such file or directory: 'no.yaml'"),
    ],
)
def test_a_patch_that_cannot_race_is_refused_in_one_line(compete, patch, flags, message, tmp_path):
    _, shown = compete(patch, *flags, code=2)
    assert message in shown and shown.count("\n") == 1 and shown.startswith("error: ")
    assert not (tmp_path / "race.md").exists()


def test_verdict_is_by_the_interval_of_the_paired_differences():
    """0.1, 0.2, 0.3: t of 2 degrees is 4.303, so 0.2 +- 4.303 x 0.1 / sqrt(3)."""
    differences = np.array([0.1, 0.2, 0.3])
    assert race.verdict(differences) == ("not shown", "+20.0 [-4.8, 44.8]")
    assert race.verdict(differences + 0.1) == ("better", "+30.0 [5.2, 54.8]")
    assert race.verdict(-differences - 0.1) == ("worse", "-30.0 [-54.8, -5.2]")
