"""One confined process of `common/sandbox/program.py`, seen from outside: its start, its pipes, its limits, its end."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from common.sandbox.child import MEMORY_EXIT, READY
from common.sandbox.confine import THREADS

# Imported, not run by path: so the compiled files that the parent's own import has left are used.
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); import confine, child; del sys.path[0]; "
    "child.main(confine.confine, *sys.argv[2:])"
)
OPTIONS = ("-I", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")  # integers of any length can be printed
START_SECONDS = 60  # for the interpreter to start on a busy machine; not counted as the program's time
POLL_SECONDS = 0.02  # between looks at the directory and the threads


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 5.0
    """Wall-clock time of its whole life, from its first line. For all tests of a completion in code_reward.py."""
    memory_mib: int = 512
    """Address space; 50 are the interpreter's own."""
    output_bytes: int = 1 << 20
    """On stdout, or of one answer to a call."""
    file_mib: int = 16
    """The largest file."""
    disk_mib: int = 64
    """All files in its directory; it cannot delete any."""
    files: int = 256
    """In its directory."""


class ProgramError(Exception):
    """A program has no answer to a call. `kind`: "raised" (then `types` are the names of the exception's classes, most
    special first), "cannot be passed" (the value is no plain one), "malformed" (its answer is none), or what ended it,
    like `Outcome.status`."""

    def __init__(self, kind: str, message: str = "", types: tuple[str, ...] = ()):
        super().__init__(": ".join(part for part in (kind, *types[:1], message) if part))
        self.kind, self.message, self.types = kind, message, types


class Child:
    """One confined process with its directory and pipes, ready to run; `close` leaves nothing of it."""

    def __init__(self, mode: str, source: str, limits: Limits, unsafe: bool, stdin: str = ""):
        self.limits, self.open, self.next_look = limits, set(), float("inf")  # not while it starts
        self.folder: str | None = None
        self.beside: Child | None = None  # watched while this one is waited for
        self.deadline = time.monotonic() + START_SECONDS
        self.stack = contextlib.ExitStack()
        try:
            self._start(mode, source, unsafe, stdin)
            if (start := self.read(self.answers, len(READY))) != READY:
                what = (start + self.read(self.answers)).decode("utf-8", "replace") or died(self.wait())
                raise RuntimeError(f"a program could not be confined: {what}")
        except BaseException as error:
            self.close()
            if isinstance(error, ProgramError):
                raise RuntimeError(f"the interpreter for a program did not start: {error}") from error
            if isinstance(error, OSError):  # no descriptors, no processes or no room left, no TMPDIR
                raise RuntimeError(f"a program could not be started: {error}") from error
            raise
        self.deadline, self.next_look = time.monotonic() + limits.seconds, 0.0

    def _start(self, mode: str, source: str, unsafe: bool, stdin: str) -> None:
        # undone in the reverse order: kill, close, remove
        self.stack.callback(self._remove, unsafe)
        ends = {name: self._pipe() for name in ("requests", "answers", "stdout")}
        # After the pipes: to remove it takes descriptors, which there are once they are closed.
        self.folder = tempfile.mkdtemp(prefix="onefile-sandbox-")
        files = [self.stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        for file, text in zip(files, (source, stdin), strict=True):
            file.write(text.encode("utf-8", "surrogatepass"))
            file.seek(0)
        theirs = (files[0].fileno(), ends["requests"][0], ends["answers"][1])
        rest = (self.limits.memory_mib, self.limits.file_mib, int(2 * self.limits.seconds) + 2, int(unsafe))
        python = getattr(sys, "_base_executable", None) or sys.executable  # not the virtual environment's
        options = (*OPTIONS, "-c", START, os.path.dirname(os.path.abspath(__file__)))
        self.process = subprocess.Popen(
            [python, *options, mode, *map(str, (os.getpid(), *theirs, *rest))],
            stdin=files[1], stdout=ends["stdout"][1] if mode == "program" else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, cwd=self.folder, env={}, pass_fds=theirs, start_new_session=True,
        )  # fmt: skip
        self.stack.callback(self._kill)
        for fd in (*theirs[1:], ends["stdout"][1]):
            self._close(fd)
        self.requests, self.answers, self.stdout = ends["requests"][1], ends["answers"][0], ends["stdout"][0]
        os.set_blocking(self.requests, False)

    def _remove(self, unsafe: bool) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=unsafe)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self.open |= set(ends)
        for fd in ends:
            self.stack.callback(self._close, fd)
        return ends

    def _close(self, fd: int) -> None:
        if fd in self.open:
            self.open.remove(fd)
            os.close(fd)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the process with all of its group, if it still runs; closes the pipes; removes the directory."""
        try:
            self.stack.close()
        except OSError as error:
            raise RuntimeError(f"a program could not be removed: {error}") from error

    def _kill(self) -> None:
        # Not reaped before: until then no other process can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def read(self, fd: int, size: int = 1 << 16) -> bytes:
        """What there is to read, at least one byte; none at the end. Raises `ProgramError` at a limit."""
        self._wait_for(fd, select.POLLIN)
        return os.read(fd, size)

    def write(self, data: bytes) -> None:
        """All of `data` as a request. Raises `ProgramError` at a limit, and if nobody reads it."""
        view = memoryview(data)
        while view:
            self._wait_for(self.requests, select.POLLOUT)
            try:
                view = view[os.write(self.requests, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ProgramError(died(self.wait())) from None

    def _wait_for(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while not poll.poll(1000 * min(POLL_SECONDS, self._time_left())):
            self._watch()
        self._watch()

    def wait(self) -> int:
        """The exit code, or minus the signal that killed it. Raises `ProgramError` at a limit."""
        while not (ended := os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            self._watch()
            time.sleep(min(0.001, self._time_left()))
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _time_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise ProgramError("time limit")
        return left

    def _watch(self) -> None:
        """Raises `ProgramError` when the directory or the number of threads has outgrown the limits."""
        if (now := time.monotonic()) < self.next_look:  # also while it writes without a pause
            return
        self.next_look, size, count = now + POLL_SECONDS, 0, 0
        if self.beside:
            self.beside._watch()
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    count, size = count + 1, size + entry.stat(follow_symlinks=False).st_blocks * 512
                    if count > self.limits.files or size > self.limits.disk_mib << 20:
                        raise ProgramError("disk limit")
        except OSError as error:  # no descriptors left
            raise RuntimeError(f"a program could not be watched: {error}") from error
        with contextlib.suppress(OSError):  # no /proc, or it hides other processes
            if os.stat(f"/proc/{self.process.pid}/task").st_nlink - 2 > THREADS:
                raise ProgramError("thread limit")


def died(code: int) -> str:
    if code < 0:
        return f"killed by signal {-code}"
    return "memory limit" if code == MEMORY_EXIT else f"exit code {code}"
