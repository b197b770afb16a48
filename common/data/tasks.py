"""Built-in tasks, `--dataset arithmetic` and others. They have the same rows in the same order at
every start.

`arithmetic` is addition and subtraction of two numbers, taught by a forgetful demonstrator, so that
SFT, preference learning and RL each have something to learn. `products` is for `--tools python`,
`squares` for models of images, `calculator` for the environment of this name."""

import random
import string
from collections.abc import Callable

from common.config.extra import extra


def arithmetic_rows(split: str) -> list[dict]:
    """Return rows with `prompt`, `completion`, `answer`, `chosen` and `rejected`, all strings.

    The prompts are `a+b=` and `a-b=` for 100 <= a < 500 and 4 <= b <= 9 with unchanged hundreds:
    4,488 questions, 500 in `test` and the others in `train`, with four demonstrations each. The
    demonstrator forgets to carry (or borrow) two times in three, and three questions in five need
    it. So a model that imitates the `completion`s gets about 0.4 of the `answer`s right, and
    samples every right answer often enough for rewards to reinforce it. `chosen` is the answer,
    `rejected` the forgetful one, or an answer with one wrong digit where nothing is carried.
    """
    rng = random.Random(0)
    questions = [(a, op * b) for a in range(100, 500) for op in (1, -1) for b in range(4, 10)]
    questions = [(a, b) for a, b in questions if a // 100 == (a + b) // 100]
    rng.shuffle(questions)
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    for number, (a, b) in enumerate(questions):
        answer = str(a + b)
        forgetful = str(a - a % 10 + (a + b) % 10)
        for _ in range(1 if number < 500 else 4):
            completion = forgetful if rng.random() < 2 / 3 else answer
            rejected = forgetful if forgetful != answer else _one_digit_off(answer, rng)
            row = dict(prompt=f"{a}{b:+}=", completion=completion, answer=answer)
            row |= dict(chosen=answer, rejected=rejected)
            rows["test" if number < 500 else "train"].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def _one_digit_off(number: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(number))  # not the first digit, which must not become 0
    return number[:i] + rng.choice([d for d in string.digits if d != number[i]]) + number[i + 1 :]


# ---- for environments: rows with `prompt`, the columns of the environment, and `messages`, a
# demonstration for sft.py ----


def _rows(split: str, sizes: dict[str, int], row: Callable[[random.Random], dict]) -> list[dict]:
    rng = random.Random(0)
    rows = {name: [row(rng) for _ in range(size)] for name, size in sizes.items()}
    return rows[split]


def _product_rows(split: str, share: float, solve: Callable[[str, str], list[dict]]) -> list[dict]:
    """Return products of a three-digit and a two-digit number, too hard for the tiny model without
    a tool. The demonstrator solves a `share` of them by a tool, else estimates, mostly wrongly."""

    def row(rng: random.Random) -> dict:
        a = rng.randint(100, 999)
        b = rng.randint(12, 99)
        prompt = [dict(role="user", content=f"{a}*{b}?")]
        turns = [dict(role="assistant", content=f"{a}*{b}~{float(f'{a * b:.1e}'):.0f}")]
        if rng.random() < share:
            turns = solve(f"{a}*{b}", str(a * b))
        return dict(prompt=prompt, answer=str(a * b), messages=prompt + turns)

    return _rows(split, dict(test=500, train=12_000), row)


def calculator_rows(split: str) -> list[dict]:
    """Return products; the environment `calculator` answers `<calc>`."""

    def solve(product: str, result: str) -> list[dict]:
        return [
            dict(role="assistant", content=f"<calc>{product}</calc>"),
            dict(role="tool", content=f"{product}={result}"),
            dict(role="assistant", content=f"{product}={result}"),
        ]

    return _product_rows(split, 1 / 7, solve)


def products_rows(split: str) -> list[dict]:
    """Return products for `--tools python`, with calls in the format of the chat template."""

    def solve(product: str, result: str) -> list[dict]:
        function = dict(name="python", arguments=dict(code=product))
        call = dict(type="function", id="call00000", function=function)
        return [
            dict(role="assistant", content="", tool_calls=[call]),
            dict(role="tool", name="python", tool_call_id="call00000", content=result),
            dict(role="assistant", content=f"{product}={result}"),
        ]

    rows = _product_rows(split, 1 / 3, solve)
    return [row | dict(tools=[PYTHON_TOOL]) for row in rows]


CODE = "the program; what it prints and the value of its last expression are returned"
PYTHON_TOOL = dict(  # the schema of `--tools python`
    type="function",
    function=dict(
        name="python",
        description="Run a Python program. Variables and functions stay for later calls.",
        parameters=dict(
            type="object",
            properties=dict(code=dict(type="string", description=CODE)),
            required=["code"],
        ),
    ),
)


# ---- pictures (extras/images/pictures.py) ----


def squares_rows(split: str) -> list[dict]:
    """Return pictures of one to nine squares, to be counted."""
    with extra("images", "--dataset squares"):
        from extras.images import pictures

    return pictures.squares_rows(split)


TASKS = dict(
    arithmetic=arithmetic_rows,
    calculator=calculator_rows,
    products=products_rows,
    squares=squares_rows,
)
