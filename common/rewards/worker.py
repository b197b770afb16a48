"""What a process of common/rewards/pool.py runs, as a script: it loads functions and answers calls.

Imports the standard library alone, and fast; everything else is the function's.
"""

import asyncio
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
from functools import cache

HEADER = struct.Struct("!qQ")  # of a message: number of the call, bytes of the pickle that follows
LOAD = -1  # in place of the number of a call: load a function


class Server:
    """Answers one connection until the parent closes it."""

    def __init__(self, descriptor: int, parent: int):
        end_with(parent)  # the end of the connection does not end an endless loop
        self.connection = socket.socket(fileno=descriptor)
        self.connection.set_inheritable(False)
        self.stream, self.pid = self.connection.makefile("rb"), os.getpid()
        sys.path[:], self.memory_gib = pickle.loads(self.receive()[1])
        self.loop = asyncio.new_event_loop()  # one for good: a client that the user's file keeps is tied to it
        asyncio.set_event_loop(self.loop)

    def run(self) -> None:
        number, payload = self.receive()
        while True:
            if number != LOAD:
                self.send(number, *self.call(payload))
            elif self.load(payload):
                payload = self.loop.run_until_complete(self.run_async())  # until another function is to be loaded
                continue
            number, payload = self.receive()

    async def run_async(self) -> bytes:
        tasks = set()  # the event loop itself keeps no reference
        while True:
            number, payload = await self.loop.run_in_executor(None, self.receive)
            if number == LOAD:
                return payload
            tasks.add(task := self.loop.create_task(self.call_async(number, payload)))
            task.add_done_callback(tasks.discard)

    def load(self, payload: bytes) -> bool:
        """Whether the function is async."""
        try:
            limit_memory(None)
            self.function = load_function(pickle.loads(payload))
            limit_memory(self.memory_gib)
            is_async = inspect.iscoroutinefunction(self.function)
        except BaseException as error:
            self.send(LOAD, None, one_line(error))
            return False
        self.send(LOAD, is_async)
        return is_async

    def call(self, payload: bytes) -> tuple:
        try:
            arguments, _ = pickle.loads(payload)  # the parent keeps the time
            return (self.function(*arguments),)
        except BaseException as error:  # SystemExit too, and what libraries raise for their own time-outs
            return None, one_line(error)

    async def call_async(self, number: int, payload: bytes) -> None:
        scope = seconds = None
        try:
            arguments, seconds = pickle.loads(payload)
            async with asyncio.timeout(seconds) as scope:
                result = (await self.function(*arguments),)
        except BaseException as error:
            late = scope is not None and scope.expired()  # it may raise TimeoutError for reasons of its own
            result = None, f"no answer within {seconds:g} s" if late else one_line(error), late
        self.send(number, *result)

    def receive(self) -> tuple[int, bytes]:
        header = self.stream.read(HEADER.size)
        if len(header) < HEADER.size:
            os._exit(0)
        number, length = HEADER.unpack(header)
        return number, self.stream.read(length)

    def send(self, number: int, value: object, error: str | None = None, timed_out: bool = False) -> None:
        """The fields of a `pool.Result`."""
        if os.getpid() != self.pid:  # the function has forked, and its child has returned too
            os._exit(0)
        try:
            payload = pickle.dumps((value, error, timed_out))
        except BaseException as problem:
            payload = pickle.dumps((None, f"the result cannot be pickled: {one_line(problem)}", False))
        self.connection.sendall(HEADER.pack(number, len(payload)) + payload)


def end_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """This process gets the signal when its parent, or the thread of it that has started this process, ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, how)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before; if it had forked, the connection does not end either
        os._exit(0)


@cache
def load_function(target: str):
    """`module:function` or `path/to/file.py:function`, prepared. Once for good, however the targets take turns."""
    path, _, name = target.rpartition(":")
    function = getattr(load_file(path) if path.endswith(".py") else importlib.import_module(path), name)
    getattr(function, "prepare", lambda: None)()
    return function


@cache
def load_file(path: str):
    spec = importlib.util.spec_from_file_location(f"user_{os.path.basename(path)[:-3]}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_memory(gib: float | None) -> None:
    """Of address space: GiB beyond what is in use, or no limit."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        soft = hard if gib is None else used + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def one_line(error: BaseException) -> str:
    try:
        text = str(error).strip().partition("\n")[0][:500]
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    try:
        Server(*map(int, sys.argv[1:])).run()
    except ConnectionError:  # the parent has gone without reading everything
        os._exit(0)
