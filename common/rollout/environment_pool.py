"""Environments that answer when they can: a process for every episode, so that one that hangs or dies costs no other.

The processes are forks of one that has imported the user's file (environment_worker.py), which takes milliseconds. They
are for code that the user chose to run: nothing here protects from malice, and what they send back is unpickled. The
built-in environments cannot hang, and answer right here.
"""

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from common.rewards.pool import Connection
from common.rewards.worker import one_line
from common.rollout.environment_worker import ANSWER, DIED, GRACE, allow_files, opened, stepped
from common.rollout.environments import ENVIRONMENTS, Message, load_environment

# -P: without the current folder on sys.path until it is the parent's.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from common.rollout import environment_worker as child; "
    "child.main()"
)
START_SECONDS = 60  # for the user's file to be imported and a process to be forked; not counted as an answer's time


class Answer(NamedTuple):
    """What an environment says to a turn of the model's, or one line about why it says nothing more."""

    messages: list[Message]
    reward: float
    done: bool
    error: str = ""


Result = tuple[tuple | None, str]  # what the environment returned (None: of its reset), or what went wrong


class Environments:
    """Environments at work, each in an episode with a number that the caller chooses. Nothing here waits for one but
    `answers`, as long as it is told to.

    Every episode begins with `reset` and ends with `end`, also after an error. For one thread: Linux ends the processes
    with the thread that made the first episode.
    """

    def __init__(self, name: str, timeout: float, start_timeout: float = START_SECONDS):
        """`timeout`: seconds of wall clock for a reset and for each step, counted while this process looks on.
        Raises `ValueError` naming what is wrong with `name`."""
        self.make, self.timeout, self.start_timeout = load_environment(name), timeout, start_timeout
        self.zygote = None if name in ENVIRONMENTS else _Zygote(name)
        self.episodes: dict[int, _Here | _There] = {}

    @property
    def outstanding(self) -> int:
        """How many resets and steps are asked for, and `answers` has not seen to."""
        return sum(len(episode.asked) for episode in self.episodes.values())

    def reset(self, number: int, row: dict) -> None:
        """Begins an episode with an environment of its own. That it went well is not answered."""
        assert number not in self.episodes
        if self.zygote:
            self.episodes[number] = _There(self.zygote, self.timeout, self.start_timeout)
        else:
            self.episodes[number] = _Here(self.make)
        self._ask(number, "reset", row)

    def step(self, number: int, completion: str) -> None:
        """Tells it the next turn of the model's; the reset need not have come to its end. Of an episode that has had an
        error, or will, nothing comes."""
        self._ask(number, f"step {self.episodes[number].turn}", completion)

    def end(self, number: int) -> None:
        """The episode is over; what it has been asked is not answered any more."""
        self.episodes.pop(number).close()

    def answers(self, wait: float = 0.0) -> list[tuple[int, Answer]]:
        """What has been answered since the last call, waiting so many seconds for the first while any is outstanding;
        of one episode in the order of its steps. An error is the last that comes of an episode."""
        until, found = time.monotonic() + wait, []
        while self.outstanding and not found:
            found = self._look(until)
            if time.monotonic() >= until:
                break
        return found

    def close(self) -> None:
        """Ends all episodes and processes."""
        for number in list(self.episodes):
            self.end(number)
        if self.zygote:
            self.zygote.close()

    def _ask(self, number: int, what: str, question: object) -> None:
        episode = self.episodes[number]
        if not episode.failed:
            episode.asked.append(what)
            episode.turn += 1
            episode.ask(question)

    def _look(self, until: float) -> list[tuple[int, Answer]]:
        waiting = {number: episode for number, episode in self.episodes.items() if episode.asked}
        if self.zygote:
            poll = select.poll()
            for episode in waiting.values():
                poll.register(episode.socket, select.POLLIN | (select.POLLOUT if episode.outgoing else 0))
            if self.zygote.flush():
                poll.register(self.zygote.socket, select.POLLOUT)
            soonest = min([until, *(episode.deadline for episode in waiting.values())])
            poll.poll(1000 * max(0.0, soonest - time.monotonic()))
        found = []
        for number, episode in waiting.items():
            for result, error in episode.results():
                what = episode.asked.popleft()
                if error:
                    episode.fail()
                    found.append((number, Answer([], 0.0, True, f"{what}: {error}")))
                    break
                if result is not None:
                    found.append((number, Answer(*result)))
        return found


class _Here:
    """An episode of a built-in environment."""

    def __init__(self, make: Callable):
        self.make, self.environment, self.answered = make, None, deque()
        self.asked: deque[str] = deque()
        self.turn, self.failed = 0, False

    def ask(self, question: object) -> None:
        try:
            if self.environment is None:
                self.environment, result = opened(self.make, question), None
            else:
                result = stepped(self.environment, question)
            self.answered.append((result, ""))
        except Exception as error:  # of a row that it cannot use: counted as a reward that could not be computed
            self.answered.append((None, one_line(error)))

    def results(self) -> list[Result]:
        answered, self.answered = self.answered, deque()
        return list(answered)

    def fail(self) -> None:
        self.asked.clear()
        self.failed = True

    def close(self) -> None:
        pass


class _There(Connection):
    """An episode in a process of its own, as its parent sees it."""

    def __init__(self, zygote: "_Zygote", timeout: float, start_timeout: float):
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        zygote.fork(theirs)
        self.zygote, self.timeout, self.start_timeout = zygote, timeout, start_timeout
        self.asked: deque[str] = deque()
        self.turn, self.failed = 0, False
        self.started, self.problem = False, ""
        self.deadline = time.monotonic() + start_timeout  # of the start, then of the first of what is asked

    def ask(self, question: object) -> None:
        try:
            payload = pickle.dumps(question)
        except Exception as error:  # pickling runs code of whatever is in the row
            self.problem = f"the row cannot be pickled: {one_line(error)}"
            return
        if self.started and len(self.asked) == 1:
            self.deadline = time.monotonic() + self.timeout
        self.send(0, payload)

    def results(self) -> list[Result]:
        now = time.monotonic()  # before the look for answers: this process may have been slow itself
        self.flush()
        results, late = [], self.deadline < now
        for kind, payload in self.receive():
            if kind == DIED:
                self.problem, self.closed = f"the process died ({payload.decode()})", True
                continue
            self.started, late, self.deadline = True, False, time.monotonic() + self.timeout
            if kind == ANSWER:
                results.append(_unpickled(payload))
        if self.problem or self.closed:
            results.append((None, self.problem or "the process died"))
        elif late and self.started:
            results.append((None, f"no answer within {self.timeout:g} s"))
        elif late:
            self.zygote.close(patience=0.0)  # the user's file hangs
            results.append((None, f"not started within {self.start_timeout:g} s"))
        return results[: len(self.asked)]

    def fail(self) -> None:
        self.close()
        self.asked.clear()
        self.failed = True

    def close(self) -> None:
        """The zygote sees it, and ends the process."""
        self.socket.close()


def _unpickled(payload: bytes) -> Result:
    try:
        return pickle.loads(payload)
    except Exception as error:  # unpickling runs code of whatever the environment returned
        return None, f"the answer cannot be unpickled: {one_line(error)}"


class _Zygote:
    """The process whose forks play the episodes; started when it is needed, and again if it has died."""

    def __init__(self, name: str):
        path, _, made = name.rpartition(":")
        self.spec, self.process = f"{os.path.abspath(path)}:{made}", None
        self.unsent: deque[socket.socket] = deque()  # ends of connections that it could not yet take
        allow_files()

    def fork(self, connection: socket.socket) -> None:
        self.unsent.append(connection)
        self.flush()

    def flush(self) -> bool:
        """Whether it has to take more than it can at the moment."""
        while self.unsent:
            if self.process is None or self.process.poll() is not None:
                self._start()
            try:
                socket.send_fds(self.socket, [b"+"], [self.unsent[0].fileno()])
            except BlockingIOError:
                return True
            except ConnectionError:  # it has just died
                self.process.kill()
                self.process.wait()
                continue
            self.unsent.popleft().close()
        return False

    def close(self, patience: float = 3 * GRACE) -> None:
        """Waits so many seconds until it and its forks have ended."""
        while self.unsent:
            self.unsent.popleft().close()
        if self.process is not None:
            self.socket.close()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        if self.process is not None:
            self.socket.close()
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        setup = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), self.spec]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()])  # what is printed goes to stderr
        with theirs:  # a session of its own: Ctrl-C at the terminal is for the parent
            command = [sys.executable, "-P", "-u", "-c", START, *setup]
            self.process = subprocess.Popen(command, start_new_session=True, **pipes)
