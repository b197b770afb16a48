"""Processes that run a user's code with a deadline for each answer: reward functions, `math`,
environments, tools, agents.

A server (worker.py) forks itself to make a process. If a process hangs or dies, only its current
call fails: the process is killed, together with all processes that it has started.

The processes share no CUDA context with their parent. They import torch and the training script
only if the user's code does. There is no protection from malicious code, because the user chose the
code, and its answers are unpickled."""

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from itertools import count

from common.rewards import worker
from common.rewards.result import Result
from common.rewards.worker import EACH, HEADER, ORDER, one_line

# Seconds for an answer to come late: this process may have been busy and not have read it, and an
# async function times out by itself.
LATE = 1.0
TOGETHER = 64  # calls of an async function in a process
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
        `grace`: seconds for a fork to clean up when it is closed between two calls. `argument`:
        plain value; if given, the target is `target(argument)`."""
        file, _, name = target.rpartition(":")
        is_file = file.endswith(".py")
        self.target = f"{os.path.abspath(file)}:{name}" if is_file else target
        # it may import the files beside it
        self.folders = [os.path.dirname(os.path.abspath(file))] if is_file else []
        self.shared = shared
        self.memory_gib = memory_gib
        self.grace = grace
        self.argument = argument
        self.numbers = count()  # of forks
        self.starting = asyncio.Semaphore(32)  # more orders do not fit in the server's socket
        self.process: subprocess.Popen | None = None

    def fork(self, connection: socket.socket) -> int:
        """Start a fork with this connection and return its number."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        number = next(self.numbers)
        with suppress(OSError):  # the server has died or hangs: the connection just ends
            socket.send_fds(self.control, [ORDER.pack(number, 0.0)], [connection.fileno()])
        return number

    def end(self, number: int, seconds: float) -> None:
        """Have a fork killed that has not ended after `seconds`."""
        if self.process is not None:
            with suppress(OSError):  # the server has died, and with it its forks
                self.control.send(ORDER.pack(number, seconds))

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
        self.control.settimeout(START_SECONDS)
        setup = dict(
            path=[*sys.path, *self.folders],
            control=child_end.fileno(),
            parent=os.getpid(),
            target=self.target,
            shared=self.shared,
            memory_gib=self.memory_gib,
            argument=json.dumps(self.argument),
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
    """One fork, for its parent. It starts at its first call, and answers one call at a time, in an
    event loop."""

    def __init__(self, server: ForkServer, start_seconds: float = START_SECONDS):
        self.server = server
        self.start_seconds = start_seconds
        self.number: int | None = None  # None before the first call
        self.busy = False
        self.loaded = False
        """whether the target could be loaded"""
        self.closed = False
        """whether no more calls are possible: it was closed, has died or was killed"""

    async def call(self, method: str | None, *arguments: object, seconds: float) -> Result:
        """Return the result of `target(*arguments)`, or of a `method` of the one object that is
        made of the target, within `seconds`. A process that is late, or whose call is cancelled, is
        killed."""
        try:
            question = pickle.dumps((method, arguments, seconds))
        except Exception as error:  # pickling runs code of the objects in the row
            return Result(error=f"the call cannot be pickled: {one_line(error)}")
        if self.closed:
            return Result(error="the process has ended")
        self.busy = True
        try:
            if self.number is None:
                loaded = await self._start()
                if loaded.error is not None:
                    self.close()
                    error = f"{self.server.target} cannot be loaded: {loaded.error}"
                    return Result(error=error)
                self.loaded = True
            self.writer.write(HEADER.pack(len(question)) + question)
            result = await self._answer(seconds)
            self.busy = False
            return result or Result(error=f"no answer within {seconds:g} s", timed_out=True)
        finally:
            if self.busy:  # late or cancelled
                self.close()

    def close(self) -> None:
        """End the process: at once if a call runs, else after the server's `grace` seconds."""
        if self.number is not None and not self.closed:
            self.server.end(self.number, 0.0 if self.busy else self.server.grace)
            with suppress(OSError):  # the process has died
                self.socket.shutdown(socket.SHUT_RDWR)  # at once: the event loop may be busy
            with suppress(RuntimeError):  # the event loop has ended
                self.writer.close()
        self.closed = True

    async def _start(self) -> Result:
        """Return the result of loading the target."""
        self.socket, theirs = socket.socketpair()
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.socket)
        async with self.server.starting:
            with theirs:
                self.number = self.server.fork(theirs)
            loaded = await self._answer(self.start_seconds)
        if loaded is None and self.server.shared:  # the server itself hangs in loading
            self.server.close(hangs=True)
        return loaded or Result(error=f"not loaded within {self.start_seconds:g} s")

    async def _answer(self, seconds: float) -> Result | None:
        """Return the next answer; None if it is late, and then the process is closed."""
        self._set_timer(seconds, LATE)
        try:
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            payload = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            if self.timer is None:
                return None
            self.close()
            return Result(error="the process died")
        finally:
            if self.timer is not None:
                self.timer.cancel()
        try:
            return Result(*pickle.loads(payload))
        except Exception as error:  # unpickling runs code of the returned object
            return Result(error=f"the result cannot be unpickled: {one_line(error)}")

    def _set_timer(self, seconds: float, *again: float) -> None:
        """Close the process after some seconds and then some more, in which an answer may be read
        that came while this process was busy."""
        self.timer = asyncio.get_running_loop().call_later(seconds, self._wake, *again)

    def _wake(self, *again: float) -> None:
        if again:
            self._set_timer(*again)
        else:
            self.timer = None
            self.close()


class Pool:
    """At most `size` processes that call one function, for one event loop. They start when they are
    needed.

    Each call has `seconds` of wall-clock time. If the function has an attribute `prepare`, each
    process calls it once after loading. The other arguments are those of `ForkServer`."""

    def __init__(
        self, target: str, size: int, seconds: float, *, is_async: bool = False,
        shared: bool = False, memory_gib: float = 4.0,
    ):  # fmt: skip
        self.server = ForkServer(target, shared=shared, memory_gib=memory_gib)
        self.seconds = seconds
        self.is_async = is_async
        self.free = asyncio.Semaphore(size)
        self.idle: list[Process] = []
        self.waiting: list[tuple] = []  # calls of an async function, each with its future

    async def call(self, *arguments: object, seconds: float | None = None) -> Result:
        """Return the result of `function(*arguments)`. The calls of an `async def` that wait for a
        process go to it together, up to 64; if one of them blocks its event loop, all time out."""
        seconds = seconds or self.seconds
        if not self.is_async:
            async with self.free:
                return await self._call(None, *arguments, seconds=seconds)
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((arguments, seconds, answer))
        await asyncio.sleep(0)  # the other calls of the group come
        async with self.free:
            together, self.waiting = self.waiting[:TOGETHER], self.waiting[TOGETHER:]
            if together:  # else another call has taken this one with it
                calls, limits, futures = zip(*together, strict=True)
                try:
                    result = await self._call(EACH, *calls, seconds=max(limits))
                except Exception as error:  # no process could be started
                    result = Result(error=one_line(error))
                for number, future in enumerate(futures):
                    failed = result.error is not None
                    future.set_result(result if failed else Result(*result.value[number]))
        return await answer

    async def _call(self, method: str | None, *arguments: object, seconds: float) -> Result:
        while self.idle and self.idle[-1].reader.at_eof():  # killed from outside
            self.idle.pop().close()
        process = self.idle.pop() if self.idle else Process(self.server)
        result = await process.call(method, *arguments, seconds=seconds)
        if not process.closed:
            self.idle.append(process)
        return result

    def close(self) -> None:
        self.server.close()
