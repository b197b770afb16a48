"""How a process stops at a signal, fails with one message, and ends.

Any rank may fail at any point. The first one prints a line, or the traceback of a bug; the others
see that and end silently. No rank waits for a dead one."""

import atexit
import ctypes
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

LONGEST = 1000  # characters of an error
REPORT = threading.Lock()  # taken for ever by the first thread that fails
PROJECT = Path(__file__).resolve().parents[2]
# The disk is full, fails, or is read-only.
DISK_ERROR = re.compile(
    "^.*(?:No space left|quota exceeded|File too large|Input/output error|Read-only file system"
    "|Stale file handle).*$",
    re.MULTILINE,
)
# Control characters (line feed and tab excepted), marks of direction, characters without width.
UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
)


def visible(text: str) -> str:
    r"""Return text whose control characters are escapes, such as \x1b. Line feeds and tabs stay."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def brief(text: str) -> str:
    """Return a message without the middle of a very long one, which has a user's value or the names
    of many columns."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"


def counted(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def print_any_text() -> None:
    """Make stdout print characters that its encoding lacks as escapes, as stderr does anyway.
    Programs call it first."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has another one
        sys.stdout.reconfigure(errors="backslashreplace")


# ---- a time limit ----

AGAIN = 0.1  # seconds between further interruptions of a late call


class Late(BaseException):
    """A call is late. It is no `Exception`, so that no `except Exception` of a library swallows
    it."""


class Alarm:
    """Handler of a signal: a call has reached its time limit."""

    is_late = False

    def __call__(self, _: int, frame: FrameType | None) -> None:
        """Raise `Late`, but not in a finalizer, which would print and forget it."""
        self.is_late = True
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if frame is None:
            raise Late


def within(seconds: float, function: Callable, *args: object, **kwargs: object) -> Any:
    """Return `function(*args, **kwargs)`. Raises `TimeoutError` after `seconds`, as soon as the
    interpreter can be interrupted. Outside of the main thread there is no limit, and a call within
    another limited call has only the outer limit."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or isinstance(signal.getsignal(signal.SIGALRM), Alarm):
        return function(*args, **kwargs)
    alarm = Alarm()
    value = None
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
            value = function(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException:  # whatever it makes of the interruption
        if not alarm.is_late:
            raise
    finally:
        signal.signal(signal.SIGALRM, before)
    if alarm.is_late:
        raise TimeoutError(f"no end within {seconds:g} s")
    return value


# ---- signals ----

stop_signalled = False  # true after one of these signals
ENDING = (signal.SIGTERM, signal.SIGINT)  # a second one ends the process
# A job's time is nearly over, or its terminal was closed, also twice.
STOPPING = (signal.SIGUSR1, signal.SIGHUP)
_terminals: list[int] = []  # descriptors of output that is lost with its terminal


def note_signals() -> None:
    """Make these signals request a stop, which a loop obeys where its state can be saved. SIGHUP
    stays ignored under nohup."""
    _terminals[:] = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    for signum in (*ENDING, *STOPPING):
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _note)


def _note(signum: int, frame: object) -> None:
    global stop_signalled
    stop_signalled = True
    if signum in ENDING:
        if signum == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            os.write(2, b"Ctrl-C: saves, then ends; a second one ends at once")
            if "TORCHELASTIC_RUN_ID" in os.environ:
                os.write(2, b", and torchrun after its --shutdown-timeout (30 s)")
            os.write(2, b"\n")
        signal.signal(signum, signal.SIG_DFL)
    if signum == signal.SIGHUP:  # printing to a closed terminal fails
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in _terminals:
            os.dup2(nowhere, descriptor)


# ---- the launcher ----

# Variables in which other launchers say how many processes they started, and which one this is.
LAUNCHERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # of srun alone: a batch script is one process
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


def require_torchrun() -> None:
    """Raise `ValueError` if this is one of several processes without a RANK: each would be a run of
    its own. All but the first end silently."""
    if "RANK" in os.environ:
        return
    found = dict(os.environ)
    if "SLURM_STEP_ID" in found:
        found.setdefault("SLURM_STEP_NUM_TASKS", found.get("SLURM_NTASKS", "1"))
    for size, number in LAUNCHERS:
        if (count := found.get(size, "")).isdigit() and int(count) > 1:
            if found.get(number, "0") != "0":
                time.sleep(60)  # see `fail`
                sys.exit(2)
            problem = f"one of {count} processes, but RANK is not set"
            advice = "start one torchrun on each machine (docs/scaling.md), or for separate runs"
            raise ValueError(f"{size} {count}: {problem}; {advice} torchrun --standalone in each")


# ---- errors ----


class RunError(RuntimeError):
    """Error that ends a run, such as a NaN gradient: one line, exit code 1. Bad input is a
    ValueError: exit code 2."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without gloo's advice, and the second one if the
    first ends with a colon; of an error without a message, its name."""
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    line, *others = str(error).strip().split("\n")
    if line.endswith(":") and others:
        line += f" {others[0].strip()}"
    return line.partition(". This is typically")[0] or name


def fail(message: str) -> NoReturn:
    """Print `error: message` once on each machine and exit, before the ranks have met. The launcher
    ends the other ranks: if one of them ended first, this one might not print."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(60)
    else:
        print(f"error: {visible(brief(message))}", file=sys.stderr)
    sys.exit(2)


def fail_in_thread(error: BaseException) -> None:
    """End this process for an error in a thread: the main one may wait in a collective for ever."""
    sys.excepthook(type(error), error, error.__traceback__)


def report_and_exit(store, rank: int, kind: type, error: BaseException, trace: object) -> NoReturn:
    """Handle an uncaught exception: `sys.excepthook` of every rank, with the store of the launch.

    The exit is immediate, as exit hooks of vLLM and NCCL wait for ranks that may be gone. Then the
    collectives of the other ranks fail, or the launcher ends them."""
    REPORT.acquire()
    code = 1
    try:
        if threading.current_thread() is threading.main_thread():
            note_signals()  # print first if the launcher ends this rank because another one ended
        try:
            is_first = store.add("failed", 1) == 1
        except RuntimeError:  # the store's machine is gone: every other machine prints a line
            is_first = os.environ["LOCAL_RANK"] == "0"
        if is_first:
            code, text = explain(error, rank)
            print(visible(text), file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:  # other ranks may wait for the end of this one
        exit_now(code)


def explain(error: BaseException, rank: int) -> tuple[int, str]:
    """Return the exit code and the text for an uncaught exception: one line for bad input, which is
    a ValueError raised by the project, and for what happens to a run. A bug keeps its traceback."""
    line = brief(" ".join(str(error).splitlines()))  # file names may have line breaks
    if isinstance(error, ValueError):
        file = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if file.is_relative_to(PROJECT) and "site-packages" not in file.parts:
            return 2, f"error: {line}"
    if isinstance(error, RunError):
        return 1, f"error: {line}"
    if type(error).__name__ == "OutOfMemoryError":  # torch raises it on CUDA
        advice = "lower --pack_tokens, or see --dry_run for what fits"
        return 1, f"error: rank {rank}: {line.partition('. GPU')[0]}; {advice}"
    if isinstance(error, MemoryError):
        return 1, f"error: rank {rank}: {first_line(error)}"
    stacks = "".join(traceback.format_exception(error)).rstrip()
    # A library may raise another error while it handles the disk's.
    if problem := DISK_ERROR.search(stacks):
        return 1, f"error: writing to the disk failed: {problem[0].strip()}"
    if isinstance(error, OSError) and error.filename:
        return 1, f"error: {line}"
    if is_lost_rank(error):
        return 1, f"error: rank {rank} lost another rank: {first_line(error)}"
    return 1, f"rank {rank} failed:\n{stacks}"


def is_lost_rank(error: BaseException) -> bool:
    """Return whether gloo reports that another rank has ended."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("by peer" in text or "gloo/transport" in text)


# ---- the end ----


def end_process() -> None:
    """End this process after its threads and exit hooks, as the last line of a script. Return if
    another program, such as a profiler or pytest, runs the script and has work left.

    Python would finalize the interpreter. If a thread of gloo drops the last reference of a tensor
    meanwhile, the process aborts: 2% of launches."""
    callers = {frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(sys._getframe())}
    if all(name == "__main__" or name.startswith(("common.", "extras.")) for name in callers):
        threading._shutdown()  # joins the threads that are no daemons, as Python does
        atexit._run_exitfuncs()
        exit_now(0)


def exit_now(code: int) -> NoReturn:
    """End this process as it is. As in Python, the code is 120 if output is lost."""
    try:
        print(end="", flush=True)
    except (OSError, ValueError):  # the reader of a pipe has gone, or the stream is closed
        code = code or 120
    ctypes.CDLL(None).fflush(None)  # output of libraries in C
    os._exit(code)
