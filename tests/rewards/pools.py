"""Pools under test, and their processes."""

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from helpers import PATIENCE, descendants

from common.rewards.processes import Pool
from common.rewards.result import Result

USER_FILE = Path(__file__).with_name("user_functions.py")
DO, WAIT = f"{USER_FILE}:do", f"{USER_FILE}:wait"


def errors(results: list[Result]) -> list[str | None]:
    return [result.error for result in results]


class Mapper:
    """A pool in an event loop of its own."""

    def __init__(self, target: str, size: int, seconds: float, **named):
        is_async = dict(is_async=target == WAIT) | named
        self.pool = Pool(target, size, seconds, **is_async)
        self.loop = asyncio.Runner()

    def map(self, calls: Sequence[tuple], seconds: Sequence[float | None] = ()) -> list[Result]:
        """Return the results of all calls, which are made at once. `seconds`: of each."""

        async def main() -> list[Result]:
            pairs = zip(calls, seconds or [None] * len(calls), strict=True)
            return await asyncio.gather(*(self.pool.call(*call, seconds=s) for call, s in pairs))

        return self.loop.run(main())


@contextmanager
def opened(target: str, size: int, seconds: float = PATIENCE, **named) -> Iterator[Mapper]:
    mapper = Mapper(target, size, seconds, **named)
    try:
        yield mapper
    finally:
        mapper.pool.close()
        mapper.loop.close()


@contextmanager
def watched(
    target: str, size: int, seconds: float = PATIENCE, **named
) -> Iterator[tuple[Mapper, list[int]]]:
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
