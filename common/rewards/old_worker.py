"""Child side of processes.py: a server that forks itself, and its forks, which answer questions.

It runs as a script and imports only the standard library; other imports come from the target."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from functools import cache
from traceback import walk_tb

HEADER = struct.Struct("!qQ")  # number of the question, size of the pickle that follows
LOADED = -1  # number of the message that the target has loaded, or failed to load
DIED = -2  # number of the message that the process died
CONTROL = re.compile(rb"[\0-\x08\x0b-\x1f\x7f]")
OUTPUT = 1 << 20  # bytes that all workers of a server may print


class Server:
    """Forks a worker for each connection that the parent sends, and relays the output of the
    workers.

    It reports the death of a worker on a copy of its connection. When the parent closes its end, it
    kills the worker after `grace` seconds. It adopts and kills all processes of a dead worker."""

    def __init__(
        self, control: int, parent: int, target: str, shared: bool, memory_gib: float, grace: float,
        argument: object = None,
    ):  # fmt: skip
        end_with(parent, signal.SIGKILL)  # SIGKILL, because the target may hang while it loads
        self.control = socket.socket(fileno=control)
        self.control.set_inheritable(False)
        self.target = target
        self.memory_gib = memory_gib
        self.grace = grace
        self.argument = json.dumps(argument)
        if shared:
            with suppress(BaseException):  # each worker loads it again and reports the error
                load(target, self.argument)
        # process id -> connection; None: it is closed, or the user's file started the process
        self.workers: dict[int, socket.socket | None] = dict.fromkeys(children())
        self.output, self.printer = os.pipe()
        self.printable = OUTPUT  # bytes that may still be printed
        self.stopping = False
        self.loop = asyncio.new_event_loop()
        self.loop.add_signal_handler(signal.SIGCHLD, self.reap)
        self.loop.add_signal_handler(signal.SIGTERM, self.stop)
        self.loop.add_reader(self.control, self.read)
        self.loop.add_reader(self.output, self.relay)
        end_with(parent, signal.SIGTERM)  # to have time to kill the processes of workers
        self.loop.run_forever()

    def read(self) -> None:
        """Fork a worker for a connection from the parent, and end workers whose connections the
        parent has closed."""
        message, descriptors, *_ = socket.recv_fds(self.control, 1, 1)
        poll = select.poll()
        pids = {connection.fileno(): pid for pid, connection in self.workers.items() if connection}
        for descriptor in pids:
            poll.register(descriptor, 0)  # POLLHUP alone
        for descriptor, _ in poll.poll(0):
            self.end(pids[descriptor])
        if not message:  # the parent has closed the control connection
            self.stop()
        elif descriptors:  # none if a connection was closed, or too many files are open
            self.fork(socket.socket(fileno=descriptors[0]))

    def fork(self, connection: socket.socket) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return report_death(connection, one_line(error))
        if pid == 0:
            self.become_worker(connection, server)
        self.workers[pid] = connection

    def become_worker(self, connection: socket.socket, server: int) -> None:
        try:
            # a process group, to kill it as a whole; and Linux divides a busy CPU among sessions
            os.setsid()
            end_with(server, signal.SIGKILL)
            os.dup2(self.printer, 1)
            os.dup2(self.printer, 2)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for other in filter(None, (self.control, *self.workers.values())):
                other.close()
            if "numpy.random" in sys.modules:  # reseeded, as Python does with its own generator
                sys.modules["numpy.random"].seed()
            with suppress(OSError):  # the parent, or the user's code, has closed the connection
                Worker(connection).run(self.target, self.argument, self.memory_gib)
            os._exit(os.EX_PROTOCOL)  # which is reported if the parent has not closed it
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(1)

    def end(self, pid: int) -> None:
        """Close the connection of a worker. The worker then ends by itself, unless it hangs."""
        if self.workers[pid]:
            self.workers[pid].close()
            self.workers[pid] = None
        self.loop.call_later(self.grace, self.kill, pid)

    def kill(self, pid: int) -> None:
        if pid in self.workers:  # not reaped yet
            os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End all workers. This process ends after the last one."""
        self.stopping = True
        self.loop.remove_reader(self.control)
        for pid in self.workers:
            self.end(pid)
        self.reap()

    def reap(self) -> None:
        """Report the workers that have died, and kill the processes that they have left, which are
        orphans."""
        with suppress(ChildProcessError):  # no child is left
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
                    os.killpg(pid, signal.SIGKILL)
                connection = self.workers.pop(pid, None)
                if connection:
                    report_death(connection, cause_of_death(os.waitstatus_to_exitcode(status)))
        orphans = kill_children(set(self.workers))
        if self.stopping and not orphans and not self.workers:
            self.loop.stop()

    def relay(self) -> None:
        """Copy output of workers to stderr, `OUTPUT` bytes in all, control characters visibly."""
        data = os.read(self.output, 1 << 16)
        shown = data[: self.printable]
        self.printable = max(0, self.printable - len(data))
        if shown and not self.printable:
            rest = f"printed {OUTPUT >> 20} MiB, the rest is dropped; write to a file"
            shown += f"\n{self.target}: {rest}\n".encode()
        os.write(2, CONTROL.sub(lambda match: rb"\x%02x" % match[0][0], shown))


def children() -> set[int]:
    """Return the children of this process. Linux only: elsewhere an empty set."""
    pids = set()
    with suppress(OSError, AttributeError):  # not Linux
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # fast: raises without any
        for thread in os.listdir("/proc/self/task"):
            # OSError: the thread may have ended
            with suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
                pids.update(map(int, file.read().split()))
    return pids


def kill_children(spared: set[int]) -> set[int]:
    """Kill the children of this process that are not in `spared`, and return them."""
    pids = children() - spared
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return pids


def cause_of_death(code: int) -> str:
    if code == os.EX_PROTOCOL:
        return "it closed a file that it had not opened"
    names = {-number: number.name for number in signal.Signals}
    return names.get(code, f"exit {code}" if code >= 0 else f"signal {-code}")


def report_death(connection: socket.socket, cause: str) -> None:
    payload = pickle.dumps((None, f"the process died ({cause})"))
    with connection, suppress(OSError):  # does not block, because the parent may not read it
        connection.sendmsg([HEADER.pack(DIED, len(payload)) + payload], [], socket.MSG_DONTWAIT)


class Worker:
    """Worker that answers the questions `(method, arguments, seconds)` of one connection until the
    parent closes it.

    If the target is a function, `method` is None. If it is a class, the worker makes one object and
    calls its `method`, at the end also `close`, if it has that."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.stream = connection.makefile("rb")
        self.pid = os.getpid()
        self.object: object = None
        self.kept: set[int] = set()  # processes that the load has started
        self.tasks: set[asyncio.Task] = set()  # running calls: the loop has weak references
        self.loop = asyncio.new_event_loop()  # a single one: clients in the user's file are bound
        asyncio.set_event_loop(self.loop)

    def run(self, target: str, argument: str, memory_gib: float) -> None:
        try:
            self.target = load(target, argument)
            self.file = target.rpartition(":")[0]
            self.kept = children()
            limit_memory(memory_gib)
            is_async = inspect.iscoroutinefunction(self.target)
        except BaseException as error:
            return self.send(LOADED, None, one_line(error))
        self.send(LOADED, is_async)
        if is_async:
            return self.loop.run_until_complete(self.answer_concurrently())
        while received := self.receive():
            self.answer(*received)
        if hasattr(self.object, "close"):
            self.object.close()

    def answer(self, number: int, payload: bytes) -> None:
        try:
            method, arguments, _ = question(payload)  # the parent enforces the time limit
            if method and self.object is None:
                self.object = self.target()
            function = getattr(self.object, method) if method else self.target
            result = (function(*arguments),)
        except BaseException as error:  # also SystemExit, and time-out exceptions of libraries
            result = None, self.located(error)
        self.send(number, *result)

    async def answer_concurrently(self) -> None:
        while received := await self.loop.run_in_executor(None, self.receive):
            self.tasks.add(self.loop.create_task(self.answer_async(*received)))

    async def answer_async(self, number: int, payload: bytes) -> None:
        limit = None
        try:
            _, arguments, seconds = question(payload)
            async with asyncio.timeout(seconds) as limit:
                result = (await self.target(*arguments),)
        except BaseException as error:
            if limit is not None and limit.expired():  # the function may raise TimeoutError itself
                result = None, f"no answer within {seconds:g} s", True
            else:
                result = None, self.located(error)
        self.tasks.discard(asyncio.current_task())
        self.send(number, *result)

    def located(self, error: BaseException) -> str:
        """Return `one_line` of an error, with the line of the user's file that raised it."""
        trace = walk_tb(error.__traceback__)
        lines = [line for frame, line in trace if frame.f_code.co_filename == self.file]
        return f"{one_line(error)} (line {lines[-1]})" if lines else one_line(error)

    def receive(self) -> tuple[int, bytes] | None:
        """Return number and pickle of the next question, or None at the end."""
        header = self.stream.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        number, length = HEADER.unpack(header)
        return number, self.stream.read(length)

    def send(self, number: int, *result: object) -> None:
        """Send an answer: the fields of a `Result`. First end the processes that the calls of a
        function have started."""
        if os.getpid() != self.pid:  # a child that the function has forked: only its parent answers
            os._exit(0)
        if self.object is None and not self.tasks:
            while kill_children(self.kept):  # again: their orphans become children
                with suppress(ChildProcessError):
                    os.waitpid(-1, 0)
        try:
            payload = pickle.dumps(result)
        except BaseException as error:
            payload = pickle.dumps((None, f"the result cannot be pickled: {one_line(error)}"))
        self.connection.sendall(HEADER.pack(number, len(payload)) + payload)


def question(payload: bytes) -> tuple:
    unpickled = pickle.loads(payload)
    if isinstance(unpickled, str):  # the parent could not pickle the question
        raise ValueError(unpickled)
    return unpickled


def end_with(parent: int, number: signal.Signals) -> None:
    """Make this process receive a signal when its parent, or the thread that started it, ends, and
    adopt the orphans among its descendants. Linux only."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        libc.prctl(1, number)  # PR_SET_PDEATHSIG
        libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(0)


@cache
def load(target: str, argument: str = "null"):
    """Load the function or class `module:name` or `path/to/file.py:name`, once, and call its
    `prepare`. `argument`: JSON; if it is not null, the target is what the function makes of it."""
    path, _, name = target.rpartition(":")
    module = load_file(path) if path.endswith(".py") else importlib.import_module(path)
    function = getattr(module, name)
    if hasattr(function, "prepare"):
        function.prepare()
    return function if argument == "null" else function(json.loads(argument))


@cache
def load_file(path: str):
    spec = importlib.util.spec_from_file_location(f"user_{os.path.basename(path)[:-3]}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit_memory(gib: float) -> None:
    """Limit the address space to the present use plus `gib`. Linux only."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        soft = pages * resource.getpagesize() + int(gib * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def one_line(error: BaseException) -> str:
    try:
        text = str(error).strip().partition("\n")[0][:500]
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    setup = json.loads(sys.argv[1])
    sys.stdout.reconfigure(errors="backslashreplace")  # a reward may print what the encoding lacks
    sys.path[:] = setup.pop("path")
    Server(**setup)
    os._exit(0)  # without waiting for threads of the user's file
