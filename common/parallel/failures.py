"""Text that a process prints about the exception that ends it: one line, or the traceback of a
bug."""

import errno
import os
import re
import traceback
from pathlib import Path
from types import TracebackType

DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
PROJECT = Path(__file__).resolve().parents[2]


class RunError(RuntimeError):
    """Error that ends a run, such as a NaN gradient: one line, exit code 1. Bad input is a
    ValueError: exit code 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().split("\n")[0]


def gloo_message(error: BaseException) -> str:
    """Return the message of an error of gloo without its advice."""
    return first_line(error).partition(". This is typically")[0]


def explain(
    error: BaseException, trace: TracebackType | None, rank: int, stop_signal: int | None
) -> tuple[int, str]:
    """Return the exit code of an uncaught exception of a rank and its line, or the traceback of a
    bug. `stop_signal`: the signal that the rank has received."""
    bad_input = isinstance(error, ValueError) and _raised_here(trace)
    if isinstance(error, RunError) or bad_input:
        line = " ".join(str(error).splitlines())  # file names may have line breaks
        return 2 if bad_input else 1, f"error: {line}"
    if isinstance(error, KeyboardInterrupt):
        return 1, "interrupted"
    problem = disk_error(error)
    if problem:
        return 1, f"error: {problem}"
    message = str(error)
    if isinstance(error, RuntimeError) and ("by peer" in message or "gloo/transport" in message):
        return 1, f"error: rank {rank} lost another rank: {gloo_message(error)}"
    if stop_signal is not None:
        return 1, f"error: stopped by signal {stop_signal} inside a collective: {first_line(error)}"
    stacks = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return 1, f"rank {rank} failed:\n{stacks}"


def _raised_here(trace: TracebackType | None) -> bool:
    """Return whether a file of the project raised an exception."""
    if trace is None:
        return False
    name = traceback.extract_tb(trace)[-1].filename
    try:
        file = Path(name).resolve()
    except FileNotFoundError:
        # the working directory was deleted; scripts may have names relative to it
        file = PROJECT / name
    folders = {PROJECT / name for name in ("common", "extras", "tools")}
    return file.parent == PROJECT or not folders.isdisjoint(file.parents)


# ---- errors of a full, read-only or failing disk, and of files that vanish ----


def disk_error(error: BaseException) -> str | None:
    """Return a line about the disk if an exception comes from an error of the disk, however deep,
    else None.

    Libraries raise other errors while they handle the disk's, and PyTorch's checkpoints collect the
    errors of all ranks in `failures`."""
    pending = [error]
    seen = set()
    while pending:
        cause = pending.pop()
        problem = _problem_of_disk(cause)
        if problem is not None:
            intact = "files that were complete before are intact"
            return f"writing to the disk failed: {problem}; {intact}"
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            pending += [cause.__cause__, cause.__context__, *_failures(cause)]
    return next(filter(None, map(_vanished, (error, *_failures(error)))), None)


def _failures(error: BaseException) -> list[BaseException]:
    return [failure for failure, *_ in (getattr(error, "failures", None) or {}).values()]


def _problem_of_disk(error: BaseException | None) -> str | None:
    if isinstance(error, OSError) and error.errno in DISK:
        place = f" ({error.filename})" if error.filename else ""
        return f"{os.strerror(error.errno)}{place}"
    number = re.search(r"\(os error (\d+)\)", str(error))  # a library in Rust
    if number and int(number[1]) in DISK:
        return os.strerror(int(number[1]))
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        return "it is full or damaged"  # PyTorch's writer hides the error
    return None


def _vanished(error: BaseException) -> str | None:
    """Return a line if a path with a folder does not exist, else None. Libraries handle such errors
    all the time: the causes of other errors do not count. A name without a folder may be a program
    that is not installed."""
    if not isinstance(error, FileNotFoundError):
        return None
    if error.filename is None:  # of os.getcwd
        return "the working directory was deleted"
    if "/" not in str(error.filename):
        return None
    problem = "it was deleted or moved during the run, or its folder was"
    return f"{error.filename}: {problem}; the run cannot continue"
