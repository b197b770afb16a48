"""Starting processes, waiting for them and checking how they end: scripts in ranks that are forked
from a warm process (warm.py), or under torchrun."""

import contextlib
import faulthandler
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from subprocess import PIPE
from types import ModuleType

import pytest
import torch
import warm
from helpers import ROOT, logged, write

PATIENCE = 600  # seconds after which a process counts as hanging; no test depends on less
BAD_ENDS = ("CUDA Error", "Traceback", "Aborted", "terminate called", "pure virtual")


def environment(**variables: object) -> dict[str, str]:
    own = dict(OMP_NUM_THREADS=1, HF_HUB_OFFLINE=1) | variables
    return os.environ | {name: str(value) for name, value in own.items()}


def until(event: Callable[[], object]) -> object:
    """Wait until `event` returns a true value, and return that value."""
    deadline = time.monotonic() + PATIENCE
    while not (found := event()):
        assert time.monotonic() < deadline, "the event does not happen"
        time.sleep(0.01)
    return found


def alive(pid: int) -> bool:
    """Return whether a process has not ended yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children = []
    with contextlib.suppress(OSError):  # the process may end meanwhile
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, file.read_text().split())
    return children + [p for child in children for p in descendants(child)]


def kill(*pids: int) -> None:
    """Send SIGKILL to processes and all their descendants."""
    for each in [each for pid in pids for each in (pid, *descendants(pid))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Clock:
    """Replaces the module `time` in `modules`: its clock is ahead of the real one by the seconds
    that a test adds to `ahead`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType):
        self.ahead, self.sleep = 0.0, time.sleep
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def last(flags: Sequence[object]) -> list[str]:
    """Return a command line with each flag once, as given last: a test can replace listed flags."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in map(str, flags):
        if word.startswith("--"):
            name = word.partition("=")[0]
            found.pop(name, None)
        found.setdefault(name, []).append(word)
    return [word for words in found.values() for word in words]


def start(ranks: int, script: str | Path, *flags: object, **variables: object) -> subprocess.Popen:
    """Start a script by its command line; several ranks under torchrun."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    line = [sys.executable, *(torchrun if ranks > 1 else ()), ROOT / script, *last(flags)]
    pipes = dict(stdout=PIPE, stderr=PIPE, text=True)
    return subprocess.Popen(line, cwd=ROOT, env=environment(**variables), **pipes)


def ended(
    process: subprocess.Popen, ranks: Sequence[int] = (), timeout: float = PATIENCE
) -> subprocess.CompletedProcess:
    """Wait for a launcher and its ranks to end, which is when the last of them has closed the
    pipes. If they hang, kill all. torchrun gives each rank its own session, so `ranks` names those
    that may outlive the launcher."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        kill(process.pid, *ranks)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def finished(done: subprocess.CompletedProcess, code: int = 0) -> subprocess.CompletedProcess:
    """Check the exit code, and if it is 0 that neither Python nor CUDA reported an error."""
    text = done.stdout[-4000:] + done.stderr[-8000:]
    assert done.returncode == code, text
    assert code or not any(word in done.stdout + done.stderr for word in BAD_ENDS), text
    return done


def run(
    ranks: int, script: str | Path, *flags: object, code: int = 0,
    prepare: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess:  # fmt: skip
    """Run a script to its end in forked ranks, and check how it ended."""
    with Ranks(ranks, script, *flags, prepare=prepare) as started:
        return finished(started.end(), code)


def signal_at(rank: int, function: str, folder: Path, step: int, signals: list[int]) -> None:
    """Let a rank send itself signals at a defined moment, however fast the machine is: one at each
    of its next calls of `function`, such as `os.rename`, after `folder` has logged `step`."""
    owner, _, name = function.rpartition(".")
    owner, original, pending = resolve_name(owner), resolve_name(function), list(signals)

    def signalling(*args, **named):
        while pending and logged(folder, step):
            os.kill(os.getpid(), pending.pop(0))
        return original(*args, **named)

    if os.environ.get("RANK", "0") == str(rank):
        setattr(owner, name, signalling)


def run_and_kill(
    ranks: int, script: str | Path, *flags: object, folder: Path, after_step: int, at: str
) -> None:
    """Run a script, and send SIGKILL to all ranks when rank 0 first calls the function `at` after
    it logged `after_step`."""
    prepare = partial(signal_at, 0, at, folder, after_step, [signal.SIGKILL])
    with Ranks(ranks, script, *flags, prepare=prepare) as started:
        started.processes[0].join(PATIENCE)
        assert started.processes[0].exitcode == -signal.SIGKILL, started.end()


def the_error(stderr: str) -> str:
    """Return the project's error line from stderr. torchrun's own summary follows it there."""
    ours = stderr.split("torch/distributed/elastic")[0]
    assert "Traceback" not in ours, ours
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def one_error(ranks: int, script: str, *flags) -> str:
    """Run a script that must fail, and return its error. All ranks must end: those that wait for a
    failed rank would hang the test."""
    return the_error(run(ranks, script, *flags, code=1 if ranks > 1 else 2).stderr)


class Ranks:
    """The ranks of a script, or of the text of one, without the start-up of torchrun. Each rank
    calls `prepare` first. At the end of the context all of them are killed."""

    def __init__(
        self,
        ranks: int,
        script: str | Path,
        *flags: object,
        prepare: Callable[[], object] | None = None,
    ):
        self.folder = tempfile.TemporaryDirectory()
        if "\n" in str(script):
            script = write(Path(self.folder.name, "program.py"), str(script))
        words = [str(script), *last(flags)]
        self.store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.processes = []
        for name in ("stdout", "stderr"):
            Path(self.folder.name, name).touch()
        for rank in range(ranks):
            place = dict(
                RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=self.store.port,
                TORCHELASTIC_USE_AGENT_STORE=True,
            )  # fmt: skip
            variables = environment(**(place if ranks > 1 else {}))
            process = warm.context().Process(
                target=_be_a_rank, args=(words, variables, self.folder.name, prepare)
            )
            process.start()
            self.processes.append(process)
        self.pids = [process.pid for process in self.processes]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        kill(*(process.pid for process in self.processes if process.exitcode is None))
        for process in self.processes:
            process.join()
        self.folder.cleanup()

    def end(self) -> subprocess.CompletedProcess:
        """Wait until all ranks have ended or one has failed, then terminate the others, as torchrun
        does. The exit code of several ranks is 1 if one has failed."""
        while (running := [p for p in self.processes if p.exitcode is None]) and not any(
            p.exitcode for p in self.processes
        ):
            if not multiprocessing.connection.wait([p.sentinel for p in running], PATIENCE):
                for process in running:
                    os.kill(process.pid, signal.SIGUSR2)  # writes its stacks to stderr
                    time.sleep(1)
                raise AssertionError(
                    "the ranks hang:\n" + Path(self.folder.name, "stderr").read_text()[-8000:]
                )
        for process in self.processes:
            process.terminate()
            process.join(30)  # then __exit__ kills the rank
        codes, files = [process.exitcode for process in self.processes], Path(self.folder.name)
        texts = [(files / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
        code = codes[0] if len(codes) == 1 else int(any(codes))
        return subprocess.CompletedProcess([], code, *texts)


def _be_a_rank(
    words: list[str], variables: dict[str, str], folder: str, prepare: Callable[[], object] | None
) -> None:
    for descriptor, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.register(signal.SIGUSR2)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = words
    try:
        if prepare:
            prepare()
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # multiprocessing would report it itself; a script has its own hook
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
