"""One confined process, seen from its parent: start, pipes, limits and end."""

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
from typing import IO

from extras.code.sandbox.child import MEMORY_EXIT, READY
from extras.code.sandbox.confine import THREADS

# Imports, so that the child uses the compiled files of these modules that the parent's import
# wrote.
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); import confine, child; "
    "child.main(confine.confine, *sys.argv[2:])"
)
OPTIONS = "-I -S -B -X utf8 -X int_max_str_digits=0".split()  # the last: integers of any length
START_SECONDS = 60  # the interpreter's start on a busy machine; the program's time begins after it
POLL_SECONDS = 0.02  # between looks at the directory and the threads
# Of all files in a program's directory, which cannot delete any. confine.py has more limits.
DISK_MIB = 64
FILES = 256


@dataclass(frozen=True)
class Limits:
    """Limits of one program."""

    seconds: float = 5.0
    """wall-clock time of its whole life, from its first line; in a reward, of all tests together"""
    start_seconds: float = START_SECONDS
    output_bytes: int = 1 << 20
    """of its stdout, or of one answer to a call"""


class ProgramError(Exception):
    """A program gave no answer to a call. `kind`: "raised" (`types` are then the names of the
    exception's classes, the most special first), "malformed" (what came is no answer), or how the
    program ended, like `Outcome.status`."""

    def __init__(self, kind: str, message: str = "", types: tuple[str, ...] = ()):
        super().__init__(": ".join(filter(None, (kind, *types[:1], message))))
        self.kind = kind
        self.message = message
        self.types = types


class Child(contextlib.AbstractContextManager):
    """A confined process and its directory, ready to run (child.py). `close` removes both."""

    def __init__(
        self,
        mode: str,
        source: bytes,
        limits: Limits,
        unsafe: bool,
        stdin: bytes = b"",
        pipes: tuple[int, ...] = (),
    ):
        self.limits = limits
        self.next_look = float("inf")  # no looks while it starts
        self.folder: str | None = None
        self.beside: Child | None = None  # another process to watch while this one is waited for
        self.deadline = time.monotonic() + limits.start_seconds
        self.received = bytearray()
        self.stack = contextlib.ExitStack()  # undone in reverse order: kill, close, remove
        try:
            self._start(mode, source, unsafe, stdin, pipes)
            start = self.read(self.output, len(READY))
            if start != READY:
                problem = (start + self.read(self.output)).decode("utf-8", "replace")
                problem = problem or died(self.wait())
                raise RuntimeError(f"a program could not be confined: {problem}")
        except BaseException as error:
            self.close()
            if isinstance(error, ProgramError):
                problem = f"the interpreter for a program did not start: {error}"
                raise RuntimeError(problem) from error
            if isinstance(error, OSError):  # no descriptors, processes or room left, no TMPDIR
                raise RuntimeError(f"a program could not be started: {error}") from error
            raise
        self.deadline = time.monotonic() + limits.seconds
        self.next_look = 0.0

    def _start(
        self, mode: str, source: bytes, unsafe: bool, stdin: bytes, pipes: tuple[int, ...]
    ) -> None:
        self.stack.callback(self._remove_folder, unsafe)
        self.output, output = new_pipe(self.stack)
        # Made after the pipe, so removed after its end: removal needs descriptors, which are free
        # then.
        self.folder = tempfile.mkdtemp(prefix="onefile-sandbox-")
        files = [self.stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        for file, data in zip(files, (source, stdin), strict=True):
            file.write(data)
            file.seek(0)
        descriptors = (files[0].fileno(), output.fileno())
        cpu_seconds = int(2 * self.limits.seconds) + 2
        # the interpreter that the virtual environment was made from
        python = getattr(sys, "_base_executable", None) or sys.executable
        modules = os.path.dirname(os.path.abspath(__file__))
        words = [modules, mode, os.getpid(), *descriptors, " ".join(map(str, pipes))]
        self.process = subprocess.Popen(
            [python, *OPTIONS, "-c", START, *map(str, [*words, cpu_seconds, int(unsafe)])],
            stdin=files[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env={},
            pass_fds=(*descriptors, *pipes),
            start_new_session=True,
        )
        self.stack.callback(self._kill)
        output.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and its group, close the pipes and remove the directory."""
        try:
            self.stack.close()
        except OSError as error:
            raise RuntimeError(f"a program could not be removed: {error}") from error

    def _remove_folder(self, unsafe: bool) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=unsafe)

    def _kill(self) -> None:
        # Not reaped yet, so no other process can have its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def read(self, pipe: IO[bytes], size: int = 1 << 16) -> bytes:
        """Return the bytes that have come, at least one, or none at the end. Raises `ProgramError`
        at a limit."""
        self._wait_for(pipe, select.POLLIN)
        return pipe.read(size)

    def read_line(self, pipe: IO[bytes]) -> bytes:
        """Return the next line, always of the same pipe. Raises `ProgramError` at a limit or the
        end."""
        while b"\n" not in self.received:
            chunk = self.read(pipe)
            if not chunk:
                raise ProgramError(died(self.wait()))
            self.received += chunk
            if len(self.received) > self.limits.output_bytes:
                raise ProgramError("output limit")
        line, _, self.received = self.received.partition(b"\n")
        return bytes(line)

    def write(self, pipe: IO[bytes], data: bytes) -> None:
        """Write all of `data`. Raises `ProgramError` at a limit, or if the process does not
        read."""
        view = memoryview(data)
        while view:
            self._wait_for(pipe, select.POLLOUT)
            try:
                view = view[pipe.write(view) or 0 :]
            except BrokenPipeError:
                raise ProgramError(died(self.wait())) from None

    def _wait_for(self, pipe: IO[bytes], event: int) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(1000 * min(POLL_SECONDS, self._time_left())):
            self._watch()
        self._watch()

    def wait(self) -> int:
        """Return the exit code, or minus the signal that killed the process. Raises `ProgramError`
        at a limit."""
        while True:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self.process.pid, options)
            if ended:
                exited = ended.si_code == os.CLD_EXITED
                return ended.si_status if exited else -ended.si_status
            self._watch()
            time.sleep(min(0.001, self._time_left()))

    def _time_left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise ProgramError("time limit")
        return left

    def _watch(self) -> None:
        """Raise `ProgramError` if the directory or the number of threads is above its limit."""
        now = time.monotonic()
        if now < self.next_look:  # also while it writes without a pause
            return
        self.next_look = now + POLL_SECONDS
        if self.beside:
            self.beside._watch()
        count = 0
        size = 0
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if count > FILES or size > DISK_MIB << 20:
                        raise ProgramError("disk limit")
        except OSError as error:  # no descriptors left
            raise RuntimeError(f"a program could not be watched: {error}") from error
        with contextlib.suppress(OSError):  # no /proc, or it hides other processes
            if os.stat(f"/proc/{self.process.pid}/task").st_nlink - 2 > THREADS:
                raise ProgramError("thread limit")


def new_pipe(stack: contextlib.ExitStack) -> list[IO[bytes]]:
    """Return the two ends of a pipe, to read and to write. The stack closes both."""
    try:
        ends = zip(os.pipe(), ("rb", "wb"), strict=True)
    except OSError as error:  # no descriptors left
        raise RuntimeError(f"a program could not be started: {error}") from error
    return [stack.enter_context(open(end, mode, buffering=0)) for end, mode in ends]


def died(code: int) -> str:
    if code < 0:
        return f"killed by signal {-code}"
    return "memory limit" if code == MEMORY_EXIT else f"exit code {code}"
