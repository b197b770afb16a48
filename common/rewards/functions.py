"""The built-in reward functions: `(completion text, row) -> float`, or None where the reward does
not apply to the row.

A function may have five attributes: `columns`, the names of the columns it reads (a dataset
without them is refused at start); `may_read`, those of further columns; `check`, which is called
with every row at start and raises `ValueError` naming `row["_source"]` for a row that it cannot
use; `reads`, its part of the text (thoughts.py), by default the answer without thoughts; and
`vote`, which returns the answer that it reads in a completion, or None, for majority votes.

A completion may be any text: no function raises, or takes more than linear time. Worker processes
import this module (common/workers), so it imports nothing heavy."""

import re
from collections.abc import Callable

from common.rewards.answers import (
    FORMAT,
    any_number,
    check_answer,
    check_number,
    gold_answers,
    gold_numbers,
    last_boxed,
    plain,
    stated_number,
    value_of,
)

Reward = Callable[[str, dict], float | None]


# ---- the rewards, in the order of their table at the end ----


def exact_match(completion: str, row: dict) -> float:
    """Return 1 if the completion is the `answer` column, except for white space at the ends."""
    return float(completion.strip() in [answer.strip() for answer in gold_answers(row)])


def gsm8k(completion: str, row: dict) -> float:
    """Return 1 if the last `#### n` or `A: n` of the completion is the same number as in the
    `answer` column, which may be the number alone. Several numbers, such as `#### 18 or 20`, are no
    answer."""
    number = stated_number(completion)
    return float(number is not None and number in gold_numbers(row))


def gsm8k_flexible(completion: str, row: dict) -> float:
    """Return `gsm8k` of a completion in any form. Its answer is the first number in the last
    \\boxed{...} (with \\frac none), else the number after the last `####` or `A:`, else the last
    number."""
    number = any_number(completion)
    return float(number is not None and number in gold_numbers(row))


def boxed(completion: str, row: dict) -> float:
    """Return 1 if the last \\boxed{...} of the completion has the value of the `answer` column, or
    of the \\boxed{...} there: as numbers if both are, else as text (`value_of`)."""
    box = last_boxed(completion)
    if box is None:
        return 0.0
    golds = (last_boxed(answer) or answer for answer in gold_answers(row))
    value = value_of(box)
    return float(value != "" and value in map(value_of, golds))


def format(completion: str, row: dict) -> float:
    """Return 1 if the completion ends with a line `#### n` (or `A: n`), for any number n."""
    return float(FORMAT.search(plain(completion)) is not None)


TAGS = re.compile(r"<think>.*?</think>\s*<answer>(.*?)</answer>", re.DOTALL)


def tag_format(completion: str, row: dict) -> float:
    """Return 1 if the completion is <think>...</think> <answer>...</answer>: each tag once, only
    white space around and between the two parts, and an answer that is not blank."""
    # The count also keeps the expression linear: each of its ".*?" has one place to stop at.
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    is_once = all(completion.count(tag) == 1 for tag in tags)
    match = TAGS.fullmatch(completion.strip()) if is_once else None
    return float(match is not None and match[1].strip() != "")


# ---- the table ----

REWARDS: dict[str, Reward] = {
    function.__name__: function
    for function in (exact_match, gsm8k, gsm8k_flexible, boxed, format, tag_format)
}
exact_match.columns = gsm8k.columns = gsm8k_flexible.columns = boxed.columns = ("answer",)
exact_match.check = boxed.check = check_answer
gsm8k.check = gsm8k_flexible.check = check_number
gsm8k.vote = lambda completion, row: stated_number(completion)
gsm8k_flexible.vote = lambda completion, row: any_number(completion)
boxed.vote = lambda completion, row: value_of(last_boxed(completion) or "")
tag_format.reads = "turn"


# ---- what a function of a user may return ----

SCORES = ("score", "reward")  # keys of a reward in a dict


def plain_value(value: object) -> object:
    """Return an array or a tensor as numbers, and a list of one value as this value."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1:
        return plain_value(value[0])
    return value


def described(value: object) -> str:
    """Return what a function returned, in a few words."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(repr, list(value)[:6]))}"
    if hasattr(value, "shape"):
        return f"a {kind} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple | set):
        return f"a {kind} of {len(value)} values"
    return f"{value!r:.50}" if isinstance(value, str | bytes | int | float) else f"a {kind}"
