"""Text that a process prints about the exception that ends it: one line, or the traceback of a bug."""

import traceback
from pathlib import Path
from types import TracebackType

from common.parallel.disk_errors import disk_error

PROJECT = Path(__file__).resolve().parents[2]


class RunError(RuntimeError):
    """Error that ends a run, such as a NaN gradient: one line, exit code 1. Bad input is a ValueError: exit code 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0]


def gloo_message(error: BaseException) -> str:
    """Return the message of an error of gloo without its advice."""
    return first_line(error).partition(". This is typically")[0]


def explain(error: BaseException, trace: TracebackType | None, rank: int, stop_signal: int | None) -> tuple[int, str]:
    """Return the exit code of an uncaught exception of a rank and its line, or the traceback of a bug. `stop_signal`:
    the signal that the rank has received."""
    bad_input = isinstance(error, ValueError) and _raised_here(trace)
    if isinstance(error, RunError) or bad_input:
        return 2 if bad_input else 1, f"error: {' '.join(str(error).splitlines())}"  # file names may have line breaks
    if isinstance(error, KeyboardInterrupt):
        return 1, "interrupted"
    if problem := disk_error(error):
        return 1, f"error: {problem}"
    if isinstance(error, RuntimeError) and ("by peer" in str(error) or "gloo/transport" in str(error)):
        return 1, f"error: rank {rank} lost another rank: {gloo_message(error)}"
    if stop_signal is not None:
        return 1, f"error: stopped by signal {stop_signal} inside a collective: {first_line(error)}"
    stacks = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return 1, f"rank {rank} failed:\n{stacks}"


def _raised_here(trace: TracebackType | None) -> bool:
    """Return whether a script or a module of common/ raised an exception."""
    if trace is None:
        return False
    name = traceback.extract_tb(trace)[-1].filename
    try:
        file = Path(name).resolve()
    except FileNotFoundError:  # the working directory was deleted; scripts may have names relative to it
        file = PROJECT / name
    return file.parent == PROJECT or PROJECT / "common" in file.parents
