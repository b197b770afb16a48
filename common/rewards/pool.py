"""Functions run in a pool of processes, with a wall-clock deadline for every call.

For reward functions that may hang, crash or use up the memory: `math` (math_reward.py), where sympy may compute for
hours, and the user's own. A process that hangs or dies is killed and replaced, and only its call is lost.

The processes run common/rewards/worker.py: they import neither torch nor the training script unless the function does,
and share no CUDA context with their parent. They are for code that the user chose to run: nothing here protects from
malice, and what they send back is unpickled.
"""

import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

from common.rewards import worker as process
from common.rewards.worker import HEADER, LOAD, one_line

AHEAD = 8  # calls sent to a process beyond the one it is at, so that it need not wait for its parent
CONCURRENT = 64  # calls of an async function at a time
GRACE = 1.0  # seconds by which an event loop may be late with its own time-outs before it counts as blocked


class Result(NamedTuple):
    """What a call returned, or one line about why it did not."""

    value: Any = None
    error: str | None = None
    timed_out: bool = False


class Pool:
    """`size` processes, started when they are needed; they end with `close`, or with their parent, however it ends. For
    one thread: Linux ends the processes with the thread that started them."""

    def __init__(self, size: int, timeout: float, memory_gib: float = 4, start_timeout: float = 60):
        """`timeout`: seconds of wall clock for a call, unless `map` is told otherwise. `memory_gib`: what a process may
        allocate beyond what it needed to load the function; more is a `MemoryError` (on Linux). `start_timeout`:
        seconds for start and imports of a process, which do not count against a call. Raises `ValueError` unless all
        are positive."""
        if not (size >= 1 and timeout > 0 and memory_gib > 0 and start_timeout > 0):
            raise ValueError(f"a pool needs positive {size=}, {timeout=}, {memory_gib=}, {start_timeout=}")
        self.size, self.timeout, self.memory_gib, self.start_timeout = size, timeout, memory_gib, start_timeout
        self.workers: list[_Worker] = []
        self.is_async: dict[str, bool] = {}  # of the functions loaded so far

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()

    def start(self, size: int | None = None) -> None:
        """Starts what is missing of the processes. `map` does so by itself, as far as it needs them."""
        while len(self.workers) < (self.size if size is None else size):
            self.workers.append(_Worker((sys.path, self.memory_gib)))

    def map(self, target: str, calls: list[tuple], timeout: float | None = None) -> list[Result]:
        """`function(*call)` for every call, in order, each with `timeout` seconds. `target` is `module:function` or
        `path/to/file.py:function`.

        If the function has an attribute `prepare`, it is called once in every process, off the clock. The calls of an
        `async def` run concurrently in one process, 64 at a time; where one blocks the event loop, all that run time
        out. A function that cannot be loaded is an error of every call.
        """
        path, _, function = target.rpartition(":")
        self.target = f"{os.path.abspath(path)}:{function}" if path.endswith(".py") else target
        self.calls, self.results = calls, [Result()] * len(calls)
        self.pending, self.failed_starts, self.seconds = deque(range(len(calls))), 0, timeout or self.timeout
        wait = 0.0  # the first look is for who died since the last map
        try:
            while self.pending or any(worker.calls for worker in self.workers):
                poll = select.poll()
                for worker in self.workers:
                    poll.register(worker.socket, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
                poll.poll(1000 * wait)
                for worker in list(self.workers):
                    now = time.monotonic()  # before the look for answers: this process may have been slow itself
                    worker.flush()
                    for number, payload in worker.receive():
                        self._take(worker, number, payload)
                    if worker.closed or worker.deadline < now:
                        self._lose(worker)
                self._feed()
                wait = max(0.0, min((w.deadline for w in self.workers), default=0.0) - time.monotonic())
        finally:
            for worker in [worker for worker in self.workers if worker.calls]:  # Ctrl-C
                self.workers.remove(worker)
                worker.kill()
        return self.results

    def _feed(self) -> None:
        """Sends calls to all who have room. One process alone finds out whether a new function loads, and is async."""
        alone = self.is_async.get(self.target, True)
        busy = sum(bool(worker.calls) for worker in self.workers)
        self.start(min(self.size, len(self.pending) + busy, 1 if alone else self.size))
        for worker in self.workers[:1] if alone else self.workers:
            if self.pending and worker.loading is None and worker.target != self.target:
                worker.loading, worker.deadline = self.target, time.monotonic() + self.start_timeout
                worker.send(LOAD, pickle.dumps(self.target))
            # Less is sent ahead near the end, so that no call waits behind a slow one while others have nothing to do.
            room = CONCURRENT if alone else 1 + min(AHEAD, len(self.pending) // (2 * self.size))
            while self.pending and worker.loading is None and len(worker.calls) < room:
                number = self.pending.popleft()
                try:
                    payload = pickle.dumps((self.calls[number], self.seconds))
                except Exception as error:  # pickling runs code of whatever is in the row
                    self.results[number] = Result(error=f"the call cannot be pickled: {one_line(error)}")
                    continue
                worker.deadline = worker.deadline if worker.calls else self._deadline()
                worker.calls[number] = None
                worker.send(number, payload)

    def _deadline(self) -> float:
        """Of a call that starts now. An event loop keeps time itself; it is late only if it is blocked."""
        return time.monotonic() + self.seconds + (GRACE if self.is_async[self.target] else 0)

    def _take(self, worker: "_Worker", number: int, payload: bytes) -> None:
        try:
            result = Result(*pickle.loads(payload))
        except Exception as error:  # unpickling runs code of whatever the function returned
            result = Result(error=f"the result cannot be unpickled: {one_line(error)}")
        if number != LOAD:
            del worker.calls[number]
            self.results[number] = result
        else:
            target, worker.loading = worker.loading, None
            if result.error is None:
                worker.target, self.is_async[target] = target, result.value
            elif target == self.target:
                self._give_up(result.error)
        worker.deadline = self._deadline() if worker.calls else math.inf

    def _lose(self, worker: "_Worker") -> None:
        """Ends a process that hangs or has died. Calls behind the one it was at go to others."""
        self.workers.remove(worker)
        code = worker.kill()
        why = f"the process died or lost its connection ({signal.Signals(-code).name if code < 0 else f'exit {code}'})"
        if worker.loading == self.target:
            self.failed_starts += 1
            if not worker.closed:
                self._give_up(f"not loaded within {self.start_timeout:g} s")
            elif self.failed_starts == 3:  # not at once: somebody else may have killed it
                self._give_up(why)
        calls = list(worker.calls)
        lost = len(calls) if calls and self.is_async[self.target] else 1
        for number in calls[:lost]:
            late = Result(error=f"no answer within {self.seconds:g} s", timed_out=True)
            self.results[number] = Result(error=why) if worker.closed else late
        self.pending.extendleft(reversed(calls[lost:]))

    def _give_up(self, error: str) -> None:
        """The function cannot be loaded: an error of every call that has not begun."""
        for number in self.pending:
            self.results[number] = Result(error=f"{self.target} cannot be loaded: {error}")
        self.pending.clear()


class Connection:
    """Messages to a process and from it. It may hang at any time, so no read or write waits for it."""

    def __init__(self, ours: socket.socket):
        self.socket = ours
        self.socket.setblocking(False)
        self.incoming, self.outgoing, self.closed = bytearray(), bytearray(), False

    def send(self, number: int, payload: bytes) -> None:
        self.outgoing += HEADER.pack(number, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        with suppress(BlockingIOError, ConnectionError):  # of a lost connection `receive` will tell
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]

    def receive(self) -> list[tuple[int, bytes]]:
        """The whole messages that have come; sets `closed` if no more will."""
        try:
            while data := self.socket.recv(1 << 18):
                self.incoming += data
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.closed = True
        messages = []
        while len(self.incoming) >= HEADER.size:
            number, length = HEADER.unpack_from(self.incoming)
            if len(self.incoming) < HEADER.size + length:
                break
            messages.append((number, bytes(self.incoming[HEADER.size : HEADER.size + length])))
            del self.incoming[: HEADER.size + length]
        return messages


class _Worker(Connection):
    """A process, as its parent sees it."""

    def __init__(self, setup: tuple):
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        # -P: without the script's folder on sys.path. A session of its own: Ctrl-C at the terminal is for the parent.
        command = [sys.executable, "-P", "-u", process.__file__, str(theirs.fileno()), str(os.getpid())]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])  # what is printed goes to stderr
        with theirs:
            self.process = subprocess.Popen(command, start_new_session=True, **pipes)
        self.target: str | None = None  # loaded last
        self.loading: str | None = None
        self.calls: dict[int, None] = {}  # numbers of those it has not answered, in the order in which they were sent
        self.deadline = math.inf  # of the load or of the first call
        self.send(LOAD, pickle.dumps(setup))

    def kill(self) -> int:
        """Also what the function has started. Returns the exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.socket.close()
        return self.process.wait()
