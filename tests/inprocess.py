"""A script's `main` in the process of the tests, which is one rank already: no start-up, nothing hidden."""

import importlib
import shutil
from pathlib import Path

import pytest
from helpers import assert_same_weights, metrics

from common.config.parse import parse
from common.parallel import distributed


@pytest.fixture
def main(device, monkeypatch):
    """`main("sft", *flags)` runs the script to its end."""
    monkeypatch.setattr(distributed, "setup", lambda seed, num_rollout_ranks=0, nccl_timeout=30: (device, 0, 1))
    monkeypatch.setattr(distributed, "cleanup", lambda: None)

    def run_main(script: str, *flags: object) -> None:
        module = importlib.import_module(script)
        module.main(parse(module.Args, [str(flag) for flag in flags]))

    return run_main


def assert_resumes_exactly(main, script: str, *flags: object, folder: Path, finished: int) -> None:
    """A finished run without its last checkpoint goes on from the one before and comes to the same, bit for bit."""
    again = folder.with_name(f"{folder.name}_again")
    shutil.copytree(folder, again, ignore=lambda *_: ["hf", f"step_{finished:06d}"])
    (before,) = again.glob("checkpoints/step_*")
    assert not (again / "hf").exists()
    main(script, *flags, "--output_dir", again)
    done = int(before.name.removeprefix("step_"))
    assert 0 < done < finished and [line["step"] for line in metrics(again)] == list(range(1, finished + 1))
    assert_same_weights(folder, again)
    for a, b in zip(metrics(folder), metrics(again), strict=True):
        names = [
            name for name in a if not name.startswith(("time/", "speed/", "memory/")) and name != "tokens_per_second"
        ]
        assert {name: a[name] for name in names} == {name: b[name] for name in names}
