"""Environments, which answer the model between its turns, and the built-in ones.

An environment is a class whose constructor takes no arguments. Each episode has an object of its
own:

    reset(example: dict) -> messages                   the prompt of a data row, the same every time
    step(completion: str) -> messages, reward, done    the answer to one turn of the model
    state() -> str                                     optional: the situation before the next turn

Turns of a prompt's episodes with equal states can be compared (docs/environments.md).
Messages are `{"role": ..., "content": ...}`, as in a chat. `--reward environment` is the sum of the
rewards of the turns. `common/rollout/multi_turn.py` plays the episodes. Each built-in environment
has a task of the same name for `--dataset` (common/data/tasks.py)."""

import re
from collections.abc import Callable
from typing import Protocol

from common.rewards.arithmetic import arithmetic
from common.rewards.functions import to_number
from common.rewards.user_code import load_callable

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
