"""The reward `countdown`."""

import warnings
from fractions import Fraction
from operator import add, mul, sub, truediv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.rewards.arithmetic import arithmetic
from extras.graders.puzzles import countdown

ROW = dict(nums=[3, 5, 7, 9], target=24, _source="rows.jsonl:7")  # 3+5+7+9


@pytest.mark.parametrize(
    "completion, reward",
    [
        ("<answer>3 + 5 + 7 + 9</answer>", 1),
        ("<think>3*5 <answer>1</answer></think>\n<answer>\n(9+7)+(5+3)\n</answer> done", 1),
        ("so\n3+5+7+9\n \n", 1), ("<answer>3+5+7+9 = 24</answer>", 1), ("3+5+7+9=24.", 1),
        ("((3+5))+((7)+9)", 1),
        # the number of times each number is used
        ("9 + 7 × 5 ÷ 7 + 3 + 7", 0), ("3 + 5 + 16", 0), ("9 + 7 + 5", 0), ("24", 0),
        ("3 + 5 + 7 + 9 + 3 - 3", 0), ("35 - 7 - 9", 0),  # digits joined
        # another value
        ("3 + 5 + 7 - 9", 0), ("<answer>3+5+7-9 = 24</answer>", 0), ("3+5+7+9 = 25", 0),
        ("24 = 3+5+7+9", 0), ("3+5+7+9 =", 0), ("3+5+7+9 = ٢٤", 0),
        # position of the answer
        ("3+5+7+9\nis it", 0), ("<answer>3+5+7+9</answer> <answer>3</answer>", 0),
        ("<answer>\n3+5+7+9", 0),  # truncated: not the last line of a completion without tags
        ("<answer>3+5+7+9</answer> and <answer>", 1), ("the answer is 3+5+7+9", 0),
        # allowed syntax
        ("3.0 + 5 + 7 + 9", 0), ("3 + 5 + 7 + 0_9", 0), ("3 + 5 + 7 + 09", 0), ("", 0),
        ("٣ + 5 + 7 + 9", 0), ("3 + 5 + 7 + 9 # yes", 0), ("<answer>3 + 5 +\n7 + 9</answer>", 0),
        ("+3 + 5 + 7 + 9", 0), ("3 - -5 + 7 + 9", 0), ("(3 + 5 + 7 + 9,)", 0), ("3(5) + 7 + 9", 0),
        ("<answer></answer>", 0), ("__import__('os').system('true')", 0), ("\x003+5+7+9", 0),
    ],
)  # fmt: skip
def test_countdown_scores_the_expression(completion, reward):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert countdown(completion, ROW) == reward


@pytest.mark.parametrize(
    "completion, nums, target, reward",
    [
        ("8 ÷ (3 − 8 ÷ 3)", [8, 3, 8, 3], 24, 1),  # exact: floats give 23.999999999999989
        ("7 / 2", [2, 7], 3, 0), ("7 // 2", [2, 7], 3, 0), ("2 ** 3", [2, 3], 8, 0),
        ("5 / (3 - 3)", [3, 3, 5], 5, 0), ("2 - 7 = -5", [2, 7], -5, 1),
        ("True + 1", [1, 1], 2, 0), ("5 + 5", [5], 10, 0), ("5", [5], 5, 1),
    ],
)  # fmt: skip
def test_countdown_scores_expressions_over_other_numbers(completion, nums, target, reward):
    assert countdown(completion, dict(nums=nums, target=target)) == reward
    assert countdown(completion, dict(numbers=nums, target=target)) == reward


@given(st.data())
def test_countdown_accepts_every_correct_expression(data):
    """Random expression trees are compared with Python's fractions; `nums` are in any order."""
    nums = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
    parts = [(str(n), Fraction(n)) for n in nums]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        (a, x), (b, y) = parts[i : i + 2]
        op = data.draw(st.sampled_from("+-*/" if y else "+-*"))
        function = dict(zip("+-*/", (add, sub, mul, truediv), strict=True))[op]
        parts[i : i + 2] = [(f"({a} {op} {b})", function(x, y))]
    [(text, value)] = parts
    shuffled = data.draw(st.permutations(nums))
    found, numbers = arithmetic(text)
    assert found == value and sorted(numbers) == sorted(nums)
    if value.denominator == 1:
        forms = (text, f"<answer>{text}</answer>", f"{text} = {int(value)}", text.replace("*", "×"))
        for written in forms:
            assert countdown(written, dict(nums=shuffled, target=int(value))) == 1
            assert countdown(written, dict(nums=shuffled, target=int(value) + 1)) == 0
            assert countdown(written, dict(nums=shuffled + [0], target=int(value))) == 0


@pytest.mark.parametrize(
    "columns, message",
    [
        (dict(target=3), "column nums or numbers: expected integers >= 0, got None"),
        (dict(target=3, nums="1 2"), "column nums .* got '1 2'"),
        (dict(target=3, nums=[1, 2.0]), "column nums"),
        (dict(target=3, numbers=[1, -2]), "column nums"),
        (dict(target="3", nums=[1, 2]), "column target: expected an integer, got '3'"),
    ],
)
def test_countdown_refuses_malformed_rows(columns, message):
    with pytest.raises(ValueError, match=f"^rows.jsonl:7: {message}"):
        countdown.check(columns | dict(_source="rows.jsonl:7"))
    for numbers in (dict(nums=[1, 2]), dict(numbers=[0]), dict(nums=None, numbers=[4])):
        countdown.check(numbers | dict(target=3, _source=""))
