"""The reward `countdown`. common/rewards/functions.py says what a reward function may have."""

from common.rewards.answers import from_json
from common.rewards.arithmetic import arithmetic


def countdown(completion: str, row: dict) -> float:
    """Return 1 if the completion's expression makes `target` out of `nums` (or `numbers`), each
    used exactly once.

    The expression is what the last <answer>...</answer> has in it or, if no such tag is opened, the
    last line that is not blank. It may have whole numbers in plain digits, parentheses and binary +
    - * / (also typeset as × ÷ −). "= target" and a full stop may follow it once each; anything else
    on the right of "=" gives 0."""
    text = last_tagged(completion, "answer")
    if text is None:
        text = "" if "<answer>" in completion else completion.rstrip().rpartition("\n")[2]
    expression, equals, right = text.strip().removesuffix(".").partition("=")
    if equals and right.strip() != str(row["target"]):
        return 0.0
    value, numbers = arithmetic(expression.strip())
    return float(value == row["target"] and sorted(numbers) == sorted(countdown_numbers(row)))


def last_tagged(text: str, tag: str) -> str | None:
    """Return the text between the last closing tag and the opening tag before it, or None without
    such a pair."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def countdown_numbers(row: dict) -> list[int] | None:
    return from_json(row["nums"] if row.get("nums") is not None else row.get("numbers"))


def check_countdown(row: dict) -> None:
    """Raise `ValueError` unless the row has a list of whole numbers >= 0 and a whole `target`."""
    numbers, source = countdown_numbers(row), row.get("_source")
    is_list = isinstance(numbers, list) and numbers != []
    if not is_list or not all(type(number) is int and number >= 0 for number in numbers):
        expected = "expected integers >= 0"
        raise ValueError(f"{source}: column nums or numbers: {expected}, got {numbers!r}")
    target = row["target"]
    if type(target) is not int:
        raise ValueError(f"{source}: column target: expected an integer, got {target!r}")


countdown.columns = ("target",)
countdown.may_read = ("nums", "numbers")  # check_countdown requires one of them
countdown.check = check_countdown
