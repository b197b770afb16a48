"""The built-in tasks, `--dataset arithmetic` and others: the same rows in the same order always.

`arithmetic` is two-number addition and subtraction taught by a forgetful demonstrator, so that SFT, preference learning
and RL each have something to learn. The others are played with an environment (common/rollout/environments.py).
"""

import random
import string
from collections.abc import Callable

from common.rollout.environments import SlidingPuzzle


def arithmetic_rows(split: str) -> list[dict]:
    """Rows of the built-in task: `prompt`, `completion`, `answer`, `chosen`, `rejected`, all strings.

    `a+b=` and `a-b=` for 100 <= a < 500 and 4 <= b <= 9 where the hundreds stay as they are: 4,488 questions, of
    which `test` holds 500 and `train`, in four demonstrations each, the others. The demonstrator forgets to carry (or
    borrow) two times in three, and three questions in five need it: whoever imitates the `completion`s gets about 0.4
    of the `answer`s right, while every right answer stays well within reach of sampling. So SFT leaves room, and
    rewards fill it. `chosen` is the answer, `rejected` the forgetful one, or where nothing is carried an answer with
    one digit off.

    The same rows in the same order always. Raises `ValueError` for another split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"the arithmetic task has no split {split!r}, only train and test")
    rng = random.Random(0)
    questions = [(a, op * b) for a in range(100, 500) for op in (1, -1) for b in range(4, 10)]
    questions = [(a, b) for a, b in questions if a // 100 == (a + b) // 100]
    rng.shuffle(questions)
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    for number, (a, b) in enumerate(questions):
        answer, forgetful = str(a + b), str(a - a % 10 + (a + b) % 10)
        for _ in range(1 if number < 500 else 4):
            completion = forgetful if rng.random() < 2 / 3 else answer
            rejected = forgetful if forgetful != answer else _one_digit_off(answer, rng)
            row = dict(prompt=f"{a}{b:+}=", completion=completion, answer=answer, chosen=answer, rejected=rejected)
            rows["test" if number < 500 else "train"].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def _one_digit_off(number: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(number))  # not the first: 0 there would be another kind of mistake
    return number[:i] + rng.choice([d for d in string.digits if d != number[i]]) + number[i + 1 :]


# ---- for environments: rows with a `prompt`, the columns that the environment reads, and `messages`, a demonstration
# for sft.py ----


def _rows(split: str, sizes: dict[str, int], row: Callable[[random.Random], dict]) -> list[dict]:
    rng = random.Random(0)
    rows = {name: [row(rng) for _ in range(size)] for name, size in sizes.items()}
    return rows[split]


def calculator_rows(split: str) -> list[dict]:
    """Products of a three-digit and a two-digit number, beyond what the tiny model computes by heart. The demonstrator
    calls the tool one time in seven; else he estimates, which is hardly ever right."""

    def row(rng: random.Random) -> dict:
        a, b = rng.randint(100, 999), rng.randint(12, 99)
        prompt, solved = dict(role="user", content=f"{a}*{b}?"), f"{a}*{b}={a * b}"
        turns = [dict(role="assistant", content=f"{a}*{b}~{float(f'{a * b:.1e}'):.0f}")]
        if rng.random() < 1 / 7:
            call, told = dict(role="assistant", content=f"<calc>{a}*{b}</calc>"), dict(role="tool", content=solved)
            turns = [call, told, dict(role="assistant", content=solved)]
        return dict(prompt=[prompt], answer=str(a * b), messages=[prompt, *turns])

    return _rows(split, dict(test=500, train=12_000), row)


def guess_number_rows(split: str) -> list[dict]:
    """Numbers from 1 to 50. The demonstrator halves what is left, more or less."""

    def row(rng: random.Random) -> dict:
        number, low, high = rng.randint(1, 50), 1, 50
        messages = [dict(role="user", content="1-50?")]
        while True:
            guess = max(low, min(high, (low + high) // 2 + rng.randint(-2, 2)))
            messages.append(dict(role="assistant", content=str(guess)))
            if guess == number:
                return dict(prompt=messages[:1], number=number, messages=messages)
            messages.append(dict(role="user", content="higher" if guess < number else "lower"))
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)

    return _rows(split, dict(test=200, train=4_000), row)


def sliding_puzzle_rows(split: str) -> list[dict]:
    """Boards of one to four moves away from the solution, which the demonstrator finds."""
    back = dict(up="down", down="up", left="right", right="left")

    def row(rng: random.Random) -> dict:
        board, moves, count = SlidingPuzzle.SOLVED, [], rng.randint(1, 4)
        while len(moves) < count:
            way = rng.choice(list(back))
            moved = SlidingPuzzle.move(board, way)
            if moved is not None and (not moves or way != back[moves[-1]]):
                board, moves = moved, [*moves, way]
        messages, start = [dict(role="user", content=SlidingPuzzle.drawn(board))], board
        for way in reversed(moves):
            board = SlidingPuzzle.move(board, back[way])
            turn = [dict(role="assistant", content=back[way]), dict(role="user", content=SlidingPuzzle.drawn(board))]
            messages += turn
        return dict(prompt=messages[:1], board=start, messages=messages[:-1])

    return _rows(split, dict(test=200, train=4_000), row)


TASKS = dict(arithmetic=arithmetic_rows, calculator=calculator_rows, guess_number=guess_number_rows,
             sliding_puzzle=sliding_puzzle_rows)  # fmt: skip
