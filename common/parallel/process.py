"""How a process stops at a signal, fails with one message, and ends.

Any rank may fail at any point. The first rank that fails prints one line or, for a bug, the
traceback. The others see that and end silently. No rank waits for a dead one."""

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

LONGEST = 1000  # characters of an error message
REPORT = threading.Lock()  # the first thread that fails takes it and never gives it back
PROJECT = Path(__file__).resolve().parents[2]
# What the system says if the disk is full, fails, or is read-only.
DISK_ERROR = re.compile(
    "^.*(?:No space left|quota exceeded|File too large|Input/output error|Read-only file system"
    "|Stale file handle).*$",
    re.MULTILINE,
)
# Control characters except line feed and tab, direction marks, and characters without width.
UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
)


def visible(text: str) -> str:
    r"""Replace control characters by escapes such as \x1b. Line feeds and tabs stay."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def brief(text: str) -> str:
    """Cut the middle out of a very long message, such as one that quotes a user's long value or
    lists many columns."""
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"


def counted(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def print_any_text() -> None:
    """Make stdout print characters that its encoding lacks as escapes, as stderr does anyway.
    Programs call this first."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # stdout of a notebook is another class
        sys.stdout.reconfigure(errors="backslashreplace")


# ---- a time limit ----

AGAIN = 0.1  # a call that is late is interrupted again after this many seconds


class Late(BaseException):
    """Interrupts a call that is late. It is not an `Exception`: `except Exception` in a library
    would swallow it."""


class Alarm:
    """Signal handler for a call that has reached its time limit."""

    is_late = False

    def __call__(self, _: int, frame: FrameType | None) -> None:
        """Raise `Late`, but not inside `__del__`: there Python would print it and go on."""
        self.is_late = True
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if frame is None:
            raise Late


def within(seconds: float, function: Callable, *args: object, **kwargs: object) -> Any:
    """Return `function(*args, **kwargs)`. Raises `TimeoutError` after `seconds`, or later if C code
    is running that cannot be interrupted. Outside of the main thread there is no limit, because
    signals go to the main thread. A call inside another limited call has only the outer limit."""
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
    except BaseException:  # `Late`, or whatever `function` raises when it is interrupted
        if not alarm.is_late:
            raise
    finally:
        signal.signal(signal.SIGALRM, before)
    if alarm.is_late:
        raise TimeoutError(f"no end within {seconds:g} s")
    return value


# ---- signals ----

stop_signalled = False  # true after one of these signals
ENDING = (signal.SIGTERM, signal.SIGINT)  # the first requests a stop, a second ends the process
# Sent when a job's time is nearly over, or its terminal is closed. A second one changes nothing.
STOPPING = (signal.SIGUSR1, signal.SIGHUP)
_terminals: list[int] = []  # file descriptors (1, 2) that write to the terminal


def note_signals() -> None:
    """From now on these signals only set `stop_signalled`. The training loop reads it where it can
    save its state, and ends. SIGHUP stays ignored under nohup."""
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
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # srun sets these; a batch script is one process
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


def require_torchrun() -> None:
    """Raise `ValueError` if another launcher than torchrun started several processes: without RANK
    each of them would train alone. All but the first process end silently."""
    if "RANK" in os.environ:
        return
    found = dict(os.environ)
    if "SLURM_STEP_ID" in found:
        found.setdefault("SLURM_STEP_NUM_TASKS", found.get("SLURM_NTASKS", "1"))
    for size, number in LAUNCHERS:
        if (count := found.get(size, "")).isdigit() and int(count) > 1:
            if found.get(number, "0") != "0":
                time.sleep(60)  # `fail` says why
                sys.exit(2)
            problem = f"one of {count} processes, but RANK is not set"
            advice = "start one torchrun on each machine (docs/scaling.md), or for separate runs"
            raise ValueError(f"{size} {count}: {problem}; {advice} torchrun --standalone in each")


# ---- errors ----


class RunError(RuntimeError):
    """An error that ends a run, such as a NaN gradient: one line, exit code 1. (Bad input is a
    `ValueError`: exit code 2.)"""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and the second too if the first ends with a
    colon. Gloo's advice is cut off. An error without a message gives its name."""
    name = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    line, *others = str(error).strip().split("\n")
    if line.endswith(":") and others:
        line += f" {others[0].strip()}"
    return line.partition(". This is typically")[0] or name


def fail(message: str) -> NoReturn:
    """Print `error: message` once on each machine and exit. For errors before the ranks can talk.
    The other ranks sleep: the launcher ends all when one ends, perhaps before this one prints."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(60)
    else:
        print(f"error: {visible(brief(message))}", file=sys.stderr)
    sys.exit(2)


def fail_in_thread(error: BaseException) -> None:
    """End this process for an error in a thread. The main thread may wait in a collective."""
    sys.excepthook(type(error), error, error.__traceback__)


def report_and_exit(store, rank: int, kind: type, error: BaseException, trace: object) -> None:
    """Handle an uncaught exception. `setup` makes this the `sys.excepthook` of every rank; in the
    `store` of the launch the ranks agree which of them failed first and prints.

    The process exits at once, without exit hooks: those of vLLM and NCCL wait for ranks that may be
    gone. The collectives of the other ranks then fail, or the launcher ends them."""
    REPORT.acquire()
    code = 1
    try:
        if threading.current_thread() is threading.main_thread():
            note_signals()  # the launcher may end this rank meanwhile: print first
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
    """Return the exit code and the text for an uncaught exception. Bad input (a `ValueError` that
    the project's own code raises) and accidents of a run, such as a full disk, give one line. A bug
    keeps its traceback."""
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
    # A library may raise an error of its own while it handles the disk's: search the whole trace.
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
    another program, such as a profiler or pytest, runs the script: it has work left.

    Python would also finalize the interpreter. If a thread of gloo drops the last reference to a
    tensor during that, the process aborts, as it did in 2% of launches."""
    callers = {frame.f_globals["__name__"] for frame, _ in traceback.walk_stack(sys._getframe())}
    if all(name == "__main__" or name.startswith(("common.", "extras.")) for name in callers):
        threading._shutdown()  # joins all threads but daemons, as Python does
        atexit._run_exitfuncs()
        exit_now(0)


def exit_now(code: int) -> NoReturn:
    """Flush the output and end at once. If output is lost, the code is 120 as in Python."""
    try:
        print(end="", flush=True)
    except (OSError, ValueError):  # the reader of a pipe has gone, or the stream is closed
        code = code or 120
    ctypes.CDLL(None).fflush(None)  # output of libraries in C
    os._exit(code)
