"""Running the scripts as a user would: under torchrun, in their own processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not here")


def command(ranks: int, script: str, *flags: object) -> list[str]:
    """The launch line; one rank is plain python."""
    torchrun = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    return [sys.executable, *torchrun, str(ROOT / script), *map(str, flags)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def run(ranks: int, script: str, *flags: object, code: int = 0, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run to the end and check the exit code (torchrun turns every failure into 1)."""
    done = subprocess.run(
        command(ranks, script, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def metrics(folder: Path) -> list[dict]:
    """Whole lines: a run may be writing the last one."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines(True) if line.endswith("\n")]


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "hf" / "model.safetensors")


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, from /proc."""
    children = [int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()]
    return children + [p for child in children for p in descendants(child)]


def run_and_kill(ranks: int, script: str, *flags: object, folder: Path, after_step: int, delay: float) -> None:
    """Start a run and `kill -9` launcher and ranks `delay` seconds after it logged `after_step`."""
    process = subprocess.Popen(
        command(ranks, script, *flags), cwd=ROOT, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    log, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not (log.is_file() and any(line["step"] >= after_step for line in metrics(folder))):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    time.sleep(delay)
    for pid in [process.pid, *descendants(process.pid)]:  # torchrun gives every rank a session of its own
        os.kill(pid, signal.SIGKILL)
    process.wait()


def assert_same_weights(one: Path, other: Path) -> None:
    """Bit for bit."""
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_close_metrics(one: Path, other: Path, names: tuple[str, ...], rel: float, floor: float = 0.0) -> None:
    """Step by step, relative to the larger value, or to `floor` where both are smaller."""
    one, other = ([line for line in metrics(folder) if line["step"] > 0] for folder in (one, other))
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for name in names:
        assert any(name in line for line in one), f"{name} is never logged"
    for a, b in zip(one, other, strict=True):
        for name in (name for name in names if name in a or name in b):
            assert abs(a[name] - b[name]) <= rel * max(abs(a[name]), abs(b[name]), floor), (
                a["step"],
                name,
                a[name],
                b[name],
            )
