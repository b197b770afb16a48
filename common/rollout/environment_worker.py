"""What the processes of common/rollout/environment_pool.py run: one imports the user's file, and forks itself for
every episode.

Imports the standard library alone, and fast; everything else is the environment's.
"""

import copy
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from common.rewards.worker import HEADER, end_with, load_file, one_line

STARTED, ANSWER, DIED = range(3)  # what a message is, in place of a call's number
NAMES = {int(number): number.name for number in signal.Signals}
SIGNALS = (signal.SIGCHLD, signal.SIGTERM)
GRACE = 1.0  # seconds in which the environment of an episode that is over may clean up


def opened(make: Callable, row: dict) -> object:
    """An environment at the start of an episode."""
    environment = make()
    if environment.reset(copy.deepcopy(row)) != row["_prompt"]:
        raise ValueError("not the same messages as at the start of the run")
    return environment


def stepped(environment, completion: str) -> tuple[list, float, bool]:
    messages, reward, done = environment.step(completion)
    return messages, float(reward), bool(done)


def allow_files() -> None:
    """As many open files as the system lets this process have: an episode takes one."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Zygote:
    """Forks a process for each connection that it is handed, and keeps an end of it: to tell how the process died, and
    to hear that the episode is over."""

    def __init__(self, control: int, parent: int, spec: str):
        end_with(parent)  # the user's file may hang
        allow_files()
        self.control = socket.socket(fileno=control)
        self.control.set_inheritable(False)
        path, _, name = spec.rpartition(":")
        self.problem = ""
        try:
            self.make = getattr(load_file(path), name)
        except BaseException as error:
            self.problem = f"{path} cannot be loaded: {one_line(error)}"
        self.connections: dict[int, socket.socket] = {}  # of processes, by their ids
        self.ending: deque[tuple[float, int]] = deque()  # when to kill them
        self.woken, self.waker = socket.socketpair()  # by SIGNALS
        self.woken.setblocking(False)
        self.waker.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        self.parent, self.open = parent, True
        end_with(parent, signal.SIGTERM)  # so that there is time to end what the environments have started
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.woken, select.POLLIN)

    def run(self) -> None:
        while self.open or self.connections or self.ending:
            wait = max(0.0, self.ending[0][0] - time.monotonic()) if self.ending else None
            ready = {fd for fd, _ in self.poll.poll(None if wait is None else 1000 * wait)}
            for pid in [pid for pid, connection in self.connections.items() if connection.fileno() in ready]:
                self.end(pid)
            if self.woken.fileno() in ready:
                self.woken.recv(1 << 16)
            self.reap()
            while self.ending and self.ending[0][0] <= time.monotonic():
                self.kill(self.ending.popleft()[1])
            if os.getppid() != self.parent:
                self.shut()
            elif self.control.fileno() in ready:
                self.start()

    def start(self) -> None:
        message, descriptors, *_ = socket.recv_fds(self.control, 1, 1)
        if not message:  # the parent has closed it
            return self.shut()
        if not descriptors:  # too many open files: the parent sees the connection end
            return
        connection, parent, problem = socket.socket(fileno=descriptors[0]), os.getpid(), self.problem
        if not problem:
            try:
                pid = os.fork()
            except OSError as error:
                problem = one_line(error)
        if problem:
            with connection, suppress(ConnectionError):
                send(connection, ANSWER, pickle.dumps((None, problem)))
        elif pid == 0:
            self.be_child(connection, parent)
        else:
            with suppress(OSError):  # it has done so itself
                os.setpgid(pid, pid)
            self.connections[pid] = connection
            self.poll.register(connection, 0)  # POLLHUP: the parent has closed it

    def be_child(self, connection: socket.socket, parent: int) -> None:
        try:
            os.setpgid(0, 0)
            end_with(parent)
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            for other in (self.control, self.woken, self.waker, *self.connections.values()):
                other.close()
            if "numpy.random" in sys.modules:  # else all episodes drew the same; Python does so for its own generator
                sys.modules["numpy.random"].seed()
            with suppress(ConnectionError):  # the parent has gone without reading everything
                play(connection, self.make)
            os._exit(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(1)

    def shut(self) -> None:
        if self.open:
            self.open = False
            self.poll.unregister(self.control)
            for pid in list(self.connections):
                self.end(pid)

    def end(self, pid: int) -> None:
        """The parent has closed the connection: the process sees that too, unless it hangs."""
        self.poll.unregister(self.connections[pid])
        self.connections.pop(pid).close()
        self.ending.append((time.monotonic() + GRACE, pid))

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                self.kill(pid, os.killpg)  # what it has started
                self.ending = deque((when, other) for when, other in self.ending if other != pid)
                if connection := self.connections.pop(pid, None):
                    self.poll.unregister(connection)
                    code = os.waitstatus_to_exitcode(status)
                    how = NAMES.get(-code, f"signal {-code}") if code < 0 else f"exit {code}"
                    with connection, suppress(OSError):  # perhaps nobody reads
                        connection.sendmsg([HEADER.pack(DIED, len(how)) + how.encode()], [], socket.MSG_DONTWAIT)

    def kill(self, pid: int, *how: Callable) -> None:
        for kill in how or (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)


def play(connection: socket.socket, make: Callable) -> None:
    """Answers the questions of one episode: a row, then completions; until there are no more or an error ends it."""
    stream, pid, environment, error = connection.makefile("rb"), os.getpid(), None, ""
    send(connection, STARTED, b"")
    while not error and len(header := stream.read(HEADER.size)) == HEADER.size:
        answer = None
        try:
            question = pickle.loads(stream.read(HEADER.unpack(header)[1]))
            if environment is None:
                environment = opened(make, question)
            else:
                answer = stepped(environment, question)
            payload = pickle.dumps((answer, ""))
        except BaseException as problem:  # SystemExit too, and what cannot be pickled
            payload = pickle.dumps((None, error := one_line(problem)))
        if os.getpid() != pid:  # the environment has forked, and its child has returned too
            os._exit(0)
        send(connection, ANSWER, payload)


def send(connection: socket.socket, what: int, payload: bytes) -> None:
    connection.sendall(HEADER.pack(what, len(payload)) + payload)


def main() -> None:
    _, _, control, parent, spec = sys.argv
    Zygote(int(control), int(parent), spec).run()
    os._exit(0)  # whatever the user's file has left running
