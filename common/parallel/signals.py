"""Signals: SIGTERM and SIGINT request a stop; the loop stops where its state can be saved."""

import contextlib
import signal
from collections.abc import Iterator

STOP_SIGNALS = signal.SIGTERM, signal.SIGINT

received: int | None = None  # the last stop signal of this process


def install_signal_handlers() -> None:
    """Make SIGTERM and SIGINT set a flag. Called again after vLLM starts: libraries replace
    handlers."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, _note_signal)


def _note_signal(signum: int, frame) -> None:
    global received
    received = signum
    signal.signal(signum, signal.SIG_DFL)  # a second signal stops at once


def default_signals() -> dict:
    """Make SIGTERM and SIGINT end this process, also inside a library. Return the handlers
    before."""
    return {signum: signal.signal(signum, signal.SIG_DFL) for signum in STOP_SIGNALS}


@contextlib.contextmanager
def signals_end_the_process() -> Iterator[None]:
    """Apply `default_signals` within a block, then restore the handlers."""
    before = default_signals()
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def request_stop() -> None:
    """Act as if this process had received SIGTERM: another process has received it."""
    global received
    received = signal.SIGTERM


def stop_signalled() -> bool:
    """Return whether this process has received a stop signal."""
    return received is not None
