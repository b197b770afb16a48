"""Pools under test: their processes, and a clock that advances only for calls that hang."""

import os
import select as real_select
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
from helpers import PATIENCE, Clock, descendants

from common.rewards import old_processes as module
from common.rewards.old_processes import Pool, Result

USER_FILE = Path(__file__).with_name("user_functions.py")
DO, WAIT = f"{USER_FILE}:do", f"{USER_FILE}:wait"


def errors(results: list[Result]) -> list[str | None]:
    return [result.error for result in results]


@contextmanager
def opened(target: str, size: int, seconds: float = PATIENCE, **named) -> Iterator[Pool]:
    pool = Pool(target, size, seconds, **named)
    try:
        yield pool
    finally:
        pool.close()


@contextmanager
def watched(
    target: str, size: int, seconds: float = PATIENCE, **named
) -> Iterator[tuple[Pool, list[int]]]:
    """Yield a pool and the numbers of its processes without the server, taken every 10 ms. Check
    that no process is left."""
    before, counts, done = set(descendants(os.getpid())), [], threading.Event()

    def look() -> None:
        counts.append(len(set(descendants(os.getpid())) - before) - 1)

    def watch() -> None:
        while not done.wait(0.01):
            look()

    (thread := threading.Thread(target=watch)).start()
    try:
        with opened(target, size, seconds, **named) as pool:
            yield pool, counts
            look()
    finally:
        done.set()
        thread.join()
    assert not set(descendants(os.getpid())) - before


class StillClock(Clock):
    """Clock of processes.py that advances only while every busy process of these pools is at a call
    numbered in `hanging`. Only these calls exceed their deadline, however slow the machine is.
    `reached` returns whether they have begun, which is necessary where calls run at the same
    time."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        pools: Sequence[Pool],
        hanging: Collection[int],
        reached: Callable = lambda: True,
    ):
        super().__init__(monkeypatch, module)
        self.pools, self.hanging, self.reached = pools, set(hanging), reached
        self.patience = time.monotonic() + PATIENCE
        monkeypatch.setattr(module, "select", self)
        self.POLLIN, self.POLLOUT = real_select.POLLIN, real_select.POLLOUT

    def monotonic(self) -> float:
        return self.ahead

    def poll(self) -> "_Poll":
        return _Poll(self)

    def only_hanging(self) -> bool:
        at_work = [
            pool.processes
            for pool in self.pools
            if any(process.asked for process in pool.processes)
        ]
        busy = [process for process in chain(*at_work) if process.asked or process.is_async is None]
        at = [list(process.asked)[: None if process.is_async else 1] for process in busy]
        return bool(at) and all(self.hanging & set(numbers) for numbers in at) and self.reached()


class _Poll:
    def __init__(self, clock: StillClock):
        self.clock, self.poll_object = clock, real_select.poll()
        self.register = self.poll_object.register

    def poll(self, milliseconds: float) -> list:
        assert time.monotonic() < self.clock.patience, "it hangs"
        found = self.poll_object.poll(min(milliseconds, 10))
        if not found and milliseconds > 0 and self.clock.only_hanging():
            self.clock.ahead += milliseconds / 1000 + 0.001
        return found
