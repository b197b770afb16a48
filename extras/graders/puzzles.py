"""The rewards of two puzzles about whole numbers: `countdown` and `split`. functions.py says what a
reward function may have."""

import ast
import operator
import re
from fractions import Fraction

# ---- countdown ----

# characters; bounds the parser's and our own recursion, and the size of the numbers
MAX_EXPRESSION = 200
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(completion: str, row: dict) -> float:
    """Return 1 if the completion's expression makes `target` out of `nums` (or `numbers`), each
    used exactly once.

    The expression is the content of the last <answer>...</answer> or, if no such tag is opened, the
    last line that is not blank. It has only whole numbers in plain digits, parentheses and binary +
    - * / (also typeset as × ÷ −). One "= target" may follow it, and one full stop at the end;
    anything else on the right of "=" gives 0."""
    text = last_tagged(completion, "answer")
    if text is None:
        text = "" if "<answer>" in completion else completion.rstrip().rpartition("\n")[2]
    expression, equals, right = text.strip().removesuffix(".").partition("=")
    if equals and right.strip() != str(row["target"]):
        return 0.0
    value, numbers = arithmetic(expression.strip())
    return float(value == row["target"] and sorted(numbers) == sorted(countdown_numbers(row)))


def last_tagged(text: str, tag: str) -> str | None:
    """Return the text between the last closing tag and the last opening one before it; None without
    such a pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def arithmetic(expression: str) -> tuple[Fraction | None, list[int]]:
    """Return the exact value of an expression, and the numbers in it. The value is None for a
    division by zero, and for anything but whole numbers, parentheses and binary + - * /."""
    expression = expression.translate(str.maketrans("×÷−", "*/-"))
    # With these characters alone there are no names, floats, comments or line breaks, and the
    # parser cannot warn.
    if len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return None, []
    try:
        tree = ast.parse(expression, mode="eval").body
        numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return evaluate(tree), numbers
    # MemoryError: the parser's "nested too deep"
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError):
        return None, []


def evaluate(node: ast.AST) -> Fraction:
    """Return the value of a syntax tree. Raises `ValueError` for other nodes (`**`, `//`, signs,
    calls, tuples), and `ZeroDivisionError`."""
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
    is_list = isinstance(numbers, list) and numbers != []
    if not is_list or not all(type(number) is int and number >= 0 for number in numbers):
        expected = "expected integers >= 0"
        raise ValueError(f"{row['_source']}: column nums or numbers: {expected}, got {numbers!r}")
    check_target(row)


def check_target(row: dict) -> None:
    """Raise `ValueError` unless the row has a whole `target`."""
    target = row["target"]
    if type(target) is not int:
        raise ValueError(f"{row['_source']}: column target: expected an integer, got {target!r}")


# ---- splits ----

SPLIT = re.compile(r"([1-9][0-9]{0,14})\+([1-9][0-9]{0,14})")


def split(completion: str, row: dict) -> float:
    """Return 1 if the completion is `a+b` with the sum `target`, for whole numbers a, b >= 1
    without leading zeros."""
    match = SPLIT.fullmatch(completion.strip())
    return float(match is not None and int(match[1]) + int(match[2]) == row["target"])


countdown.columns = split.columns = ("target",)  # check_countdown requires its numbers
countdown.check = check_countdown
split.check = check_target
