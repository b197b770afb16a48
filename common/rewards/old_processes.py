"""The old form of processes.py, until its last caller has moved.

Processes that run code with a deadline for each answer: reward functions, `math`,
environments.

A server (worker.py) forks itself to make a process. If a process hangs or dies, only its current
call fails: the process is killed, together with all processes that it has started. No function here
blocks on a single process.

The processes share no CUDA context with their parent. They import torch and the training script
only if the user's code does. There is no protection from malicious code, because the user chose the
code, and its answers are unpickled."""

import json
import math
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from common.rewards import old_worker as worker
from common.rewards.old_worker import DIED, HEADER, one_line
from common.rewards.result import Result

AHEAD = 8  # calls in a process's queue behind the current one: it does not wait for its parent
CONCURRENT = 64  # calls of an async function at a time
LATE = 1.0  # seconds after its own time-outs at which an event loop counts as blocked
START_SECONDS = 60.0  # for a process to start and to load its target, before its first call


class ForkServer:
    """Process that forks itself. It starts at the first use, and again if it has died. Server and
    forks end at `close`, when the parent ends in any way, and on Linux when the thread that started
    the server ends."""

    def __init__(
        self, target: str, *, shared: bool, memory_gib: float = 4.0, grace: float = 0.0,
        argument: object = None,
    ):  # fmt: skip
        """`target`: `module:name` or `path/to/file.py:name`. `shared`: load the target once, before
        the forks; then a fork takes milliseconds, but all forks share the files that the target has
        opened. `memory_gib`: limit of what a fork allocates after loading the target (Linux).
        `grace`: seconds for a fork to clean up after its connection has closed. `argument`: plain
        value; if given, the target is `target(argument)`."""
        file, _, name = target.rpartition(":")
        is_file = file.endswith(".py")
        self.target = f"{os.path.abspath(file)}:{name}" if is_file else target
        # it may import the files beside it
        self.folders = [os.path.dirname(os.path.abspath(file))] if is_file else []
        self.shared = shared
        self.memory_gib = memory_gib
        self.grace = grace
        self.argument = argument
        self.process: subprocess.Popen | None = None

    def fork(self, connection: socket.socket, seconds: float) -> None:
        """Start a fork with this connection. Blocks, at most `seconds`, only if many forks wait for
        the target to load."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        self.control.settimeout(seconds)
        # OSError: the server has died or hangs; the connection just ends
        with connection, suppress(OSError):
            socket.send_fds(self.control, [b"+"], [connection.fileno()])

    def look(self) -> None:
        """Make the server check for closed connections."""
        if self.process is not None:
            # OSError: the server has died, or has unread messages and checks after each
            with suppress(OSError):
                self.control.send(b"-", socket.MSG_DONTWAIT)

    def close(self, hangs: bool = False) -> None:
        """End the server and its forks. Unless it hangs, it has `grace` and two more seconds to end
        by itself."""
        if self.process is not None:
            self.control.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.0 if hangs else self.grace + 2.0)
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.close(hangs=True)
        self.control, child_end = socket.socketpair()
        setup = dict(
            path=[*sys.path, *self.folders],
            control=child_end.fileno(),
            parent=os.getpid(),
            target=self.target,
            shared=self.shared,
            memory_gib=self.memory_gib,
            grace=self.grace,
            argument=self.argument,
        )
        # -P: without the script's folder on sys.path
        command = [sys.executable, "-P", "-u", worker.__file__, json.dumps(setup)]
        with child_end:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # print writes to stderr
                pass_fds=[child_end.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal goes to the parent only
            )


class Process:
    """Handle of one fork, for its parent. Answers come in the order of the questions, unless the
    function is async."""

    def __init__(self, server: ForkServer, start_seconds: float = START_SECONDS):
        self.socket, child_end = socket.socketpair()
        self.socket.setblocking(False)
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.server = server
        self.start_seconds = start_seconds
        self.asked: dict[int, float] = {}  # number of each open question -> its seconds
        self.deadline = time.monotonic() + start_seconds  # of the start, then of the first question
        self.is_async: bool | None = None  # None until the target is loaded
        self.end: Result | None = None  # reason why no more answers come
        server.fork(child_end, start_seconds)

    def ask(self, number: int, method: str | None, arguments: tuple, seconds: float) -> None:
        """Send a question: `target(*arguments)`, or the `method` of an object of the target, within
        `seconds`."""
        try:
            payload = pickle.dumps((method, arguments, seconds))
        except Exception as error:  # pickling runs code of the objects in the row
            payload = pickle.dumps(f"the call cannot be pickled: {one_line(error)}")
        self.asked[number] = seconds
        if len(self.asked) == 1 and self.is_async is not None:
            self.deadline = self._deadline()
        self.outgoing += HEADER.pack(number, len(payload)) + payload
        self._flush()

    def answers(self) -> list[tuple[int, Result]]:
        """Return the answers that have arrived, with the numbers of their questions.

        If the process cannot load its target, is late or has died, `end` has the reason. It is then
        the answer to the first question, or to all questions of an async function. The other
        questions stay in `asked`."""
        now = time.monotonic()  # before reading answers: this process may have been slow itself
        self._flush()
        is_open = self._receive()
        answers = []
        for number, payload in self._messages():
            try:
                result = Result(*pickle.loads(payload))
            except Exception as error:  # unpickling runs code of the returned object
                result = Result(error=f"the result cannot be unpickled: {one_line(error)}")
            if number in self.asked:
                del self.asked[number]
                answers.append((number, result))
            elif number >= 0:
                self.end = Result(error="it wrote to a file that it had not opened")
                break
            elif number == DIED or result.error:
                self.end = self.end or result
            else:
                self.is_async = result.value
            self.deadline = self._deadline()
        if not is_open:
            self.end = self.end or Result(error="the process died")
        elif self.deadline < now:
            self.end = self._late()
        if self.end:
            self.close()
            if self.is_async is None:
                self.end = Result(error=f"{self.server.target} cannot be loaded: {self.end.error}")
            for number in list(self.asked)[: None if self.is_async else 1]:
                del self.asked[number]
                answers.append((number, self.end))
        return answers

    def _late(self) -> Result:
        if self.is_async is not None:
            seconds = next(iter(self.asked.values()))
            return Result(error=f"no answer within {seconds:g} s", timed_out=True)
        if self.server.shared:  # the server itself hangs in loading
            self.server.close(hangs=True)
        return Result(error=f"not loaded within {self.start_seconds:g} s")

    def close(self) -> None:
        """End the process. The server kills it after the `grace` period."""
        self.socket.close()
        self.server.look()

    def _deadline(self) -> float:
        """Return the deadline of the first question if it begins now. An event loop enforces the
        limit before it."""
        seconds = next(iter(self.asked.values()), math.inf)
        return time.monotonic() + seconds + (LATE if self.is_async else 0.0)

    def _flush(self) -> None:
        with suppress(OSError):  # it is full, lost or closed: `_receive` notices a lost connection
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing)]

    def _receive(self) -> bool:
        """Read the available bytes. Return whether the connection is still open."""
        try:
            while data := self.socket.recv(1 << 18):
                self.incoming += data
        except BlockingIOError:
            return True
        except OSError:  # lost or closed
            return False
        return False

    def _messages(self) -> Iterator[tuple[int, bytes]]:
        """Yield the complete messages of the bytes read so far, and remove them."""
        while len(self.incoming) >= HEADER.size:
            number, length = HEADER.unpack_from(self.incoming)
            if len(self.incoming) < HEADER.size + length:
                break
            yield number, bytes(self.incoming[HEADER.size : HEADER.size + length])
            del self.incoming[: HEADER.size + length]


def wait(processes: Iterable[Process], until: float = math.inf) -> None:
    """Block until one process has sent bytes, accepts bytes or is late, at most until the time
    `until`."""
    poll = select.poll()
    for process in processes:
        if process.end:  # its questions have their answer
            return
        poll.register(process.socket, select.POLLIN | (select.POLLOUT if process.outgoing else 0))
        until = min(until, process.deadline)
    poll.poll(1000 * max(0.0, until - time.monotonic()))


class Pool:
    """Pool of `size` processes that call one function. They start at the first use. Only one thread
    may use a pool.

    Each call has `seconds` of wall-clock time. If the function has an attribute `prepare`, each
    process calls it once after loading, within `start_seconds`. The other arguments are those of
    `ForkServer` and `Process`."""

    def __init__(
        self, target: str, size: int, seconds: float, *, shared: bool = False,
        memory_gib: float = 4.0, start_seconds: float = START_SECONDS,
    ):  # fmt: skip
        limits = (size, seconds, memory_gib, start_seconds)
        assert all(limit > 0 for limit in limits), "all must be positive"
        self.server = ForkServer(target, shared=shared, memory_gib=memory_gib)
        self.size = size
        self.seconds = seconds
        self.start_seconds = start_seconds
        self.processes: list[Process] = []
        self.is_async: bool | None = None  # None until a process has loaded the function

    def map(self, calls: Sequence[tuple], seconds: Sequence[float] | None = None) -> list[Result]:
        """Return the result of `function(*call)` for every call, in order. `seconds`: a time limit
        for each call.

        The calls of an `async def` run concurrently in one process, 64 at a time. If one of them
        blocks the event loop, all running ones time out. If three processes fail to load the
        function, every call has this error."""
        seconds = seconds or [self.seconds] * len(calls)
        results = [Result()] * len(calls)
        pending = deque(range(len(calls)))
        failed_starts = 0
        try:
            while True:
                for process in list(self.processes):
                    for number, result in process.answers():
                        results[number] = result
                    if process.is_async is not None:
                        self.is_async = process.is_async
                    if process.end:
                        self.processes.remove(process)
                        pending.extendleft(reversed(process.asked))
                        failed_starts += process.is_async is None
                        while pending and failed_starts >= 3 and not self.processes:
                            results[pending.pop()] = process.end
                if not pending and not any(process.asked for process in self.processes):
                    return results
                if failed_starts < 3:  # retry: the first process may have been killed from outside
                    self._start(len(pending))
                self._send(calls, seconds, pending)
                wait(self.processes)
        finally:
            for process in list(self.processes):
                if process.asked:  # after Ctrl-C
                    self.processes.remove(process)
                    process.close()

    def _start(self, pending: int) -> None:
        """Start processes until there are enough for `pending` further calls."""
        busy = sum(bool(process.asked) for process in self.processes)
        # The first process reports whether the function is async; then this process is enough.
        while len(self.processes) < min(self.size if self.is_async is False else 1, pending + busy):
            self.processes.append(Process(self.server, self.start_seconds))

    def _send(self, calls: Sequence[tuple], seconds: Sequence[float], pending: deque[int]) -> None:
        """Send pending calls to processes with room in their queues."""
        for process in self.processes:
            # Near the end, queues are shorter, so that no call waits behind a slow one while
            # another process is idle.
            room = 1 + min(AHEAD, len(pending) // (2 * self.size))
            if process.is_async:
                room = CONCURRENT
            while pending and process.is_async is not None and len(process.asked) < room:
                number = pending.popleft()
                process.ask(number, None, calls[number], seconds[number])

    def close(self) -> None:
        while self.processes:
            self.processes.pop().close()
        self.server.close()
