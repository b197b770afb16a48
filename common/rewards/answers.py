"""The column `answer`: the right answers of a row as text, and the check that a reward can use them."""

import math
from decimal import Decimal


def gold_answers(row: dict) -> list[str]:
    """Return the right answers of a row, any of which counts: the column `answer`, or each member of a list there."""
    value = row["answer"]
    return [as_text(one) for one in (value if isinstance(value, list) else [value])]


def as_text(value: object) -> str:
    """Return a number in plain digits, anything else by `str`. Tables make floats of whole numbers: 18.0 is 18."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    shortest = Decimal(repr(value))  # 1e23, where int(1e23) is 99999999999999991611392
    return str(int(shortest)) if value.is_integer() else f"{shortest:f}"


def check_answer(row: dict) -> None:
    """Raise `ValueError` unless the column `answer` is text, a finite number or a list of them."""
    value = row["answer"]
    each = value if isinstance(value, list) else [value]
    if not each or not all(map(is_answer, each)):
        expected = "expected text, a number, or a list of them"
        raise ValueError(f"{row['_source']}: column answer: {expected}, got {value!r:.80}")


def is_answer(value: object) -> bool:
    """Return whether the value is text or a finite number. A boolean is neither: its text is true, True, yes, ..."""
    return isinstance(value, str) or type(value) is int or (type(value) is float and math.isfinite(value))
