"""Environments in episodes: each of a user's in a process of its own, so that one that hangs or
dies costs no other.

The processes are forks of one that has imported the user's file (common/rewards/processes.py). The
built-in environments cannot hang, and answer in this process."""

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.rewards import old_processes as processes
from common.rewards.old_processes import ForkServer, Process
from common.rewards.result import Result
from common.rewards.worker import one_line
from common.rollout.environments import ENVIRONMENTS, Environment, Message, load_environment

GRACE = 1.0  # seconds for an environment to clean up when its episode is over


def allow_files() -> None:
    """Allow as many open files as the system does: an episode takes one here and one in the
    server."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Answer(NamedTuple):
    """The answer of an environment to a turn of the model, or one line about why the episode goes
    no further."""

    messages: list[Message]
    reward: float
    done: bool
    error: str = ""


class BuiltIn:
    """An environment in this process, with the methods of a `Process`."""

    def __init__(self, make: Callable[[], Environment]):
        self.environment = make()
        self.asked: dict[int, Result] = {}

    def ask(self, number: int, method: str, arguments: tuple, seconds: float) -> None:
        function = getattr(self.environment, method)
        try:
            self.asked[number] = Result(function(*copy.deepcopy(arguments)))
        except Exception as error:  # counted as a reward that could not be computed
            self.asked[number] = Result(error=one_line(error))

    def answers(self) -> list[tuple[int, Result]]:
        answers = list(self.asked.items())
        self.asked = {}
        return answers

    def close(self) -> None:
        pass


@dataclass
class RunningEnvironment:
    """An environment between its reset and its end."""

    process: Process | BuiltIn
    prompt: list[Message]
    """messages that `reset` must return"""
    records_states: bool = False
    turn: int = 0
    """number of its next question: 0 for the reset"""
    failed: bool = False
    states: list[str] = field(default_factory=list)
    """state before each turn of the model, if recorded"""
    held: Answer | None = None
    """answer that waits for the state after it"""

    def answers(self) -> list[Answer]:
        """Return what the environment has answered to its steps. An error is the last answer."""
        answers = []
        for number, result in self.process.answers():
            turn, of_state = divmod(number, 2)
            if of_state and turn and self.held is None:
                continue  # no turn follows
            error = result.error
            try:
                if error is None and of_state:
                    if not isinstance(result.value, str):
                        raise TypeError(f"returned {result.value!r:.50}, not a text")
                    self.states.append(result.value)
                    answers += [self.held] if turn else []
                    self.held = None
                elif error is None and turn > 0:
                    messages, reward, done = result.value
                    answer = Answer(messages, float(reward), bool(done))
                    if self.records_states and not answer.done:
                        self.held = answer
                    else:
                        answers.append(answer)
                elif error is None and result.value != self.prompt:
                    raise ValueError("not the same messages as at the start of the run")
            except Exception as problem:  # of values that a user's code returned
                error = one_line(problem)
            if error is not None:
                self.failed = True
                self.process.asked.clear()
                self.process.close()
                question = "state after " * of_state + (f"step {turn}" if turn else "reset")
                return [*answers, Answer([], 0.0, True, f"{question}: {error}")]
        return answers


class Environments:
    """Environments at work, each in an episode with a number that the caller chooses. Only
    `answers` waits for them.

    Every episode begins with `reset` and ends with `end`, also after an error. For one thread: see
    `ForkServer`."""

    def __init__(
        self, name: str, timeout: float, start_timeout: float = processes.START_SECONDS,
        records_states: bool = False,
    ):  # fmt: skip
        """`timeout`: seconds of wall clock for a reset, a step or a state. `records_states`: of
        each turn. Raises `ValueError` if `name` is wrong."""
        self.make = load_environment(name, records_states)
        self.records_states = records_states
        self.timeout = timeout
        self.start_timeout = start_timeout
        self.server = None
        if name not in ENVIRONMENTS:
            self.server = ForkServer(name, shared=True, grace=GRACE)
            allow_files()
        self.episodes: dict[int, RunningEnvironment] = {}

    @property
    def outstanding(self) -> int:
        """Number of resets and steps that have no answer yet."""
        return sum(len(episode.process.asked) for episode in self.episodes.values())

    def reset(self, number: int, row: dict) -> None:
        """Begin an episode with an environment of its own. A reset that goes well has no answer."""
        assert number not in self.episodes
        process = Process(self.server, self.start_timeout) if self.server else BuiltIn(self.make)
        self.episodes[number] = RunningEnvironment(process, row["_prompt"], self.records_states)
        self._ask(number, "reset", row)

    def step(self, number: int, completion: str) -> None:
        """Pass on the next turn of the model; the reset need not have ended. After an error nothing
        is answered."""
        self._ask(number, "step", completion)

    def end(self, number: int) -> None:
        """End the episode; questions without an answer get none."""
        self.episodes.pop(number).process.close()

    def answers(self, wait: float = 0.0) -> list[tuple[int, Answer]]:
        """Return the answers since the last call, by episode and then in the order of its steps.

        Waits up to so many seconds for the first, if any is outstanding.
        """
        until = time.monotonic() + wait
        answers: list[tuple[int, Answer]] = []
        while self.outstanding and not answers:
            waiting = {n: episode for n, episode in self.episodes.items() if episode.process.asked}
            if self.server:
                processes.wait([episode.process for episode in waiting.values()], until)
            for number, episode in waiting.items():
                answers += [(number, answer) for answer in episode.answers()]
            if time.monotonic() >= until:
                break
        return answers

    def close(self) -> None:
        """End all episodes and processes."""
        for number in list(self.episodes):
            self.end(number)
        if self.server:
            self.server.close()

    def _ask(self, number: int, method: str, argument: object) -> None:
        episode = self.episodes[number]
        if not episode.failed:
            episode.process.ask(2 * episode.turn, method, (argument,), self.timeout)
            if self.records_states:
                episode.process.ask(2 * episode.turn + 1, "state", (), self.timeout)
            episode.turn += 1
