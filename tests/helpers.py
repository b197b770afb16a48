"""Running the scripts: under torchrun as a user would, or, where that is not the property, without its start-up."""

import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
LIBRARIES = [
    "torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor", "tyro",
    "transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen3.modeling_qwen3",
    "transformers.generation.utils", "rich.table", "matplotlib.pyplot",
]  # fmt: skip
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not here")


def command(ranks: int, script: str, *flags: object) -> list[str]:
    """The launch line; one rank is plain python."""
    torchrun = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    return [sys.executable, *torchrun, str(ROOT / script), *map(str, flags)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def run(
    ranks: int, script: str, *flags: object, code: int = 0, timeout: float = 300, torchrun: bool = False
) -> subprocess.CompletedProcess:
    """Run to the end and check the exit code (torchrun turns every failure into 1). What is to fail runs under
    torchrun, what is to succeed in `forked` ranks unless `torchrun` says otherwise."""
    if code == 0 and not torchrun:
        done = forked(ranks, script, *flags, timeout=timeout)
    else:
        done = subprocess.run(
            command(ranks, script, *flags), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout
        )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def forked(ranks: int, script: str, *flags: object, timeout: float) -> subprocess.CompletedProcess:
    """What torchrun does, with ranks forked from a process that has imported the libraries already: half of a short
    run's time is imports. Exit code 1 if a rank failed; the others are terminated then."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    sizes = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        processes = []
        for rank in range(ranks):
            variables = environment() | (
                sizes | rendezvous | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if ranks > 1 else {}
            )
            arguments = (script, [str(flag) for flag in flags], variables, outputs)
            processes.append(context.Process(target=_be_a_rank, args=arguments))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        while any(p.exitcode is None for p in processes) and not any(p.exitcode for p in processes):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                raise AssertionError(f"{script} hangs")
            time.sleep(0.02)
        for process in processes:
            process.terminate()  # nothing to those that are done
            process.join()
        code = int(any(process.exitcode for process in processes))
        texts = [path.read_text(encoding="utf-8") if path.is_file() else "" for path in outputs]
    return subprocess.CompletedProcess((script, *flags), code, *texts)


def _be_a_rank(script: str, flags: list[str], variables: dict[str, str], outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = [script, *flags]
    runpy.run_path(str(ROOT / script), run_name="__main__")


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
