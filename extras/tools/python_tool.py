"""`--tools python`: a confined Python interpreter (extras/code/sandbox/) whose state stays between
the calls of an episode. Between calls it is stopped, since nobody watches what its threads do
then."""

import os
import signal
import time
from functools import partial
from itertools import count

from extras.code.sandbox import program
from extras.code.sandbox.process import Limits, ProgramError

LIFE = 24 * 3600.0  # seconds that an interpreter may live
# This runs in the interpreter. `run` returns the number of the call, with what the program prints
# and the value of its last expression.
SOURCE = """
import ast, contextlib, io

names = {"__name__": "__main__"}


class Output(io.StringIO):
    def write(self, text):
        super().write(text[: max(0, 100_000 - self.tell())])
        return len(text)


def run(number, code):
    output = Output()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<call>", "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "<call>", "eval"), names)
                if value is not None:
                    print(repr(value))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
    text = output.getvalue().rstrip().encode("utf-8", "backslashreplace")  # of lone surrogates
    return [number, text.decode()]
"""


require_confinement = partial(program.require_confinement, what="--tools python")


class Interpreter:
    """The interpreter of one episode. It starts at its first call."""

    def __init__(self, seconds: float, unsafe: bool):
        """`seconds`: limit of one call, in which the interpreter may have to start first."""
        self.seconds = seconds
        self.unsafe = unsafe
        self.program: program.Program | None = None
        self.numbers = count()

    def python(self, code: str) -> str:
        """Run a Python program. Variables and functions stay for later calls.

        Args:
            code: the program; what it prints and the value of its last expression are returned
        """
        number = next(self.numbers)
        deadline = time.monotonic() + self.seconds
        try:
            if self.program is None:
                self.program = self._started()
            child = self.program.child
            child.deadline = deadline
            os.killpg(child.process.pid, signal.SIGCONT)
            match self.program.call("run", number, code):
                case [int(answered), str(text)] if answered == number:
                    os.killpg(child.process.pid, signal.SIGSTOP)
                    return text
            raise ProgramError("malformed")  # the program has answered in the place of `run`
        except ProgramError as error:
            self.close()
            kind = "memory limit" if "MemoryError" in error.types else error.kind
            problem = f"{kind}; the interpreter was restarted without its state"
            if kind == "time limit":
                raise TimeoutError(f"{self.seconds:g} s: {problem}") from error
            raise RuntimeError(problem) from error

    def _started(self) -> program.Program:
        limits = Limits(seconds=LIFE, start_seconds=self.seconds)
        try:
            return program.Program(SOURCE, limits, self.unsafe)
        except RuntimeError as error:
            if isinstance(error.__cause__, ProgramError) and error.__cause__.kind == "time limit":
                raise TimeoutError(f"{self.seconds:g} s: the interpreter did not start") from error
            raise

    def close(self) -> None:
        if self.program is not None:
            self.program.close()
            self.program = None
