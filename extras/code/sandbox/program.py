"""Runs untrusted Python, such as a model's programs, in a process that confines itself
(confine.py).

`run_program` gives a program its stdin and returns its stdout. `run_tests` runs tests that call a
program's functions. With `Program` the caller itself calls them. A process takes about 20 ms, most
of it to start an interpreter."""

import functools
import json
import marshal
import os
import platform
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from extras.code.sandbox.process import Child, Limits, ProgramError, died, new_pipe

MACHINES = ("x86_64", "aarch64")  # whose arguments of system calls confine.py knows


@dataclass(frozen=True)
class Outcome:
    """How a run of a program ended."""

    status: str
    """"ok", "exit code 3", "killed by signal 11", "time limit", "memory limit", "output limit",
    ..."""
    stdout: str
    """output up to the limit; bytes that are not UTF-8 become U+FFFD"""
    seconds: float = field(default=0.0, compare=False)
    """time since its first line"""


def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, unsafe: bool = False
) -> Outcome:
    """Run `source` as `python program.py < stdin`.

    If `problem()` says that this machine cannot confine it, raise `ValueError`, or with `unsafe`
    use the layers that there are. Raises `RuntimeError` if the interpreter does not start or the
    machine has no room for it."""
    require_confinement(unsafe)
    limits = limits or Limits()
    with Child("program", to_bytes(source), limits, unsafe, to_bytes(stdin)) as child:
        output = bytearray()
        try:
            while chunk := child.read(child.output):
                output += chunk
                if len(output) > limits.output_bytes:
                    raise ProgramError("output limit")
            code = child.wait()
            status = "ok" if code == 0 else died(code)
        except ProgramError as error:
            status = error.kind
        seconds = limits.seconds - (child.deadline - time.monotonic())
    return Outcome(status, output[: limits.output_bytes].decode("utf-8", "replace"), seconds)


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def run_tests(
    source: str, tests: list[tuple], limits: Limits, unsafe: bool = False
) -> Generator[bool | str, None, None]:
    """Yield for each test whether `source` passes it, or why no program could. When the program or
    the judge has ended, nothing is yielded for the remaining tests. A test is `("call", function,
    args, kwargs, results)` or `("run", source, setup, candidate)` (judge.py). Raises what
    `run_program` does, and `ValueError` if a test has values that JSON lacks.

    The judge and the program are two processes, joined by two pipes."""
    if not tests:
        return
    require_confinement(unsafe)
    data = marshal.dumps((limits.output_bytes, *tests))
    with ExitStack() as stack:
        requests, questions = new_pipe(stack)
        answers, replies = new_pipe(stack)
        judge = Child("judge", data, limits, unsafe, b"", (questions.fileno(), answers.fileno()))
        stack.enter_context(judge)
        ends = (requests.fileno(), replies.fileno())
        program = Child("functions", to_bytes(source), limits, unsafe, b"", ends)
        stack.enter_context(program)
        for end in (requests, questions, answers, replies):
            end.close()
        judge.deadline = program.deadline
        judge.beside = program
        with suppress(ProgramError):
            for _ in tests:
                yield json.loads(judge.read_line(judge.output))


class Program:
    """A program whose functions the caller can call, with values of JSON. Its thread must live as
    long. Raises what `run_program` does, and `ProgramError` if the source fails."""

    def __init__(self, source: str, limits: Limits | None = None, unsafe: bool = False):
        require_confinement(unsafe)
        self.stack = ExitStack()
        try:
            requests, self.requests = new_pipe(self.stack)
            self.answers, answers = new_pipe(self.stack)
            ends = (requests.fileno(), answers.fileno())
            self.child = Child("functions", to_bytes(source), limits or Limits(), unsafe, b"", ends)
            self.stack.enter_context(self.child)
            requests.close()
            answers.close()
            os.set_blocking(self.requests.fileno(), False)
            self._answer()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.stack.close()

    def call(self, function: str, *args: object) -> object:
        """Return `function(*args)`; `function` is an expression. Raises `ProgramError`. If the
        program has ended, every later call raises it with the same `kind`."""
        request = {"call": function, "args": args, "kwargs": {"dict": []}}
        self.child.write(self.requests, json.dumps(request).encode() + b"\n")
        return self._answer()

    def _answer(self) -> object:
        line = self.child.read_line(self.answers)
        try:
            match json.loads(line):
                case {"value": value}:
                    return value
                case {"error": [[*types], message]}:
                    raise ProgramError("raised", str(message), tuple(map(str, types)))
        except (ValueError, RecursionError):
            pass
        raise ProgramError("malformed")


# ---- the machine ----

PROBE = """
import os, socket
def refused(what, *args):
    try:
        what(*args)
    except OSError:
        return True
checks = {
    "Landlock": [(open, "/etc/passwd"), (open, "/proc/self/status"), (open, os.pardir + "/x", "w")],
    "seccomp": [(os.fork,), (socket.socket,), (os.kill, os.getppid(), 0), (os.chmod, ".", 0o700),
                (os.open, "/dev/null", 3), (os.open, "/dev/null", os.O_RDONLY | os.O_TRUNC),
                (os.open, ".", os.O_RDWR | os.O_TMPFILE)],
}
print(*[layer for layer in checks if not all(refused(*check) for check in checks[layer])])
"""


@functools.cache
def problem() -> str | None:
    """Return why this machine cannot confine programs, or None if it can. It tries once, with a
    program that must be refused everything."""
    if sys.platform != "linux":
        return f"confining programs needs Linux, this is {sys.platform}"
    if platform.machine() not in MACHINES:
        return f"confining programs needs {' or '.join(MACHINES)}, this is {platform.machine()}"
    try:
        with Child("program", PROBE.encode(), Limits(seconds=30), unsafe=False) as child:
            left = child.read(child.output).decode().strip()
            code = child.wait()
    except (RuntimeError, OSError, ProgramError) as error:
        return str(error)
    if left:
        return f"a confined program was not stopped by {left}"
    if code:
        return f"a confined program failed: {died(code)}"
    return None


def require_confinement(unsafe: bool, what: str = "programs cannot be run safely here") -> None:
    """Raise `ValueError` that begins with `what` if this machine cannot confine programs, unless
    `unsafe`."""
    if not unsafe and problem():
        hint = "--unsafe_code_execution runs programs without this protection"
        raise ValueError(f"{what}: {problem()}; {hint}")
