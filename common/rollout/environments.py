"""Environments: what answers the model between its turns.

An environment is a class without arguments to its constructor; each episode has an object of its own:

    reset(example: dict) -> messages                   of a data row: what the model is asked, the same every time
    step(completion: str) -> messages, reward, done    of one turn of the model's: what it is told then

Messages are a chat's, `{"role": ..., "content": ...}`. The rewards of an episode's turns add up to what
`--reward environment` is. `common/rollout/episodes.py` plays them.

Three are built in, each with a task of the same name for `--dataset` (common/data/tasks.py).
"""

import re
from collections.abc import Callable
from typing import Protocol

from common.rewards.functions import arithmetic, to_number
from common.rewards.user_code import load_callable

Message = dict[str, str]


class Environment(Protocol):
    def reset(self, example: dict) -> list[Message]: ...

    def step(self, completion: str) -> tuple[list[Message], float, bool]: ...


def load_environment(name: str) -> Callable[[], Environment]:
    """A built-in environment, or `path/to/file.py:Class`. Raises `ValueError` naming what is wrong."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if ":" not in name:
        raise ValueError(f"--environment {name}: unknown; there are {', '.join(ENVIRONMENTS)}, path/to/file.py:Class")
    found = load_callable("--environment", name)
    if not isinstance(found, type) or not all(callable(getattr(found, m, None)) for m in ("reset", "step")):
        raise ValueError(f"--environment {name}: not a class with the methods reset and step")
    return found


def asked(example: dict) -> list[Message]:
    """The `prompt` column as messages."""
    prompt = example["prompt"]
    return prompt if isinstance(prompt, list) else [dict(role="user", content=prompt)]


class Calculator:
    """`<calc>expression</calc>` is answered with `expression=value`; a turn without a call is the final answer.

    Columns: `prompt`, `answer`. Reward: 1 if the last number of the final answer is `answer`.
    """

    CALL = re.compile(r"<calc>([^<>]*)</calc>")

    def reset(self, example: dict) -> list[Message]:
        self.answer = to_number(str(example["answer"]))
        return asked(example)

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        if "<calc>" in completion:
            expression = (self.CALL.findall(completion) or [""])[-1].strip()
            value, _ = arithmetic(expression)
            told = "error: <calc>numbers with + - * / ( )</calc>" if value is None else f"{expression}={value}"
            return [dict(role="tool", content=told)], 0.0, False
        numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
        return [], float(bool(numbers) and to_number(numbers[-1]) == self.answer), True


class GuessNumber:
    """A number is to be found; each guess is answered with higher or lower.

    Columns: `prompt`, `number`. Reward: 1 when it is found.
    """

    def reset(self, example: dict) -> list[Message]:
        self.number = int(example["number"])
        return asked(example)

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        numbers = re.findall(r"\d+", completion)
        if not numbers:
            return [dict(role="user", content="a number!")], 0.0, False
        if (guess := int(numbers[-1][:9])) == self.number:  # Python refuses to convert thousands of digits
            return [], 1.0, True
        return [dict(role="user", content="higher" if guess < self.number else "lower")], 0.0, False


class SlidingPuzzle:
    """Nine places, eight tiles: a turn names the way the hole moves, up, down, left or right, until the tiles are in
    order and the hole is last.

    Columns: `prompt`, `board` (nine digits, row by row, 0 is the hole). Reward: 1 when it is solved.
    """

    SOLVED, MOVES = "123456780", {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

    def reset(self, example: dict) -> list[Message]:
        self.board = str(example["board"])
        return asked(example)

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        words = re.findall("|".join(self.MOVES), completion.lower())
        moved = self.move(self.board, words[-1]) if words else None
        if moved is None:
            told = "against the edge" if words else "up, down, left or right"
            return [dict(role="user", content=told)], 0.0, False
        self.board = moved
        if moved == self.SOLVED:
            return [], 1.0, True
        return [dict(role="user", content=self.drawn(moved))], 0.0, False

    @classmethod
    def move(cls, board: str, way: str) -> str | None:
        """The board after the hole has moved, None at the edge."""
        hole, (down, right) = board.index("0"), cls.MOVES[way]
        row, column = hole // 3 + down, hole % 3 + right
        if not (0 <= row < 3 and 0 <= column < 3):
            return None
        tile = board[3 * row + column]
        return board.translate(str.maketrans({"0": tile, tile: "0"}))

    @staticmethod
    def drawn(board: str) -> str:
        return "\n".join(board[i : i + 3] for i in (0, 3, 6)).replace("0", "_")


ENVIRONMENTS = dict(calculator=Calculator, guess_number=GuessNumber, sliding_puzzle=SlidingPuzzle)
