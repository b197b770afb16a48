"""What runs in the processes of pool.py: a server, which forks itself, and its forks, the workers.

Run as a script, it imports only the standard library, so that a worker starts fast and has nothing
that the user's code does not import itself."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, ValuesView
from contextlib import suppress
from functools import cache
from traceback import walk_tb
from typing import Any, NamedTuple

HEADER = struct.Struct("!Q")  # size of the pickle that follows
GRACE = 1.0  # seconds for a worker to clean up when it is closed between two calls
MEMORY_GIB = 4.0  # limit of what a worker allocates after loading the target (Linux)


class Result(NamedTuple):
    """The result of a reward for a completion, or of another call of a user's code."""

    value: Any = None
    error: str | None = None
    """why there is no value, in one line"""
    timed_out: bool = False
    feedback: str = ""
    """text about the completion; self_distill.py reads it"""
    numbers: dict[str, float] = {}
    """further numbers about the completion, by name"""


def serve(control: int, parent: int, target: str, argument: str, shared: bool) -> None:
    """Be the server: fork a worker for each connection that the parent sends through `control`.
    When the parent closes `control` or dies, end all workers and their children."""
    end_with(parent, signal.SIGKILL)  # not SIGTERM yet: loading may hang
    orders = socket.socket(fileno=control)
    orders.set_inheritable(False)
    if shared:
        with suppress(BaseException):  # each worker loads it again and reports the error
            load(target, argument)
    spared = children()  # the user's file started them
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the user's file may ignore it
    end_with(parent, signal.SIGTERM)
    workers: set[int] = set()
    try:
        while True:
            if select.select([orders], [], [], 0.2)[0]:
                _, descriptors, *_ = socket.recv_fds(orders, 1, 1)
                if not descriptors:  # the parent has closed it
                    break
                with socket.socket(fileno=descriptors[0]) as connection, suppress(OSError):
                    workers.add(fork(connection, target, argument))
            workers = running(workers)
            kill_children({*workers, *spared})  # orphans of workers
        until = time.monotonic() + GRACE
        while (workers := running(workers)) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        for pid in workers:  # elsewhere than on Linux `kill_children` finds none
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        while kill_children(set()):
            time.sleep(0.01)


def running(workers: set[int]) -> set[int]:
    return {pid for pid in workers if not os.waitpid(pid, os.WNOHANG)[0]}


def fork(connection: socket.socket, target: str, argument: str) -> int:
    """Fork a worker that answers calls on this connection, and return its process id."""
    server = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # SIGTERM must not raise in a fork
    pid = os.fork()
    if not pid:
        try:
            # A new session is also a process group, which can be killed as a whole, and Linux
            # divides a busy CPU among sessions.
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            end_with(server, signal.SIGKILL)
            if "numpy.random" in sys.modules:  # reseeded, as Python does with its own generator
                sys.modules["numpy.random"].seed()
            with suppress(OSError):  # the parent, or the user's code, has closed the connection
                work(connection, target, argument)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return pid


def work(connection: socket.socket, target: str, argument: str) -> None:
    """Be a worker. Send the process id, load the target and report whether that succeeded. Then
    answer calls `(method, arguments, seconds)` until the parent closes the connection.

    If the target is a function, `method` is None and each of the `arguments` is a call of it; there
    are several only if it is async, and then they run together. If the target is a class, the
    worker makes one object of it, calls its `method`, and at the end its `close`, if it has one."""
    reply(connection, os.getpid())
    file = os.path.abspath(target.rpartition(":")[0])
    stream = connection.makefile("rb")
    loop = asyncio.new_event_loop()  # only one, since clients in the user's file are bound to it
    asyncio.set_event_loop(loop)
    worker = os.getpid()
    instance = None
    try:
        function = load(target, argument)
        limit_memory(MEMORY_GIB)
    except BaseException as error:
        return reply(connection, None, one_line(error))
    reply(connection)
    spared = children()  # the user's file started them
    while header := stream.read(HEADER.size):
        try:
            method, arguments, seconds = pickle.loads(stream.read(*HEADER.unpack(header)))
            if method is not None:
                instance = function() if instance is None else instance
                result = (getattr(instance, method)(*arguments),)
            elif inspect.iscoroutinefunction(function):
                result = (loop.run_until_complete(together(function, arguments, seconds, file)),)
            else:
                result = ([(listed(function(*call)),) for call in arguments],)
        except BaseException as error:  # SystemExit and time-outs of libraries too
            result = None, one_line(error, file)
        if os.getpid() != worker:  # a child that the function forked: only its parent answers
            return
        while instance is None and kill_children(spared):  # processes that a call has left behind
            time.sleep(0.001)
        reply(connection, *result)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, GRACE)  # then the kernel ends this process
    if hasattr(instance, "close"):
        instance.close()


def listed(value: object) -> object:
    """Return an iterator, such as a generator, as a list, since it cannot be pickled; others
    unchanged."""
    return list(value) if isinstance(value, Iterator | ValuesView) else value


def reply(connection: socket.socket, *result: object) -> None:
    """Send the fields of a `Result` to the parent."""
    try:
        payload = pickle.dumps(result)
    except BaseException as error:
        payload = pickle.dumps((None, f"the result cannot be pickled: {one_line(error)}"))
    connection.sendall(HEADER.pack(len(payload)) + payload)


async def together(function, calls: list[tuple], seconds: float, file: str) -> list[tuple]:
    """Run calls of an async function together, and return the fields of a `Result` for each. One
    bad call must not cost the others their answers, so a value that cannot be pickled becomes an
    error here, and no late call is waited for while it cleans up."""

    async def answer(call: tuple) -> tuple:
        try:
            value = listed(await function(*call))
            pickle.dumps(value)
            return (value,)
        except BaseException as error:
            return None, one_line(error, file)

    tasks = [asyncio.ensure_future(answer(call)) for call in calls]
    await asyncio.wait(tasks, timeout=seconds)
    late = None, f"no answer within {seconds:g} s", True
    results = [task.result() if task.done() else late for task in tasks]
    for task in tasks:
        task.cancel()
    return results


def one_line(error: BaseException, file: str = "") -> str:
    """Return an error in one line, with the line number in the user's `file` that raised it."""
    try:
        text = str(error).strip().partition("\n")[0][:500]
    except BaseException:
        text = "(its text cannot be had)"
    trace = walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == file]
    place = f" (line {lines[-1]})" if lines else ""
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + place


@cache
def load(target: str, argument: str = "null"):
    """Load the function or class `module:name` or `path/to/file.py:name`, once, and call its
    attribute `prepare`, if it has one. With an `argument` (JSON) return what the function makes of
    it."""
    path, _, name = target.rpartition(":")
    module = load_file(path) if path.endswith(".py") else importlib.import_module(path)
    function = getattr(module, name)
    if hasattr(function, "prepare"):
        function.prepare()
    return function if argument == "null" else function(json.loads(argument))


@cache
def load_file(path: str):
    """Import a Python file. It may import the files beside it."""
    path = os.path.abspath(path)  # `one_line` compares it with tracebacks
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"user_{os.path.basename(path)[:-3]}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def end_with(parent: int, number: signal.Signals) -> None:
    """Let the kernel signal this process when its parent, or the parent's thread that started it,
    ends. Also become the parent of orphaned descendants, so that they can be killed. Linux only."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        libc.prctl(1, number)  # PR_SET_PDEATHSIG
        libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(0)


def children() -> set[int]:
    """Return the process ids of this process's children; always empty if this is not Linux."""
    pids = set()
    with suppress(OSError):  # not Linux, or a thread has ended
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                pids.update(map(int, file.read().split()))
    return pids


def kill_children(spared: set[int]) -> set[int]:
    """Kill and reap the children of this process that are not in `spared`, each with its process
    group. Return their process ids."""
    pids = children() - spared
    for pid in pids:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):  # dead, or another user's
                kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return pids


def limit_memory(gib: float) -> None:
    """Limit the address space to what is in use now plus `gib`. Linux only."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        soft = pages * resource.getpagesize() + int(gib * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    setup = json.loads(sys.argv[1])
    sys.stdout.reconfigure(errors="backslashreplace")  # a reward may print what the encoding lacks
    sys.path[:] = setup.pop("path")
    try:
        serve(**setup)
    finally:
        os._exit(0)  # does not wait for threads of the user's file
