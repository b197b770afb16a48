"""Running the scripts: under torchrun as a user would, or, where that is not the property, without its start-up."""

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from subprocess import PIPE
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
PATIENCE = 600  # seconds after which what should end hangs: no test depends on less
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not here")


def command(ranks: int, script: str, *flags: object) -> list[str]:
    """The launch line; one rank is plain python."""
    torchrun = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    return [sys.executable, *torchrun, str(ROOT / script), *map(str, flags)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def run(
    ranks: int, script: str, *flags: object, code: int = 0, timeout: float = PATIENCE, torchrun: bool = False
) -> subprocess.CompletedProcess:
    """Run to the end, in `forked` ranks or under `torchrun`, and check the exit code: 1 if one of several failed."""
    if not torchrun:
        done = forked(ranks, script, *flags, timeout=timeout)
    else:
        with subprocess.Popen(
            command(ranks, script, *flags), cwd=ROOT, env=environment(), stdout=PIPE, stderr=PIPE, text=True
        ) as process:
            done = ended(process, timeout=timeout)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-6000:]
    return done


def ended(
    process: subprocess.Popen, ranks: Sequence[int] = (), timeout: float = PATIENCE
) -> subprocess.CompletedProcess:
    """Wait for a launcher and its ranks (the pipes close when the last process has gone). If they hang, all are killed:
    torchrun gives each rank a session of its own, so `ranks` names those that may outlive it."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        kill(process.pid, *ranks)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def kill(*pids: int) -> None:
    """Outright, with all that they have started."""
    for each in [each for pid in pids for each in (pid, *descendants(pid))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


# ---- events, processes, time ----


def until(event: Callable[[], object]) -> object:
    """Wait for a file, a line, the end of a process: what `event` returns once that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := event()):
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Clock:
    """Stands in for the module `time` of `modules`: real time, and what a test adds to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType):
        self.ahead, self.sleep = 0.0, time.sleep
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


# ---- ranks without torchrun's start-up ----

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


@dataclass
class Moment:
    """When rank 0 is to send itself signals: at one of its operations on files in `folder`, number `operation` (from 0)
    of those that follow the line of `step` in metrics.jsonl. A moment of the run, however fast the machine is."""

    folder: Path
    step: int
    operation: int = 0
    signals: tuple[int, ...] = (signal.SIGSTOP,)

    def watch(self) -> None:
        """In rank 0."""
        inside, seen = False, -1

        def look(event: str, arguments: tuple) -> None:
            nonlocal inside, seen
            if event not in OPERATIONS or inside or threading.current_thread() is not threading.main_thread():
                return
            if not str(arguments[0]).startswith(str(self.folder)):
                return
            inside = True
            seen += seen >= 0 or self.logged()
            inside = False
            if seen == self.operation:
                for signum in self.signals:
                    os.kill(os.getpid(), signum)

        sys.addaudithook(look)

    def logged(self) -> bool:
        """Whether the line is there."""
        return (self.folder / "metrics.jsonl").is_file() and any(m["step"] >= self.step for m in metrics(self.folder))


def warm() -> BaseContext:
    """Of processes that are forked from one that has imported the libraries already, see preload.py. It has what is
    read at the import of torch and vLLM: not all of it would be read again in a rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    vllm = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(PYTHONPATH=str(ROOT / "tests"), **vllm).items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


class Ranks:
    """What torchrun starts, without the imports. A context manager: at its end none is left."""

    def __init__(self, ranks: int, script: str | Path, *flags: object, moment: Moment | None = None):
        context = warm()
        self.args, self.folder = (script, *flags), tempfile.TemporaryDirectory()
        self.outputs = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launch = dict(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.store.port), WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks), TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
        )  # fmt: skip
        self.processes = []
        for rank in range(ranks):
            variables = environment(**(launch | dict(RANK=str(rank), LOCAL_RANK=str(rank)) if ranks > 1 else {}))
            of_rank = (str(script), [str(flag) for flag in flags], variables, self.outputs, None if rank else moment)
            self.processes.append(context.Process(target=_be_a_rank, args=of_rank))

    def __enter__(self) -> "Ranks":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        started = [process for process in self.processes if process.pid]
        kill(*(process.pid for process in started if process.exitcode is None))
        for process in started:
            process.join()
        self.folder.cleanup()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def wait(self, timeout: float) -> None:
        """Until one ends."""
        if running := [p.sentinel for p in self.processes if p.exitcode is None]:  # the last may end just now
            multiprocessing.connection.wait(running, timeout)

    def until_frozen(self) -> None:
        """Wait until rank 0 has sent itself SIGSTOP, as its `moment` says. It takes other signals then, and acts upon
        them when it gets SIGCONT."""
        deadline = time.monotonic() + PATIENCE
        while Path(f"/proc/{self.pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            self.wait(0.02)
            assert all(p.exitcode is None for p in self.processes), f"too late: {self._texts()}"
            assert time.monotonic() < deadline, f"{self.args[0]} hangs"

    def end(self, timeout: float = PATIENCE) -> subprocess.CompletedProcess:
        """Wait until all have ended. Exit code 1 if a rank failed: the others are terminated then, as by torchrun. The
        code of one rank is its own."""
        deadline = time.monotonic() + timeout
        while any(p.exitcode is None for p in self.processes) and not any(p.exitcode for p in self.processes):
            assert time.monotonic() < deadline, f"{self.args[0]} hangs"
            self.wait(deadline - time.monotonic())
        for process in self.processes:
            process.terminate()  # nothing to those that are done
            process.join(30)  # then __exit__ kills it
        codes = [process.exitcode for process in self.processes]
        return subprocess.CompletedProcess(self.args, codes[0] if len(codes) == 1 else int(any(codes)), *self._texts())

    def _texts(self) -> list[str]:
        return [path.read_text(encoding="utf-8") if path.is_file() else "" for path in self.outputs]


def forked(ranks: int, script: str, *flags: object, timeout: float = PATIENCE) -> subprocess.CompletedProcess:
    with Ranks(ranks, script, *flags) as started:
        return started.end(timeout)


def run_and_kill(ranks: int, script: str, *flags: object, folder: Path, after_step: int, delay: float = 0) -> None:
    """Start a run and `kill -9` its ranks after it logged `after_step`, at one of rank 0's next operations on files in
    `folder`: before another line, or within a save. The script's name is the seed by which it is drawn; `delay` says
    nothing any more."""
    operation = random.Random(Path(script).name).randrange(12)  # the last save alone has ten
    moment = Moment(folder, after_step, operation)
    with Ranks(ranks, script, *flags, moment=moment) as started:
        started.until_frozen()


def _be_a_rank(
    script: str, flags: list[str], variables: dict[str, str], outputs: list[Path], moment: Moment | None
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = [script, *flags]
    if moment:
        moment.watch()
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except Exception:  # as the interpreter would: multiprocessing has a way of its own
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def metrics(folder: Path) -> list[dict]:
    """Whole lines: a run may be writing the last one."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines(True) if line.endswith("\n")]


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "hf" / "model.safetensors")


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, from /proc."""
    children = []
    with contextlib.suppress(OSError):  # it may end meanwhile
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, file.read_text().split())
    return children + [p for child in children for p in descendants(child)]


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
