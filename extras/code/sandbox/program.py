"""Untrusted Python, such as programs that a model wrote, run in a process that has confined itself
(confine.py).

`run_program` gives a program its stdin and returns its stdout; `Program` calls its functions. The
program gets inputs alone; the caller judges the outputs. About 20 ms a run, most of it the start of
an interpreter."""

import functools
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from extras.code.sandbox.child import CannotPass, decode, encode
ARCHITECTURES = ("x86_64", "aarch64")
from extras.code.sandbox.process import Child, Limits, ProgramError, died


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run."""

    status: str
    """"ok", "exit code 3", "killed by signal 11", "time limit", "memory limit", "output limit",
    ..."""
    stdout: str
    """output up to the limit; bytes that are not UTF-8 are U+FFFD"""
    seconds: float = field(default=0.0, compare=False)
    """time from its first line"""


def run_program(
    source: str, stdin: str = "", limits: Limits | None = None, unsafe: bool = False
) -> Outcome:
    """Run `source` as `python program.py < stdin`.

    Where `problem()` is not None, this raises `ValueError`, or with `unsafe` uses the layers that
    the machine has. Raises `RuntimeError` if the interpreter does not start or the machine has no
    room for it."""
    require_confinement(unsafe)
    with Child("program", source, limits or Limits(), unsafe, stdin) as child:
        output = bytearray()
        try:
            while chunk := child.read(child.stdout):
                output += chunk
                if len(output) > child.limits.output_bytes:
                    raise ProgramError("output limit")
            code = child.wait()
            status = "ok" if code == 0 else died(code)
        except ProgramError as error:
            status = error.kind
        seconds = child.limits.seconds - (child.deadline - time.monotonic())
    return Outcome(status, output[: child.limits.output_bytes].decode("utf-8", "replace"), seconds)


class Program(AbstractContextManager):
    """A program whose functions can be called, with plain values (see `child.encode`). A context
    manager. Generators, ranges and views are returned as iterators, bytearrays as bytes.

    The source is run as a module, without the code under `if __name__ == "__main__":`. For one
    thread, which must live as long. Raises what `run_program` does, and `ProgramError` if the
    source does not run."""

    def __init__(self, source: str, limits: Limits | None = None, unsafe: bool = False):
        require_confinement(unsafe)
        self.dead: ProgramError | None = None
        self.child = Child("calls", source, limits or Limits(), unsafe)
        try:
            self._value(self._answer())
        except BaseException:
            self.child.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.child.close()

    def call(
        self,
        function: str,
        args: list | tuple = (),
        kwargs: dict | None = None,
        answer: Callable | None = None,
    ) -> object:
        """Return `function(*args, **kwargs)`, where `function` is an expression. Raises `TypeError`
        if an argument is not plain, and `ProgramError`: the same in every later call if the program
        has ended or is "malformed".

        `answer` turns the JSON of a `question` into the JSON that the program's `__ask__(question)`
        returns; without it, a question is an error."""
        kwargs = {name: encode(value) for name, value in (kwargs or {}).items()}
        reply = self.exchange({"call": function, "args": encode(list(args)), "kwargs": kwargs})
        while "ask" in reply and answer is not None:
            reply = self.exchange(answer(reply["ask"]))
        return self._value(reply)

    def exchange(self, request: dict) -> dict:
        """Send one line of JSON and return the answer, values still encoded. Raises
        `ProgramError`."""
        if self.dead:
            raise self.dead
        try:
            self.child.write(json.dumps(request).encode() + b"\n")
            return self._answer()
        except ProgramError as error:
            raise self._end(error) from None

    def _answer(self) -> dict:
        line = bytearray()
        while not line.endswith(b"\n"):
            chunk = self.child.read(self.child.answers)
            if not chunk:
                raise ProgramError(died(self.child.wait()))
            line += chunk
            if len(line) > self.child.limits.output_bytes:
                raise ProgramError("output limit")
        return parse_answer(bytes(line))

    def _value(self, reply: dict) -> object:
        if "error" in reply:
            types, message = reply["error"]
            kind = "cannot be passed" if types[0] == "CannotPass" else "raised"
            raise ProgramError(kind, message, tuple(types))
        if "value" not in reply:
            raise self._end(ProgramError("malformed", "a question"))
        try:
            return decode(reply["value"])
        except CannotPass as error:
            raise ProgramError("cannot be passed", str(error)) from None
        except (ValueError, TypeError) as error:
            raise self._end(ProgramError("malformed", str(error))) from None

    def _end(self, error: ProgramError) -> ProgramError:
        self.dead = error
        self.child.close()
        return error


def parse_answer(line: bytes) -> dict:
    """Return `{"value": ...}`, `{"error": [[name, ...], message]}` or `{"ask": ...}`, or raise
    `ProgramError`."""
    try:
        reply = json.loads(line)  # bytes after the first line are an error too
    except (ValueError, RecursionError) as error:
        raise ProgramError("malformed", type(error).__name__) from None
    match reply:
        case {"error": [[str(), *types], str()], **rest} if not rest:
            if all(isinstance(name, str) for name in types):
                return reply
        case {"value": _, **rest} | {"ask": _, **rest} if not rest:
            return reply
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
    """Return why this machine cannot confine programs, None if it can. Runs one, once."""
    if sys.platform != "linux":
        return f"confining programs needs Linux, this is {sys.platform}"
    if platform.machine() not in ARCHITECTURES:
        machines = " and ".join(ARCHITECTURES)
        return f"confining programs is written for {machines}, this is {platform.machine()}"
    try:
        with Child("program", PROBE, Limits(seconds=30), unsafe=False) as child:
            left = child.read(child.stdout).decode().strip()
            code = child.wait()
    except (RuntimeError, OSError, ProgramError) as error:
        return str(error)
    if left:
        return f"a confined program was not stopped by {left}"
    if code:
        return f"a confined program failed: {died(code)}"
    return None


def require_confinement(unsafe: bool) -> None:
    if not unsafe and problem():
        raise ValueError(f"programs cannot be run safely here: {problem()}")
