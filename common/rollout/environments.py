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

import random
import re
from collections.abc import Callable
from typing import Protocol

from common.data.grids import beside, draw_lake, move_player, path
from common.data.tasks import MOVES, SOLVED_BOARD, draw_board, move_hole
from common.rewards.functions import to_number
from extras.graders.puzzles import arithmetic

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
    from common.rewards.user_code import load_callable

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


class SlidingPuzzle:
    """Puzzle of eight tiles in nine places: a turn moves the hole up, down, left or right, until
    the tiles are in order and the hole is last.

    Columns: `prompt`, `board` (nine digits, row by row, 0 is the hole). Reward: 1 for the solution.
    State: the board.
    """

    def reset(self, example: dict) -> list[Message]:
        self.board = str(example["board"])
        return asked(example)

    def state(self) -> str:
        return self.board

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        words = re.findall("|".join(MOVES), completion.lower())
        moved = move_hole(self.board, words[-1]) if words else None
        if moved is None:
            content = "against the edge" if words else "up, down, left or right"
            return [dict(role="user", content=content)], 0.0, False
        self.board = moved
        if moved == SOLVED_BOARD:
            return [], 1.0, True
        return [dict(role="user", content=draw_board(moved))], 0.0, False


class FrozenLake:
    """Lake with holes: a turn moves the player, `@`, up, down, left or right.

    Columns: `prompt`, `map` (lines of S start, F frozen, H hole, G goal, as in Gymnasium). With a
    `slip_seed` the ice is slippery: two moves of three go to the left or right of their direction.
    Reward: 1 at the goal; a hole ends the episode, too. State: the map.
    """

    CLOCKWISE = ("up", "right", "down", "left")

    def reset(self, example: dict) -> list[Message]:
        self.lake = str(example["map"])
        lengths = set(map(len, self.lake.split("\n")))
        is_map = set(self.lake) <= set("SFHG\n") and self.lake.count("S") == len(lengths) == 1
        if not is_map or path(self.lake) is None:
            raise ValueError(
                "column map: expected equal lines of S, F, H, G and a path from S to G"
            )
        self.place = self.lake.index("S")
        seed = example.get("slip_seed")
        self.slips = None if seed is None else random.Random(int(seed))
        return asked(example)

    def state(self) -> str:
        return draw_lake(self.lake, self.place)

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        words = re.findall("|".join(MOVES), completion.lower())
        if not words:
            return [dict(role="user", content="up, down, left or right")], 0.0, False
        direction = words[-1]
        if self.slips:
            quarter = self.CLOCKWISE.index(direction) + self.slips.choice((-1, 0, 1))
            direction = self.CLOCKWISE[quarter % 4]
        ahead = beside(self.lake, self.place, direction)
        if ahead is None:
            return [dict(role="user", content="against the edge")], 0.0, False
        self.place = ahead
        if self.lake[ahead] in "HG":
            return [], float(self.lake[ahead] == "G"), True
        return [dict(role="user", content=self.state())], 0.0, False


class Sokoban:
    """Warehouse: a turn moves the player up, down, left or right, who pushes a box, until all boxes
    stand on goals.

    Columns: `prompt`, `level` (lines of `#` wall, `@` player, `$` box, `.` goal, `+` and `*` player
    and box on a goal). Reward: 1 for the solution. State: the level.
    """

    def reset(self, example: dict) -> list[Message]:
        self.level = str(example["level"])
        lengths = set(map(len, self.level.split("\n")))
        counts = {mark: self.level.count(mark) for mark in "@+$."}
        one_player = counts["@"] + counts["+"] == 1
        is_level = set(self.level) <= set("#@+$*. \n") and len(lengths) == 1 and one_player
        if not is_level or not 0 < counts["$"] <= counts["."] + counts["+"]:
            raise ValueError(
                "column level: expected equal lines of #@+$*. with one player and enough goals"
            )
        return asked(example)

    def state(self) -> str:
        return self.level

    def step(self, completion: str) -> tuple[list[Message], float, bool]:
        words = re.findall("|".join(MOVES), completion.lower())
        moved = move_player(self.level, words[-1]) if words else None
        if moved is None:
            content = "blocked" if words else "up, down, left or right"
            return [dict(role="user", content=content)], 0.0, False
        self.level = moved
        if "$" not in moved:
            return [], 1.0, True
        return [dict(role="user", content=moved)], 0.0, False


ENVIRONMENTS = dict(
    calculator=Calculator,
    guess_number=GuessNumber,
    sliding_puzzle=SlidingPuzzle,
    frozen_lake=FrozenLake,
    sokoban=Sokoban,
)
