"""The patches of course/changes apply to the scripts, are short, and change the metrics of a short
run as described."""

import math
import subprocess
from itertools import chain
from pathlib import Path

import pytest
from helpers import ROOT, metrics, run, samples

PATCHES = sorted(ROOT.glob("course/changes/*.patch"))
SHORT = (
    "--max_steps", 3, "--eval_every", 0, "--prompts_per_step", 4, "--samples_per_prompt", 4,
    "--engine", "transformers", "--max_new_tokens", 4,
)  # fmt: skip
FLAGS = {
    "curriculum": ("--save_every", 1),
    "gfpo": ("--gfpo_keep", 2),
    "new-advantage": ("--advantage", "median"),
    "new-divergence": ("--divergence", "skewed_kl", "--teacher", "tiny-sft"),
    "new-loss": ("--loss", "spo"),
    "positive-nll": ("--positive_nll", 0.1),
}


def script_of(patch: Path) -> Path:
    return ROOT / patch.read_text().split()[1].removeprefix("a/")


def test_every_patch_is_listed_and_has_at_most_15_changed_lines():
    page = (ROOT / "course/changes/README.md").read_text()
    assert len(PATCHES) == 10
    for patch in PATCHES:
        lines = patch.read_text().splitlines()[2:]
        changed = [line for line in lines if line[0] in "+-" and line[1:].strip()]
        assert len(changed) <= 15 and f"({patch.name})" in page
        done = subprocess.run(
            ["patch", "--dry-run", script_of(patch), patch], capture_output=True, text=True
        )
        assert done.returncode == 0 and "offset" not in done.stdout and "fuzz" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_patched_script_runs(patch, small, reward_file, main, monkeypatch, tmp_path):
    name, folder = f"changed_{patch.stem.replace('-', '_')}", tmp_path / "run"
    script = tmp_path / f"{name}.py"
    script.write_text(script_of(patch).read_text())
    subprocess.run(["patch", script, patch], check=True, capture_output=True)
    flags = (*small, *SHORT, *FLAGS.get(patch.stem, ()), "--output_dir", folder)
    if patch.stem == "gfpo":
        flags += ("--reward", f"{reward_file}:digits")
    if patch.stem in ("curriculum", "muon"):
        run(2, script, *flags)
    else:
        monkeypatch.syspath_prepend(tmp_path)
        main(name, *flags)
    lines = [line for line in metrics(folder) if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) for line in lines)
    if patch.stem == "model-as-reward":
        assert all(line["reward"] < -1 for line in lines)
    if patch.stem == "token-advantage":
        trace_file = pytest.importorskip("extras.trace.file")
        _, *traced = trace_file.read(folder / "trace" / "step_000001.jsonl.gz")
        for completion in chain.from_iterable(group["completions"] for group in traced):
            decay = [0.9**count for count in reversed(range(len(completion["mask"])))]
            assert completion["fixed"]["advantages"] == pytest.approx(
                [completion["advantage"] * x for x in decay]
            )
    if patch.stem == "gfpo":
        trained = [line["advantage"] != 0 for line in samples(folder)]
        groups = list(zip(*[iter(trained)] * 4, strict=True))
        assert any(map(any, groups)) and all(sum(group) <= 2 for group in groups)
    if patch.stem == "metric-per-group":
        assert all("groups/reward_range" in line for line in lines)
