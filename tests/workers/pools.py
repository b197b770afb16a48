"""Pools under test, and their processes."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from processes import PATIENCE, descendants

from common.workers.pool import Pool
from common.workers.worker import Result

USER_FILE = Path(__file__).with_name("user_functions.py")
DO, WAIT = f"{USER_FILE}:do", f"{USER_FILE}:wait"


class Mapper:
    """A pool in an event loop of its own."""

    def __init__(self, target: str, size: int, seconds: float, **named):
        self.pool = Pool(target, size, seconds, **dict(is_async=target == WAIT) | named)
        self.loop = asyncio.Runner()

    def map(self, calls: Sequence[tuple], seconds: Sequence[float | None] = ()) -> list[Result]:
        """Return the results of all calls, which are made at once. `seconds`: of each."""

        async def main() -> list[Result]:
            pairs = zip(calls, seconds or [None] * len(calls), strict=True)
            return await asyncio.gather(*(self.pool.call(*call, seconds=s) for call, s in pairs))

        return self.loop.run(main())


@contextmanager
def opened(target: str, size: int, seconds: float = PATIENCE, **named) -> Iterator[Mapper]:
    """Yield a pool. Check that no process is left."""
    before = set(descendants(os.getpid()))
    mapper = Mapper(target, size, seconds, **named)
    try:
        yield mapper
    finally:
        for process in mapper.pool.idle:
            process.close()
        mapper.pool.server.close()
        mapper.loop.close()
    assert not set(descendants(os.getpid())) - before
