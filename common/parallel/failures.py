"""How a process ends: with exit code 0 after the last line of a script, or with one message about
what went wrong.

Any rank may fail at any point. The first one prints a line, or the traceback of a bug; the others
see that and end silently. No rank waits for a dead one."""

import atexit
import contextlib
import ctypes
import errno
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from common.parallel import signals
from common.parallel.console import visible

PROJECT = Path(__file__).resolve().parents[2]
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
# PyTorch's writer of files, inline_container, does not say why it failed.
DISK_ERROR = re.compile(rf"^.*(?:{'|'.join(map(os.strerror, DISK))}|inline_container).*$", re.M)

# Called before an error is printed, for example to end a progress bar.
before_failing: list[Callable[[], None]] = []


class RunError(RuntimeError):
    """Error that ends a run, such as a NaN gradient: one line, exit code 1. Bad input is a
    ValueError: exit code 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without gloo's advice."""
    return str(error).strip().split("\n")[0].partition(". This is typically")[0]


# ---- exit code 0 ----


def end_process() -> None:
    """End this process after its threads and exit hooks, as the last line of a script. Return if
    another program, such as a profiler or pytest, runs the script and has work left.

    Python would finalize the interpreter. If a thread of gloo drops the last reference of a tensor
    meanwhile, the process aborts (2% of launches, before Python 3.14)."""
    callers = {frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(sys._getframe())}
    if all(name == "__main__" or name.startswith(("common.", "extras.")) for name in callers):
        threading._shutdown()  # joins the threads that are no daemons, as Python does
        atexit._run_exitfuncs()
        exit_now(0)


def exit_now(code: int) -> NoReturn:
    """End this process without finalizing the interpreter. As in Python, the code is 120 if output
    is lost."""
    try:
        print(end="", flush=True)
        print(end="", flush=True, file=sys.stderr)
    except (OSError, ValueError):  # the reader of a pipe has gone, or the stream is closed
        code = code or 120
    ctypes.CDLL(None).fflush(None)  # output of libraries in C
    os._exit(code)


# ---- one message ----


def fail(message: str, code: int) -> NoReturn:
    """Print `error: message` once on each machine and exit, for errors before the ranks have met.
    The launcher ends the other ranks: if one of them ended first, this one might not print."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(60)
    else:
        print(f"error: {visible(message)}", file=sys.stderr, flush=True)
    sys.exit(code)


def fail_in_thread(error: Exception) -> None:
    """End this process for an error in a thread: the main one may wait in a collective for ever."""
    sys.excepthook(type(error), error, error.__traceback__)


def report_and_exit(
    store: dist.Store | None, rank: int, kind: type, error: BaseException, trace: object
) -> NoReturn:
    """Handle an uncaught exception: `sys.excepthook` of every rank, with the store of the launch.

    The exit is immediate, as exit hooks of vLLM and NCCL wait for ranks that may be gone. Then the
    collectives of the other ranks fail, or the launcher ends them."""
    if threading.current_thread() is threading.main_thread():
        # The launcher signals this rank when another one ends. Print before; a second one kills.
        signals.install_signal_handlers()
    try:
        is_first = store is None or store.add("failed", 1) == 1
    except dist.DistError:  # the machine of the store is gone: each of the others prints a line
        is_first = os.environ["LOCAL_RANK"] == "0"
    if not is_first:
        deadline = time.monotonic() + 60
        while not signals.stop_signalled() and time.monotonic() < deadline:
            time.sleep(0.1)
        os._exit(1)
    code = 1
    try:
        for prepare in before_failing:
            with contextlib.suppress(OSError):  # the terminal has gone
                prepare()
        code, text = explain(error, rank)
        print(visible(text), file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # whatever happens here: other ranks may wait for the end of this one
        exit_now(code)


def explain(error: BaseException, rank: int) -> tuple[int, str]:
    """Return the exit code and the text for an uncaught exception: one line for bad input, which is
    a ValueError raised by the project, for a RunError, and for errors of the disk and of lost
    ranks. Anything else is a bug and keeps its traceback."""
    line = " ".join(str(error).splitlines())  # file names may have line breaks
    if isinstance(error, ValueError) and _raised_here(error):
        return 2, f"error: {line}"
    if isinstance(error, RunError):
        return 1, f"error: {line}"
    stacks = "".join(traceback.format_exception(error)).rstrip()
    # Anywhere in the text: libraries raise other errors while they handle the disk's.
    if problem := DISK_ERROR.search(stacks):
        intact = "files that were complete before are intact"
        return 1, f"error: writing to the disk failed: {problem[0].strip()}; {intact}"
    if isinstance(error, OSError) and error.filename:
        return 1, f"error: {line}"
    if isinstance(error, RuntimeError) and ("by peer" in line or "gloo/transport" in line):
        return 1, f"error: rank {rank} lost another rank: {first_line(error)}"
    return 1, f"rank {rank} failed:\n{stacks}"


def _raised_here(error: BaseException) -> bool:
    """Return whether a file of the project raised an exception, and no library."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    folders = {PROJECT / name for name in ("common", "extras", "tools")}
    return file.parent == PROJECT or not folders.isdisjoint(file.parents)
