"""Expressions of a model's text have an exact value, and never raise."""

import warnings

from hypothesis import given
from hypothesis import strategies as st

from common.rewards.arithmetic import arithmetic


@given(st.text(alphabet="0123456789+-*/() ", max_size=220))
def test_arithmetic_raises_nothing_on_its_alphabet(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, numbers = arithmetic(text)
    assert value is None or "**" not in text and "//" not in text and numbers


def test_arithmetic_bounds_length_and_size():
    assert arithmetic("(" * 99 + "1" + ")" * 99) == (1, [1])
    assert arithmetic("1" + "+1" * 99)[0] == 100  # 199 characters
    assert arithmetic("1" + "+1" * 100)[0] is None
    long = "(" * 200, "(" * 100 + ")" * 100, "-" * 199 + "1", "9" * 10_000, "1(" * 100, "(1)" * 60
    for text in long:
        assert arithmetic(text)[0] is None
    assert arithmetic("9" * 100 + "*" + "9" * 99)[0] == (10**100 - 1) * (10**99 - 1)
