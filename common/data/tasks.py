"""Built-in tasks, `--dataset arithmetic` and others. They have the same rows in the same order at
every start.

`arithmetic` is addition and subtraction of two numbers, taught by a forgetful demonstrator, so that
SFT, preference learning and RL each have something to learn. `splits` has many right answers to a
question, and the answers of `chains` have many lengths. `products` is for `--tools python`, and
`squares` for models of images; the others need an environment (common/rollout/environments.py)."""

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

    Raises `ValueError` for another split.
    """
    require_split("arithmetic", split)
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
            row = dict(
                prompt=f"{a}{b:+}=",
                completion=completion,
                answer=answer,
                chosen=answer,
                rejected=rejected,
            )
            rows["test" if number < 500 else "train"].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def require_split(task: str, split: str) -> None:
    """Raise `ValueError` unless `split` is train or test."""
    if split not in ("train", "test"):
        raise ValueError(f"the {task} task has no split {split!r}, only train and test")


def _one_digit_off(number: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(number))  # not the first: 0 there would be a different kind of mistake
    return number[:i] + rng.choice([d for d in string.digits if d != number[i]]) + number[i + 1 :]


# ---- many right answers, answers of many lengths ----


def splits_rows(split: str) -> list[dict]:
    """Return rows with `prompt`, `completion`, `chosen` and `rejected`, all strings, and `target`,
    a number.

    The prompts are `n=` for 20 <= n < 99, without those that end in 9: 16 questions in `test`, and
    56 in `train` with 200 demonstrations each. Every `a+b` with the sum n is right, for a, b >= 1
    (the reward `split`). The demonstrator draws any a below n. Two times in three it forgets to
    borrow when it computes b = n - a. `chosen` is right, and `rejected` lacks a borrow.

    Raises `ValueError` for another split.
    """
    require_split("splits", split)
    rng = random.Random(0)
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    questions = [n for n in range(20, 99) if n % 10 != 9]  # 29 - a needs no borrow for any a
    rng.shuffle(questions)
    for number, n in enumerate(questions):
        name = "test" if number < 16 else "train"
        borrows = [a for a in range(1, n) if _without_borrow(n, a) != n - a]
        for _ in range(1 if name == "test" else 200):
            a = rng.randrange(1, n)
            right = rng.randrange(1, n)
            wrong = rng.choice(borrows)
            b = _without_borrow(n, a) if rng.random() < 2 / 3 else n - a
            row = dict(
                prompt=f"{n}=",
                completion=f"{a}+{b}",
                target=n,
                chosen=f"{right}+{n - right}",
                rejected=f"{wrong}+{_without_borrow(n, wrong)}",
            )
            rows[name].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def _without_borrow(n: int, a: int) -> int:
    """Return n - a for 0 <= a <= n < 100, digit by digit, without the borrow."""
    return (n // 10 - a // 10) * 10 + (n - a) % 10


def chains_rows(split: str) -> list[dict]:
    """Return rows with `prompt`, `completion`, `answer`, `chosen` and `rejected`, all strings.

    The prompts are sums of a three-digit number and one to three digits, `247+9+8=`, with unchanged
    hundreds and at least one carry: 500 questions in `test`, 4,000 in `train` with three
    demonstrations each. A demonstration adds one digit at a time, `247+9=256+8=264`, and may check
    the last sum up to four times, `247+9=256+8=264?264`: 9 to 37 characters. The demonstrator
    forgets one carry in three. It checks more often if the sum is right, but a check only repeats
    the sum, so that length and being right go together and neither causes the other. The last
    number is the answer (the reward `gsm8k_flexible`). `chosen` and `rejected` are a right and a
    wrong demonstration.

    Raises `ValueError` for another split.
    """
    require_split("chains", split)
    rng = random.Random(0)
    questions: dict[tuple[int, ...], None] = {}  # an ordered set
    while len(questions) < 4_500:
        terms = (rng.randint(100, 399), *(rng.randint(4, 9) for _ in range(rng.randint(1, 3))))
        if terms[0] // 10 < sum(terms) // 10 and terms[0] // 100 == sum(terms) // 100:
            questions[terms] = None
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    for number, terms in enumerate(questions):
        name = "test" if number < 500 else "train"
        for _ in range(1 if name == "test" else 3):
            drawn = {False: "", True: ""}  # the last wrong and right demonstration
            while not all(drawn.values()):
                completion, right = _chain(terms, rng)
                drawn[right] = completion
            completion, _ = _chain(terms, rng)
            row = dict(
                prompt="+".join(map(str, terms)) + "=",
                completion=completion,
                answer=str(sum(terms)),
                chosen=drawn[True],
                rejected=drawn[False],
            )
            rows[name].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def _chain(terms: tuple[int, ...], rng: random.Random) -> tuple[str, bool]:
    """Return a demonstration for `chains`, and whether it is right."""
    said = terms[0]
    chain = str(said)
    for term in terms[1:]:
        carries = said % 10 + term > 9
        said += term - 10 * (carries and rng.random() < 1 / 3)
        chain += f"+{term}={said}"
    right = said == sum(terms)
    checks = 0
    while checks < 4 and rng.random() < (0.45 if right else 0.25):
        chain += f"?{said}"
        checks += 1
    return chain, right


# ---- for environments: rows with `prompt`, the columns of the environment, and `messages`, a
# demonstration for sft.py ----


def _rows(split: str, sizes: dict[str, int], row: Callable[[random.Random], dict]) -> list[dict]:
    rng = random.Random(0)
    rows = {name: [row(rng) for _ in range(size)] for name, size in sizes.items()}
    return rows[split]


def calculator_rows(split: str) -> list[dict]:
    """Return products of a three-digit and a two-digit number, too hard for the tiny model without
    a tool. The demonstrator calls the tool one time in seven, else estimates, mostly wrongly."""

    def row(rng: random.Random) -> dict:
        a = rng.randint(100, 999)
        b = rng.randint(12, 99)
        prompt = [dict(role="user", content=f"{a}*{b}?")]
        solved = f"{a}*{b}={a * b}"
        turns = [dict(role="assistant", content=f"{a}*{b}~{float(f'{a * b:.1e}'):.0f}")]
        if rng.random() < 1 / 7:
            turns = [
                dict(role="assistant", content=f"<calc>{a}*{b}</calc>"),
                dict(role="tool", content=solved),
                dict(role="assistant", content=solved),
            ]
        return dict(prompt=prompt, answer=str(a * b), messages=prompt + turns)

    return _rows(split, dict(test=500, train=12_000), row)


PYTHON_TOOL = dict(  # the schema of `--tools python`
    type="function",
    function=dict(
        name="python",
        description="Run a Python program. Variables and functions stay for later calls.",
        parameters=dict(
            type="object",
            properties=dict(
                code=dict(
                    type="string",
                    description="the program; what it prints and the value of its last expression"
                    " are returned",
                )
            ),
            required=["code"],
        ),
    ),
)


def products_rows(split: str) -> list[dict]:
    """Return the products of `calculator` for `--tools python`: the demonstrator calls the tool one
    time in three, with tool calls in the format of the chat template."""

    def row(rng: random.Random) -> dict:
        a = rng.randint(100, 999)
        b = rng.randint(12, 99)
        prompt = [dict(role="user", content=f"{a}*{b}?")]
        turns = [dict(role="assistant", content=f"{a}*{b}~{float(f'{a * b:.1e}'):.0f}")]
        if rng.random() < 1 / 3:
            function = dict(name="python", arguments=dict(code=f"{a}*{b}"))
            call = dict(type="function", id="call00000", function=function)
            turns = [
                dict(role="assistant", content="", tool_calls=[call]),
                dict(role="tool", name="python", tool_call_id="call00000", content=str(a * b)),
                dict(role="assistant", content=f"{a}*{b}={a * b}"),
            ]
        messages = prompt + turns
        return dict(prompt=prompt, answer=str(a * b), messages=messages, tools=[PYTHON_TOOL])

    return _rows(split, dict(test=500, train=12_000), row)


def guess_number_rows(split: str) -> list[dict]:
    """Return numbers from 1 to 50. The demonstrator roughly halves the remaining interval."""

    def row(rng: random.Random) -> dict:
        number = rng.randint(1, 50)
        low = 1
        high = 50
        messages = [dict(role="user", content="1-50?")]
        while True:
            guess = max(low, min(high, (low + high) // 2 + rng.randint(-2, 2)))
            messages.append(dict(role="assistant", content=str(guess)))
            if guess == number:
                return dict(prompt=messages[:1], number=number, messages=messages)
            if guess < number:
                low = guess + 1
            else:
                high = guess - 1
            messages.append(dict(role="user", content="higher" if guess < number else "lower"))

    return _rows(split, dict(test=200, train=4_000), row)


# ---- sliding puzzle: nine places, row by row, with eight tiles and the hole, 0 ----

SOLVED_BOARD = "123456780"
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # of the hole
OPPOSITE = dict(up="down", down="up", left="right", right="left")


def move_hole(board: str, direction: str) -> str | None:
    """Return the board after the hole has moved, None at the edge."""
    down, right = MOVES[direction]
    row, column = divmod(board.index("0"), 3)
    row += down
    column += right
    if not (0 <= row < 3 and 0 <= column < 3):
        return None
    tile = board[3 * row + column]
    return board.translate(str.maketrans({"0": tile, tile: "0"}))


def draw_board(board: str) -> str:
    return "\n".join(board[i : i + 3] for i in (0, 3, 6)).replace("0", "_")


def sliding_puzzle_rows(split: str) -> list[dict]:
    """Return boards of one to four moves from the solution. The demonstrator takes the moves
    back."""

    def row(rng: random.Random) -> dict:
        board = SOLVED_BOARD
        moves: list[str] = []
        count = rng.randint(1, 4)
        while len(moves) < count:
            direction = rng.choice(list(OPPOSITE))
            moved = move_hole(board, direction)
            if moved is not None and (not moves or direction != OPPOSITE[moves[-1]]):
                board = moved
                moves.append(direction)
        start = board
        messages = [dict(role="user", content=draw_board(start))]
        for direction in reversed(moves):
            board = move_hole(board, OPPOSITE[direction])
            messages.append(dict(role="assistant", content=OPPOSITE[direction]))
            messages.append(dict(role="user", content=draw_board(board)))
        return dict(prompt=messages[:1], board=start, messages=messages[:-1])

    return _rows(split, dict(test=200, train=4_000), row)


# ---- worlds of squares (grids.py) ----


def frozen_lake_rows(split: str) -> list[dict]:
    """Return lakes of four by four squares, a quarter of them holes, with a path to the goal."""
    from common.data.grids import lake_row

    return _rows(split, dict(test=200, train=4_000), lake_row)


def sokoban_rows(split: str) -> list[dict]:
    """Return rooms of four by four squares with one or two boxes, and a solution."""
    from common.data.grids import level_row

    return _rows(split, dict(test=200, train=1_000), level_row)


# ---- pictures (pictures.py) ----


def squares_rows(split: str) -> list[dict]:
    """Return pictures of one to nine squares, to be counted."""
    with extra("images", "--dataset squares"):
        from extras.images import pictures

    return pictures.squares_rows(split)


TASKS = dict(
    arithmetic=arithmetic_rows,
    splits=splits_rows,
    chains=chains_rows,
    calculator=calculator_rows,
    products=products_rows,
    guess_number=guess_number_rows,
    sliding_puzzle=sliding_puzzle_rows,
    frozen_lake=frozen_lake_rows,
    sokoban=sokoban_rows,
    squares=squares_rows,
)
