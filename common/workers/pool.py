"""Processes that run a user's code with a time limit for each answer: reward functions, `math`,
environments, tools, agents. This module is the training process's side, worker.py the other one.

    process = Process(ForkServer("mine.py:Game", shared=True))   an object in a process
    result = await process.call("step", text, seconds=10.0)      -> Result (worker.py)
    pool = Pool("mine.py:reward", size=4, seconds=10.0)          a function in four processes
    result = await pool.call(text, row)

A server process forks itself whenever a new process is needed. If a process hangs or dies, only its
current call fails: it is killed, with all processes that it has started. Processes share no CUDA
context with the training process, and import torch only if the user's code does. This is no
protection from malicious code: the user chose it, and its answers are unpickled."""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

from common.workers import worker
from common.workers.worker import GRACE, HEADER, Result, one_line

# An answer may come this many seconds after its limit: this process may have been too busy to read
# it, and an async function times out by itself.
LATE = 1.0
TOGETHER = 64  # calls of an async function that run in a process at the same time
START_SECONDS = 60.0  # limit for a process to start and to load its target


class ForkServer:
    """The parent's handle of a server process, which forks itself to make workers. It starts at the
    first use, and again if it has died. The server and its forks end at `close`, when the training
    process ends for any reason and, on Linux, when the thread that started the server ends."""

    def __init__(self, target: str, *, shared: bool, argument: object = None):
        """`target`: `module:name` or `path/to/file.py:name`. With `shared` the server loads it
        once, before it forks: a fork then takes milliseconds, but all forks share the files that
        loading has opened. `argument`: if given, a plain value; the target is then what
        `target(argument)` returns."""
        self.target = target
        self.shared = shared
        self.argument = argument
        self.starting = asyncio.Semaphore(32)  # the server's socket holds no more requests
        self.process: subprocess.Popen | None = None

    def fork(self, connection: socket.socket) -> None:
        """Ask the server for a fork that answers calls on this connection."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        with suppress(OSError):  # the server has died or hangs, so reading will fail
            socket.send_fds(self.control, [b"f"], [connection.fileno()])

    def close(self, hangs: bool = False) -> None:
        """End the server and its forks. Forks that were closed before get time to clean up."""
        if self.process is not None:
            self.control.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.0 if hangs else GRACE + 2.0)
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.close(hangs=True)
        self.control, child_end = socket.socketpair()
        self.control.settimeout(START_SECONDS)
        setup = dict(
            path=sys.path,
            control=child_end.fileno(),
            parent=os.getpid(),
            target=self.target,
            shared=self.shared,
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


def close(writer: asyncio.StreamWriter) -> None:
    with suppress(RuntimeError):  # the event loop has ended
        writer.close()


class Process:
    """One fork, seen from its parent. It starts at its first call and answers one at a time."""

    def __init__(self, server: ForkServer, start_seconds: float = START_SECONDS):
        self.server = server
        self.start_seconds = start_seconds
        self.pid: int | None = None  # None before it has started
        self.socket: socket.socket | None = None  # None before the first call
        self.busy = False
        self.loaded = False  # whether the target could be loaded
        self.closed = False  # closed, killed or dead: no more calls are possible

    async def call(self, method: str, *arguments: object, seconds: float) -> Result:
        """Return the result of a method. The target is a class, and the process makes one object of
        it. If the answer is late, or the caller is cancelled, the process is killed."""
        return await self._ask(method, arguments, seconds)

    async def call_each(self, calls: list[tuple], seconds: float) -> list[Result]:
        """Return the result of `target(*call)` for each call. The calls of an async function run
        together; any other function must get a single call. A late process is killed, as in
        `call`."""
        result = await self._ask(None, calls, seconds)
        if result.error is not None:
            return [result] * len(calls)
        return [Result(*fields) for fields in result.value]

    async def _ask(self, method: str | None, arguments: Sequence, seconds: float) -> Result:
        try:
            question = pickle.dumps((method, arguments, seconds))
        except Exception as error:  # pickling runs code of the objects in the row
            return Result(error=f"the call cannot be pickled: {one_line(error)}")
        self.busy = True
        try:
            if not self.loaded:
                error = (await self._start()).error
                if error is not None:
                    return Result(error=f"{self.server.target} cannot be loaded: {error}")
                self.loaded = True
            self.writer.write(HEADER.pack(len(question)) + question)
            result = await self._answer(seconds)
            self.busy = result.timed_out
            return result
        finally:
            if self.busy:  # late, not loaded or cancelled
                self.close()

    def close(self) -> None:
        """End the process. During a call it is killed at once, otherwise it may first clean up."""
        if self.socket is not None and not self.closed:
            with suppress(OSError):  # the process has died
                if self.busy and self.pid is not None:
                    os.killpg(self.pid, signal.SIGKILL)
                self.socket.shutdown(socket.SHUT_RDWR)  # at once: the event loop may be busy
            close(self.writer)
        self.closed = True

    async def _start(self) -> Result:
        """Get a fork from the server. Return the result of loading the target in it."""
        self.socket, theirs = socket.socketpair()
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.socket)
        # Close the writer before asyncio's own finalizer does: that fails if the thread of the loop
        # is just closing it.
        weakref.finalize(self, close, self.writer)
        async with self.server.starting:
            with theirs:
                self.server.fork(theirs)
            result = await self._answer(self.start_seconds)
            if result.timed_out:  # the server itself hangs in loading
                self.server.close(hangs=True)
            elif result.error is None:
                self.pid = result.value
                result = await self._answer(self.start_seconds)
        return result

    async def _answer(self, seconds: float) -> Result:
        """Wait for the next answer. Return it, or an error if it is late."""
        reading = asyncio.ensure_future(self._read())
        for wait in (seconds, LATE):
            if (await asyncio.wait([reading], timeout=wait))[0]:
                return reading.result()
        return Result(error=f"no answer within {seconds:g} s", timed_out=True)

    async def _read(self) -> Result:
        try:
            (length,) = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            payload = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            self.close()
            return Result(error="the process died")
        try:
            return Result(*pickle.loads(payload))
        except Exception as error:  # unpickling runs code of the returned object
            return Result(error=f"the result cannot be unpickled: {one_line(error)}")


class Pool:
    """At most `size` processes that call one function, for the coroutines of one event loop. They
    start when they are needed, and end with the thread of the loop.

    Each call may take `seconds`. For an `async def`, up to 64 waiting calls go to a process
    together; if one of them blocks the process's event loop, all of them time out."""

    def __init__(
        self, target: str, size: int, seconds: float, *, is_async: bool = False,
        shared: bool = False,
    ):  # fmt: skip
        self.server = ForkServer(target, shared=shared)
        self.seconds = seconds
        self.together = TOGETHER if is_async else 1
        self.free = asyncio.Semaphore(size)
        self.idle: list[Process] = []
        self.waiting: dict[asyncio.Future, tuple] = {}  # answer -> the call and its limit

    async def call(self, *arguments: object, seconds: float | None = None) -> Result:
        answer = asyncio.get_running_loop().create_future()
        self.waiting[answer] = arguments, seconds or self.seconds
        try:
            await asyncio.sleep(0)  # let the group's other calls join the queue
            async with self.free:
                if futures := list(
                    islice(self.waiting, self.together)
                ):  # empty: another call has taken this one along
                    calls, limits = zip(*map(self.waiting.pop, futures), strict=True)
                    results = await self._results(calls, max(limits))
                    for future, result in zip(futures, results, strict=True):
                        future.set_result(result)
            return await answer
        finally:
            self.waiting.pop(answer, None)  # cancelled

    async def _results(self, calls: list[tuple], seconds: float) -> list[Result]:
        while self.idle and self.idle[-1].reader.at_eof():  # killed from outside
            self.idle.pop().close()
        process = self.idle.pop() if self.idle else Process(self.server)
        try:
            results = await process.call_each(calls, seconds)
        except Exception as error:  # no process could be started
            problem = f"{self.server.target} cannot be loaded: {one_line(error)}"
            return [Result(error=problem)] * len(calls)
        if not process.closed:
            self.idle.append(process)
        return results
