"""Checkpoints that several files of tests start from, trained once for all of them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, run


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time in here. The lock goes with the process that holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def demo_sft(tmp_path_factory) -> Path:
    """The finished run of configs/demo_sft.yaml: `hf/` in it gets some 0.4 of the arithmetic questions right. The
    workers of one pytest-xdist run share it. To be read, not written."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "demo_sft"
    with alone(shared / "demo_sft.lock"):
        if not (folder / "hf").is_dir():
            flags = ("--config", ROOT / "configs/demo_sft.yaml", "--eval_every", 320, "--output_dir", folder)
            run(1, "sft.py", *flags)
    return folder
