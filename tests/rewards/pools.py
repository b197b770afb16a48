"""Pools under test: what processes there are, and time that passes only while nothing but what hangs is under way."""

import os
import select as real_select
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import PATIENCE, Clock, descendants

from common.rewards import pool as module
from common.rewards.pool import Pool, Result

USER_FILE = Path(__file__).with_name("user_functions.py")
DO, WAIT = f"{USER_FILE}:do", f"{USER_FILE}:wait"


def errors(results: list[Result]) -> list[str | None]:
    return [result.error for result in results]


@contextmanager
def watched(size: int, timeout: float = PATIENCE, **named) -> Iterator[tuple[Pool, list[int]]]:
    """A pool, and a list of how many processes it has had, looked at every 10 ms. None is left at the end."""
    before, counts, done = set(descendants(os.getpid())), [], threading.Event()

    def look() -> None:
        counts.append(len(set(descendants(os.getpid())) - before))

    def watch() -> None:
        while not done.wait(0.01):
            look()

    (thread := threading.Thread(target=watch)).start()
    try:
        with Pool(size, timeout, **named) as pool:
            yield pool, counts
            look()
    finally:
        done.set()
        thread.join()
    assert not set(descendants(os.getpid())) - before


class StillClock(Clock):
    """The time of `common/rewards/pool.py`, which stands still but while every process that is at something is at one
    of the calls with the numbers `hanging`: those, and no others, are late, however slow the machine is. `reached` may
    say that they have begun: it must, where calls run at the same time."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, pool: Pool, hanging: Collection[int], reached: Callable = lambda: True
    ):
        super().__init__(monkeypatch, module)
        self.pool, self.hanging, self.reached = pool, set(hanging), reached
        self.deadline = time.monotonic() + PATIENCE
        monkeypatch.setattr(module, "select", self)
        self.POLLIN, self.POLLOUT = real_select.POLLIN, real_select.POLLOUT

    def monotonic(self) -> float:
        return self.ahead

    def poll(self) -> "_Poll":
        return _Poll(self)

    def only_hanging(self) -> bool:
        busy = [worker for worker in self.pool.workers if worker.calls or worker.loading]
        together = self.pool.is_async.get(self.pool.target, False)
        at = [list(worker.calls)[: None if together else 1] for worker in busy]
        return bool(busy) and all(self.hanging & set(numbers) for numbers in at) and self.reached()


class _Poll:
    def __init__(self, clock: StillClock):
        self.clock, self.poll_object = clock, real_select.poll()
        self.register = self.poll_object.register

    def poll(self, milliseconds: float) -> list:
        assert time.monotonic() < self.clock.deadline, "it hangs"
        found = self.poll_object.poll(min(milliseconds, 10))
        if not found and milliseconds > 0 and self.clock.only_hanging():
            self.clock.ahead += milliseconds / 1000 + 0.001
        return found
