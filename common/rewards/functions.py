"""The built-in reward functions: `(completion text, row) -> float`, or None where the reward does not apply to the row.

A function may have three attributes: `columns`, the names of the columns it reads (a dataset without them is refused at
start); `check`, which is called with every row at start and raises `ValueError` naming `row["_source"]` for a row that
it cannot use; and `reads`, its part of the text (thoughts.py), by default the answer without thoughts.

A completion may be any text: no function raises, or takes more than linear time. Worker processes import this module
(processes.py), so it imports nothing heavy.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from common.rewards.answers import check_answer, gold_answers
from common.rewards.ifeval import ifeval

Reward = Callable[[str, dict], float | None]


# ---- answers ----

NUMBER = r"(?:\d(?:[\d,]*\d)?(?:\.\d+)?|\.\d+)"  # without sign
# What makes two numbers, or a formula, of a number: `18 or 20`, `18-20`, `18/2`, `1 000`, `1e3`.
JOINT = r"[ \t*(]*+(?:[-+/^=:;,~–×÷x|&]|\\times|(?:or|and|to)\b(?: maybe| perhaps)?)?[ \t*]*+"
LARGE = r"[ \t]?(?:[kK]|thousand|million|billion)\b"
MORE = rf"%?(?:[ \t]+[a-z]{{1,20}}(?=[ \t]+or\b))?(?:{JOINT}[-+]?\\?\$?[-+]?{NUMBER}|[eE][-+]?\d+|{LARGE})"
# "*+" gives nothing back: with three plain "*" after each other, white space without a number takes cubic time.
FINAL_ANSWER = re.compile(rf"(?:####|\bA:)[\s*]*+([-+]?)\s*+\\?\$?\s*+([-+]?{NUMBER}(?:{MORE})?)")
# A box is braced; a number alone needs no braces.
BOX = re.compile(r"\\(?:boxed|fbox|framebox(?:\[[^\]\n]{0,20}\]){0,2})(?:\s*(\{)|\s*([-+]?\d[\d.,/]*))")
# Neither part of a word nor of a fraction.
ANY_NUMBER = re.compile(
    r"(?:(?<!\w)([-+]))?\\?\$?(?<![\w/])((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?!\.?\d|\s*/\s*\d)"
)
FORMAT = re.compile(rf"(?:^|\n)(?:####|A:) *[-+]?\$?{NUMBER}\s*$")


def to_number(text: str) -> Fraction | None:
    """Return `-1,234.50` as Fraction(-2469, 2), which is exact; None for anything but one number."""
    if len(text) > 100:  # Python refuses to convert integers of thousands of digits
        return None
    text = text.strip().rstrip(".%").lstrip("$").replace(",", "")
    return Fraction(text) if re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", text) else None


def exact_match(completion: str, row: dict) -> float:
    """Return 1 if the completion is the `answer` column, except for white space at the ends."""
    return float(completion.strip() in [answer.strip() for answer in gold_answers(row)])


def characters(completion: str, row: dict) -> float:
    """Return the fraction of characters that agree with the `answer` column, out of the longer of the two: a reward
    that an untrained model can climb."""
    return max(agreement(completion, answer) for answer in gold_answers(row))


def agreement(text: str, other: str) -> float:
    return sum(a == b for a, b in zip(text, other, strict=False)) / max(len(text), len(other), 1)


def gsm8k(completion: str, row: dict) -> float:
    """Return 1 if the last `#### n` or `A: n` of the completion is the same number as in the `answer` column, which may
    be the number alone. Commas, a plus sign, a dollar sign and trailing zeros do not matter. Several numbers, such as
    `#### 18 or 20`, are no answer."""
    found = [to_number(answer) for answer in final_answers(completion)]
    return float(bool(found) and found[-1] is not None and found[-1] in gold_numbers(row))


def final_answers(text: str) -> list[str]:
    """Return every number behind `####` or `A:`, as its sign and digits, with what makes it more than a number."""
    return [sign + number for sign, number in FINAL_ANSWER.findall(text.replace("−", "-"))]


def gold_numbers(row: dict) -> list[Fraction | None]:
    """Return the number of each right answer: the last behind `####` or `A:`, else the answer; None if it is none."""
    return [to_number((final_answers(answer) or [answer])[-1]) for answer in gold_answers(row)]


def check_number(row: dict) -> None:
    """Raise `ValueError` unless each right answer is a number."""
    check_answer(row)
    for answer, number in zip(gold_answers(row), gold_numbers(row), strict=True):
        if number is None:
            expected = "expected a number, or text with `#### number`"
            raise ValueError(f"{row['_source']}: column answer: {expected}, got {answer[-80:]!r}")


def boxed(completion: str, row: dict) -> float:
    """Return 1 if the last \\boxed{...} of the completion equals the `answer` column, or the \\boxed{...} there: as
    numbers if both are, else as text without white space."""
    found = last_boxed(completion)
    if found is None:
        return 0.0
    golds = [last_boxed(answer) or answer for answer in gold_answers(row)]
    if to_number(found) is not None:
        return float(to_number(found) in map(to_number, golds))
    return float("".join(found.split()) in ["".join(gold.split()) for gold in golds])


def last_boxed(text: str) -> str | None:
    """Return the content of the last box (\\boxed, \\fbox, \\framebox), with balanced braces; None without a box, or
    if it is not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    brace, number = boxes[-1].span(1), boxes[-1][2]
    if number is not None:
        return number.rstrip(".,")
    depth = 0
    for i in range(brace[0], len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[brace[1] : i]
    return None


def gsm8k_flexible(completion: str, row: dict) -> float:
    """Return `gsm8k` of a completion in any form. Its answer is the first number in the last \\boxed{...}, else the
    number behind the last `####` or `A:`, else the last number."""
    found = flexible_answer(completion)
    return float(found is not None and found in gold_numbers(row))


def flexible_answer(text: str) -> Fraction | None:
    text = text.replace("−", "-")
    if (box := last_boxed(text)) is not None:
        plain = box.replace("{,}", ",").replace("\\!", "")  # 1,234 in LaTeX
        found = [] if "frac{" in plain else numbers_in(plain)[:1]
    else:
        found = (final_answers(text) or numbers_in(text))[-1:]
    return to_number(found[0]) if found else None


def numbers_in(text: str) -> list[str]:
    """Return every number as its sign and digits: 10 and 5 for `10-5`. The numbers of a fraction are left out."""
    return [sign + number for sign, number in ANY_NUMBER.findall(text)]


def format(completion: str, row: dict) -> float:
    """Return 1 if the completion ends with a line `#### n` (or `A: n`), for any number n."""
    return float(FORMAT.search(completion) is not None)


# ---- countdown ----

MAX_EXPRESSION = 200  # characters; bounds the parser's and our own recursion, and the size of the numbers
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def countdown(completion: str, row: dict) -> float:
    """Return 1 if the completion's expression makes `target` out of `nums` (or `numbers`), each used exactly once.

    The expression is the content of the last <answer>...</answer> or, if no such tag is opened, the last line that is
    not blank. It has only whole numbers in plain digits, parentheses and binary + - * / (also typeset as × ÷ −). One
    "= target" may follow it, and one full stop at the end; anything else on the right of "=" gives 0.
    """
    text = last_tagged(completion, "answer")
    if text is None:
        text = "" if "<answer>" in completion else completion.rstrip().rpartition("\n")[2]
    expression, equals, right = text.strip().removesuffix(".").partition("=")
    if equals and right.strip() != str(row["target"]):
        return 0.0
    value, numbers = arithmetic(expression.strip())
    return float(value == row["target"] and sorted(numbers) == sorted(countdown_numbers(row)))


def last_tagged(text: str, tag: str) -> str | None:
    """Return the text between the last closing tag and the last opening one before it; None without such a pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def arithmetic(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the exact value of an expression, and the numbers in it. The value is None for a division by zero, and for
    anything but whole numbers, parentheses and binary + - * /."""
    expression = expression.translate(str.maketrans("×÷−", "*/-"))
    # With these characters alone there are no names, floats, comments or line breaks, and the parser cannot warn.
    if len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return None, []
    try:
        tree = ast.parse(expression, mode="eval").body
        return evaluate(tree), [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):  # the last is the parser's "nested too deep"
        return None, []


def evaluate(node: ast.AST) -> Fraction:
    """Return the value of a syntax tree. Raises `ValueError` for other nodes (`**`, `//`, signs, calls, tuples), and
    `ZeroDivisionError`."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(f"not arithmetic: {type(node).__name__}")
    return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))


def countdown_numbers(row: dict) -> list[int] | None:
    return row["nums"] if row.get("nums") is not None else row.get("numbers")


def check_countdown(row: dict) -> None:
    """Raise `ValueError` unless the row has a list of whole numbers >= 0 and a whole `target`."""
    numbers = countdown_numbers(row)
    if not isinstance(numbers, list) or not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{row['_source']}: column nums or numbers: expected integers >= 0, got {numbers!r}")
    check_target(row)


def check_target(row: dict) -> None:
    """Raise `ValueError` unless the row has a whole `target`."""
    if type(row["target"]) is not int:
        raise ValueError(f"{row['_source']}: column target: expected an integer, got {row['target']!r}")


# ---- splits ----

SPLIT = re.compile(r"([1-9][0-9]{0,14})\+([1-9][0-9]{0,14})")


def split(completion: str, row: dict) -> float:
    """Return 1 if the completion is `a+b` with the sum `target`, for whole numbers a, b >= 1 without leading zeros."""
    match = SPLIT.fullmatch(completion.strip())
    return float(match is not None and int(match[1]) + int(match[2]) == row["target"])


# ---- the form of a completion: for small weights beside a reward for right answers ----

TAGS = re.compile(r"<think>.*?</think>\s*<answer>(.*?)</answer>", re.DOTALL)


def length(completion: str, row: dict) -> float:
    """Return minus the distance in words between the completion and the row's `target_length`, or 0 without one. The
    length term of LCPO (arXiv:2503.04697), which counts tokens. It has no lower bound: give it a small weight."""
    return float(-abs(len(completion.split()) - (row.get("target_length") or 0)))


def check_length(row: dict) -> None:
    """Raise `ValueError` for a `target_length` that is no number of words."""
    target = row.get("target_length")
    if target is not None and (type(target) not in (int, float) or not 0 <= target < math.inf):
        raise ValueError(f"{row['_source']}: column target_length: expected a number of words, got {target!r}")


def repetition(completion: str, row: dict) -> float:
    """Return minus the fraction of the completion's runs of 3 words that occurred in it before, in (-1, 0]; 0 for fewer
    than 3 words. Discourages repetition that only fills space (arXiv:2502.03373)."""
    words = completion.split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(runs)) / len(runs) - 1 if runs else 0.0


def tag_format(completion: str, row: dict) -> float:
    """Return 1 if the completion is <think>...</think> <answer>...</answer>: each tag once, only white space around and
    between the two parts, and an answer that is not blank."""
    # The count also keeps the expression linear: each of its ".*?" has one place to stop at.
    once = all(completion.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    match = TAGS.fullmatch(completion.strip()) if once else None
    return float(match is not None and match[1].strip() != "")


exact_match.columns = characters.columns = gsm8k.columns = gsm8k_flexible.columns = boxed.columns = ("answer",)
exact_match.check = characters.check = boxed.check = check_answer
gsm8k.check = gsm8k_flexible.check = check_number
countdown.columns = split.columns = ("target",)  # countdown's numbers have one of two names: check_countdown
countdown.check, split.check, length.check = check_countdown, check_target, check_length
length.reads = repetition.reads = "completion"
tag_format.reads = "turn"
ALL = (exact_match, characters, gsm8k, gsm8k_flexible, boxed, format, countdown, split, length, repetition, tag_format,
       ifeval)  # fmt: skip
REWARDS: dict[str, Reward] = {function.__name__: function for function in ALL}
