"""The built-in reward functions: `(completion text, example row) -> float`.

Imported by worker processes too (`common/workers.py`), so nothing heavy is imported here. A function may name the
columns it reads in an attribute `columns`; a dataset without them is refused at start.
"""

import re
from collections.abc import Callable
from fractions import Fraction

Reward = Callable[[str, dict], float]

NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"  # without sign
FINAL_ANSWER = re.compile(rf"(?:####|\bA:)[\s*]*([-+]?)\s*\$?\s*({NUMBER})(?!\d|\s*/\s*\d)")
FORMAT = re.compile(rf"(?:^|\n)(?:####|A:) *[-+]?\$?{NUMBER}\s*$")


def to_number(text: str) -> Fraction | None:
    """`-1,234.50` -> Fraction(-2469, 2); None if it is not one number. Exact: 0.1 + 0.2 problems do not arise."""
    if len(text) > 100:  # no answer, and Python refuses to convert integers of thousands of digits
        return None
    text = text.strip().rstrip(".%").lstrip("$").replace(",", "")
    return Fraction(text) if re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", text) else None


def exact_match(completion: str, row: dict) -> float:
    """1 if the completion is the `answer` column, white space at the ends aside."""
    return float(completion.strip() == str(row["answer"]).strip())


def gsm8k(completion: str, row: dict) -> float:
    """1 if the last `#### n` or `A: n` of the completion equals that of the `answer` column (or the column itself) as a
    number: commas, signs, a dollar sign and trailing zeros do not matter."""
    found, gold = final_answers(completion), final_answers(str(row["answer"])) or [str(row["answer"])]
    return float(bool(found) and to_number(found[-1]) is not None and to_number(found[-1]) == to_number(gold[-1]))


def final_answers(text: str) -> list[str]:
    """Every number that `####` or `A:` announces, sign and digits only."""
    return [sign + number for sign, number in FINAL_ANSWER.findall(text)]


def boxed(completion: str, row: dict) -> float:
    """1 if the last \\boxed{...} of the completion equals the `answer` column (or its \\boxed{...}): as numbers if both
    are, else as text without white space."""
    found, gold = last_boxed(completion), last_boxed(str(row["answer"])) or str(row["answer"])
    if found is None:
        return 0.0
    if to_number(found) is not None:
        return float(to_number(found) == to_number(gold))
    return float("".join(found.split()) == "".join(gold.split()))


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with balanced braces; None without one."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + len("\\boxed{") - 1, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return None


def format(completion: str, row: dict) -> float:
    """1 if the completion ends with a line `#### n` (or `A: n`), whatever the number."""
    return float(FORMAT.search(completion) is not None)


exact_match.columns = gsm8k.columns = boxed.columns = ("answer",)
REWARDS: dict[str, Reward] = {f.__name__: f for f in (exact_match, gsm8k, boxed, format)}
