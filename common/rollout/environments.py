"""Environments, which answer the model between its turns, and the built-in ones.

An environment is a class whose constructor takes no arguments. Each episode has an object of its
own:

    reset(example: dict) -> messages                   the prompt of a data row, the same every time
    step(completion: str) -> messages, reward, done    the answer to one turn of the model
    state() -> str                                     optional: the situation before the next turn

Turns of a prompt's episodes with equal states can be compared (docs/environments.md).
Messages are `{"role": ..., "content": ...}`, as in a chat. `--reward environment` is the sum of the
rewards of the turns. Each built-in environment has a task of the same name for `--dataset`
(common/data/tasks.py).

An environment of your own runs in a process, a fork of one that has imported the file
(common/rewards/processes.py): one that hangs or dies costs its own episode only. The tokens of a
turn stay as they were sampled, and an answer becomes the token ids that the chat template gives it,
without loss."""

import copy
import re
import sys
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from common.config.online import SamplingArgs
from common.data.encode import Encoder
from common.data.messages import messages_field
from common.data.sample import Completion
from common.rewards.arithmetic import arithmetic
from common.rewards.functions import to_number
from common.rewards.processes import ForkServer, Process
from common.rewards.result import Result
from common.rewards.user_code import load_callable
from common.rewards.worker import one_line
from common.rollout.engine import Engine

GRACE = 1.0  # seconds for an environment to clean up when its episode is over

Message = dict[str, str]


class Environment(Protocol):
    def reset(self, example: dict) -> list[Message]: ...

    def step(self, completion: str) -> tuple[list[Message], float, bool]: ...


def load_environment(name: str, with_state: bool = False) -> Callable[[], Environment]:
    """Return a built-in environment, or `path/to/file.py:Class`. Raises `ValueError` for anything
    else, and `with_state` for a class without the method state."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if ":" not in name:
        names = ", ".join(ENVIRONMENTS)
        raise ValueError(f"--environment {name}: unknown; there are {names}, path/to/file.py:Class")
    environment = load_callable("--environment", name)
    names = ["reset", "step"] + ["state"] * with_state
    methods = [getattr(environment, method, None) for method in names]
    if not isinstance(environment, type) or not all(map(callable, methods)):
        wanted = " and ".join(names)
        raise ValueError(f"--environment {name}: not a class with the methods {wanted}")
    return environment


def prompt_maker_of_environment(args: SamplingArgs) -> Callable[[dict], list[Message]]:
    """Return the function row -> prompt of the environment, the messages of its reset. It raises
    `ValueError` naming the row that the environment cannot use."""
    name = args.environment
    environment = load_environment(name, args.records_states)

    def first_messages(row: dict) -> list[Message]:
        place = f"{row['_source']}: --environment {name}"
        try:
            messages = environment().reset(copy.deepcopy(row))
        except BaseException as error:  # the user's code may raise anything
            raise ValueError(f"{place} fails in reset: {one_line(error)}") from error
        if not messages_field(dict(_source=place, reset=messages), "reset"):
            raise ValueError(f"{place}: reset returns no list of messages")
        return messages

    return first_messages


def on_turns(completion: Completion, values: list[float]) -> list[float]:
    """Return, for each id of a completion, the number of the turn that has it or follows it."""
    ends = [index for index, _ in completion.turn_rewards[: completion.turns - 1]]
    return [values[bisect_left(ends, index)] for index in range(len(completion.ids))]


def last_token(completion: Completion, args: SamplingArgs) -> int | None:
    """Return the last token of a turn that may lack its EOS, for `Encoder.reply`."""
    has_eos = completion.finish_reason == "stop" and not (args.stop or args.stop_token_ids)
    return None if has_eos else completion.ids[-1]


# ---- episodes ----


class Environments:
    """The partner of `--environment`."""

    def __init__(self, args: SamplingArgs, engine: Engine):
        self.args = args
        self.make = load_environment(args.environment, args.records_states)
        self.encoder = Encoder(engine.tokenizer, args)
        self.server = None
        if args.environment not in ENVIRONMENTS:
            self.server = ForkServer(args.environment, shared=True, grace=GRACE)
            allow_files()

    def begin(self, row: dict) -> "EnvironmentEpisode":
        return EnvironmentEpisode(self, row)

    def reply(self, messages: list[Message], completion: Completion) -> list[int]:
        """Return the ids of an answer to the last turn of a completion."""
        return self.encoder.reply(messages, last_token(completion, self.args))

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


class EnvironmentEpisode:
    """An environment from its reset, after the first turn of the model, to its end."""

    def __init__(self, environments: Environments, row: dict):
        self.environments = environments
        self.row = row
        self.process: Process | BuiltIn | None = None

    async def answer(self, completion: Completion) -> list[int] | None:
        """Return the ids of the environment's messages; see `Episode` in partner.py."""
        step = f"step {completion.turns}"
        doing = step if self.process else "reset"
        try:
            if self.process is None:
                server = self.environments.server
                self.process = Process(server) if server else BuiltIn(self.environments.make())
                if await self._call("reset", self.row) != self.row["_prompt"]:
                    raise ValueError("not the same messages as at the start of the run")
                await self._record_state(completion)
            doing = step
            messages, reward, done = await self._call("step", completion.text)
            reward = float(reward)
            if not done:
                await self._record_state(completion)
            completion.turn_rewards.append((len(completion.ids) - 1, reward))
            return None if done else self.environments.reply(messages, completion)
        except Failure as failure:
            completion.error = f"{doing}: {failure}"
        except Exception as error:  # of what the user's code returned
            completion.error = f"{doing}: {one_line(error)}"
        return None

    def end(self, completion: Completion) -> None:
        if self.process is not None:
            self.process.close()

    async def _call(self, method: str, *arguments: object) -> object:
        """Return what a method of the environment returns. Raises `Failure`."""
        seconds = self.environments.args.answer_seconds
        result = await self.process.call(method, *arguments, seconds=seconds)
        if result.error is not None:
            raise Failure(result.error)
        return result.value

    async def _record_state(self, completion: Completion) -> None:
        if self.environments.args.records_states:
            state = await self._call("state")
            if not isinstance(state, str):
                raise TypeError(f"state returned {state!r:.50}, not a text")
            completion.states.append(state)


class Failure(Exception):
    """An error of the environment, in one line."""


def allow_files() -> None:
    """Allow as many open files as the system does: an episode takes one here and one in the
    server."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class BuiltIn:
    """An environment in this process, with the methods of a `Process`: it cannot hang."""

    def __init__(self, environment: Environment):
        self.environment = environment

    async def call(self, method: str, *arguments: object, seconds: float) -> Result:
        try:
            return Result(getattr(self.environment, method)(*copy.deepcopy(arguments)))
        except Exception as error:  # counted as a reward that could not be computed
            return Result(error=one_line(error))

    def close(self) -> None:
        pass


# ---- built-in environments ----


def asked(example: dict) -> list[Message]:
    """Return the `prompt` column as messages."""
    prompt = example["prompt"]
    return prompt if isinstance(prompt, list) else [dict(role="user", content=prompt)]


class Calculator:
    """Calculator: answers `<calc>expression</calc>` with `expression=value`. A turn without a call
    is the final answer.

    Columns: `prompt`, `answer`. Reward: 1 if the last number of the final answer is `answer`.
    State: the values that it has told.
    """

    CALL = re.compile(r"<calc>([^<>]*)</calc>")

    def reset(self, example: dict) -> list[Message]:
        self.answer = to_number(str(example["answer"]))
        self.told: set[str] = set()
        return asked(example)

    def state(self) -> str:
        return " ".join(sorted(self.told))

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        if "<calc>" in completion:
            expression = (self.CALL.findall(completion) or [""])[-1].strip()
            value, _ = arithmetic(expression)
            content = f"{expression}={value}"
            if value is None:
                content = "error: <calc>numbers with + - * / ( )</calc>"
            else:
                self.told.add(content)
            return [dict(role="tool", content=content)], 0.0, False
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
        return [], float(bool(numbers) and to_number(numbers[-1]) == self.answer), True


class GuessNumber:
    """Secret number: answers each guess with higher or lower.

    Columns: `prompt`, `number`. Reward: 1 for the right guess. State: the numbers that are left.
    """

    def reset(self, example: dict) -> list[Message]:
        self.number = int(example["number"])
        self.low = 0
        self.high = float("inf")
        return asked(example)

    def state(self) -> str:
        return f"{self.low} to {self.high}"

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        numbers = re.findall(r"\d+", completion)
        if not numbers:
            return [dict(role="user", content="a number!")], 0.0, False
        guess = int(numbers[-1][:9])  # Python refuses to convert thousands of digits
        if guess == self.number:
            return [], 1.0, True
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return [dict(role="user", content="higher")], 0.0, False
        self.high = min(self.high, guess - 1)
        return [dict(role="user", content="lower")], 0.0, False


ENVIRONMENTS = dict(
    calculator=Calculator,
    guess_number=GuessNumber,
)
