"""The built-in reward functions: `(completion text, row) -> float`, or None where the reward does
not apply to the row.

A function may have three attributes: `columns`, the names of the columns it reads (a dataset
without them is refused at start); `check`, which is called with every row at start and raises
`ValueError` naming `row["_source"]` for a row that it cannot use; and `reads`, its part of the text
(thoughts.py), by default the answer without thoughts.

A completion may be any text: no function raises, or takes more than linear time. Worker processes
import this module (processes.py), so it imports nothing heavy."""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

Reward = Callable[[str, dict], float | None]


# ---- the column `answer` ----


def gold_answers(row: dict) -> list[str]:
    """Return the right answers of a row, any of which counts: the column `answer`, or each member
    of a list there."""
    value = row["answer"]
    return [as_text(one) for one in (value if isinstance(value, list) else [value])]


def as_text(value: object) -> str:
    """Return a number in plain digits, anything else by `str`. Tables make floats of whole numbers:
    18.0 is 18."""
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
    """Return whether the value is text or a finite number. A boolean is neither: its text is true,
    True, yes, ..."""
    if type(value) is float:
        return math.isfinite(value)
    return isinstance(value, str) or type(value) is int


# ---- answers in a text ----

NUMBER = r"(?:\d(?:[\d,]*\d)?(?:\.\d+)?|\.\d+)"  # without sign
# What makes two numbers, or a formula, of a number: `18 or 20`, `18-20`, `18/2`, `1 000`, `1e3`.
JOINT = r"[ \t*(]*+(?:[-+/^=:;,~–×÷x|&]|\\times|(?:or|and|to)\b(?: maybe| perhaps)?)?[ \t*]*+"
LARGE = r"[ \t]?(?:[kK]|thousand|million|billion)\b"
NEXT = rf"{JOINT}[-+]?\\?\$?[-+]?{NUMBER}"
MORE = rf"%?(?:[ \t]+[a-z]{{1,20}}(?=[ \t]+or\b))?(?:{NEXT}|[eE][-+]?\d+|{LARGE})"
# "*+" gives nothing back: with three plain "*" after each other, white space without a number takes
# cubic time.
FINAL_ANSWER = re.compile(rf"(?:####|\bA:)[\s*]*+([-+]?)\s*+\\?\$?\s*+([-+]?{NUMBER}(?:{MORE})?)")
# A box is braced; a number alone needs no braces.
BOX = re.compile(
    r"\\(?:boxed|fbox|framebox(?:\[[^\]\n]{0,20}\]){0,2})(?:\s*(\{)|\s*([-+]?\d[\d.,/]*))"
)
# Neither part of a word nor of a fraction.
ANY_NUMBER = re.compile(
    r"(?:(?<!\w)([-+]))?\\?\$?(?<![\w/])"
    r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?!\.?\d|\s*/\s*\d)"
)
FORMAT = re.compile(rf"(?:^|\n)(?:####|A:) *[-+]?\$?{NUMBER}\s*$")


def to_number(text: str) -> Fraction | None:
    """Return `-1,234.50` as Fraction(-2469, 2), which is exact; None for anything but one
    number."""
    if len(text) > 100:  # Python refuses to convert integers of thousands of digits
        return None
    text = text.strip().rstrip(".%").lstrip("$").replace(",", "")
    return Fraction(text) if re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", text) else None


def exact_match(completion: str, row: dict) -> float:
    """Return 1 if the completion is the `answer` column, except for white space at the ends."""
    return float(completion.strip() in [answer.strip() for answer in gold_answers(row)])


def characters(completion: str, row: dict) -> float:
    """Return the fraction of characters that agree with the `answer` column, out of the longer of
    the two: a reward that an untrained model can climb."""
    return max(agreement(completion, answer) for answer in gold_answers(row))


def agreement(text: str, other: str) -> float:
    return sum(a == b for a, b in zip(text, other, strict=False)) / max(len(text), len(other), 1)


def gsm8k(completion: str, row: dict) -> float:
    """Return 1 if the last `#### n` or `A: n` of the completion is the same number as in the
    `answer` column, which may be the number alone. Commas, a plus sign, a dollar sign and trailing
    zeros do not matter. Several numbers, such as `#### 18 or 20`, are no answer."""
    answers = final_answers(completion)
    number = to_number(answers[-1]) if answers else None
    return float(number is not None and number in gold_numbers(row))


def final_answers(text: str) -> list[str]:
    """Return every number behind `####` or `A:`, as its sign and digits, with what makes it more
    than a number."""
    return [sign + number for sign, number in FINAL_ANSWER.findall(text.replace("−", "-"))]


def gold_numbers(row: dict) -> list[Fraction | None]:
    """Return the number of each right answer: the last behind `####` or `A:`, else the answer; None
    if it is none."""
    return [to_number((final_answers(answer) or [answer])[-1]) for answer in gold_answers(row)]


def check_number(row: dict) -> None:
    """Raise `ValueError` unless each right answer is a number."""
    check_answer(row)
    for answer, number in zip(gold_answers(row), gold_numbers(row), strict=True):
        if number is None:
            expected = "expected a number, or text with `#### number`"
            raise ValueError(f"{row['_source']}: column answer: {expected}, got {answer[-80:]!r}")


def boxed(completion: str, row: dict) -> float:
    """Return 1 if the last \\boxed{...} of the completion equals the `answer` column, or the
    \\boxed{...} there: as numbers if both are, else as text without white space."""
    box = last_boxed(completion)
    if box is None:
        return 0.0
    golds = [last_boxed(answer) or answer for answer in gold_answers(row)]
    number = to_number(box)
    if number is not None:
        return float(number in map(to_number, golds))
    return float("".join(box.split()) in ["".join(gold.split()) for gold in golds])


def last_boxed(text: str) -> str | None:
    """Return the content of the last box (\\boxed, \\fbox, \\framebox), with balanced braces; None
    without a box, or if it is not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    box = boxes[-1]
    if box[2] is not None:
        return box[2].rstrip(".,")
    depth = 0
    for i in range(box.start(1), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[box.end(1) : i]
    return None


def gsm8k_flexible(completion: str, row: dict) -> float:
    """Return `gsm8k` of a completion in any form. Its answer is the first number in the last
    \\boxed{...}, else the number behind the last `####` or `A:`, else the last number."""
    number = flexible_answer(completion)
    return float(number is not None and number in gold_numbers(row))


def flexible_answer(text: str) -> Fraction | None:
    text = text.replace("−", "-")
    box = last_boxed(text)
    if box is None:
        numbers = (final_answers(text) or numbers_in(text))[-1:]
    else:
        plain = box.replace("{,}", ",").replace("\\!", "")  # 1,234 in LaTeX
        numbers = [] if "frac{" in plain else numbers_in(plain)[:1]
    return to_number(numbers[0]) if numbers else None


def numbers_in(text: str) -> list[str]:
    """Return every number as its sign and digits: 10 and 5 for `10-5`. The numbers of a fraction
    are left out."""
    return [sign + number for sign, number in ANY_NUMBER.findall(text)]


def format(completion: str, row: dict) -> float:
    """Return 1 if the completion ends with a line `#### n` (or `A: n`), for any number n."""
    return float(FORMAT.search(completion) is not None)


# ---- the form of a completion: for small weights beside a reward for right answers ----

TAGS = re.compile(r"<think>.*?</think>\s*<answer>(.*?)</answer>", re.DOTALL)


def length(completion: str, row: dict) -> float:
    """Return minus the distance in words between the completion and the row's `target_length`, or 0
    without one. The length term of LCPO (arXiv:2503.04697), which counts tokens. It has no lower
    bound: give it a small weight."""
    return float(-abs(len(completion.split()) - (row.get("target_length") or 0)))


def check_length(row: dict) -> None:
    """Raise `ValueError` for a `target_length` that is no number of words."""
    target = row.get("target_length")
    if target is not None and (type(target) not in (int, float) or not 0 <= target < math.inf):
        expected = "expected a number of words"
        raise ValueError(f"{row['_source']}: column target_length: {expected}, got {target!r}")


def repetition(completion: str, row: dict) -> float:
    """Return minus the fraction of the completion's runs of 3 words that occurred in it before, in
    (-1, 0]; 0 for fewer than 3 words. Discourages repetition that only fills space
    (arXiv:2502.03373)."""
    words = completion.split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) / len(runs) - 1 if runs else 0.0


def tag_format(completion: str, row: dict) -> float:
    """Return 1 if the completion is <think>...</think> <answer>...</answer>: each tag once, only
    white space around and between the two parts, and an answer that is not blank."""
    # The count also keeps the expression linear: each of its ".*?" has one place to stop at.
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    is_once = all(completion.count(tag) == 1 for tag in tags)
    match = TAGS.fullmatch(completion.strip()) if is_once else None
    return float(match is not None and match[1].strip() != "")


for function in (exact_match, characters, gsm8k, gsm8k_flexible, boxed):
    function.columns = ("answer",)
    function.check = check_answer
gsm8k.check = gsm8k_flexible.check = check_number
length.check = check_length
length.reads = repetition.reads = "completion"
tag_format.reads = "turn"
REWARDS: dict[str, Reward] = {
    "exact_match": exact_match,
    "characters": characters,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "boxed": boxed,
    "format": format,
    "length": length,
    "repetition": repetition,
    "tag_format": tag_format,
}
