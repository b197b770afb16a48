"""Bounds and markers in a flag's type; flags and the functions that read them."""

import math
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt
from hypothesis import given
from hypothesis import strategies as st

from common.config.flags import (
    MAX_FLOAT,
    AtLeast2,
    BaseArgs,
    BelowOne,
    Fraction,
    MayChange,
    NotNegative,
    Positive,
    PositiveFraction,
    check_bounds,
    may_change,
    require_read_by,
)

# ---- bounds ----


def problem(hint: Any, value: Any) -> str | None:
    """What is said of a flag `x` of this type and value."""
    flags = dataclass(type("Flags", (), {"__annotations__": {"x": hint}}))(value)
    try:
        check_bounds(flags)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("hint", "good", "bad", "words"),
    [
        (Positive[int], 1, 0, "--x 0 must be greater than 0"),
        (Positive[float], 1e-30, 0.0, "--x 0.0 must be greater than 0"),
        (NotNegative[int], 0, -1, "--x -1 must not be negative"),
        (NotNegative[float], 0.0, -1e-30, "--x -1e-30 must not be negative"),
        (AtLeast2, 2, 1, "--x 1 must be at least 2"),
        (Fraction, 0.0, -0.1, "--x -0.1 must be in [0, 1]"),
        (Fraction, 1.0, 1.1, "--x 1.1 must be in [0, 1]"),
        (PositiveFraction, 1.0, 0.0, "--x 0.0 must be in (0, 1]"),
        (BelowOne, 0.0, 1.0, "--x 1.0 must be in [0, 1)"),
        (Annotated[float, Interval(gt=0, lt=0.5)], 0.4, 0.5, "--x 0.5 must be in (0, 0.5)"),
        (Annotated[int, Lt(3)], 2, 3, "--x 3 must be below 3"),
        (Annotated[int, Le(3)], 3, 4, "--x 4 must be at most 3"),
        (Annotated[int, Ge(1), Le(3)], 3, 4, "--x 4 must be at most 3"),
        (float, -MAX_FLOAT, math.nan, "--x nan must be a finite number"),
        (float | None, None, -math.inf, "--x -inf must be a finite number"),
        (tuple[float, ...], (), (1.0, math.inf), "--x inf must be a finite number"),
        (Positive[float], MAX_FLOAT, 1e39, "--x 1e+39 must be a finite number"),
        (Positive[float], 1, math.nan, "--x nan must be a finite number"),
        (Positive[int] | None, None, 0, "--x 0 must be greater than 0"),
        (Positive[int | None], None, 0, "--x 0 must be greater than 0"),
        (Literal["auto"] | Positive[int], "auto", 0, "--x 0 must be greater than 0"),
        (tuple[NotNegative[float], ...], (0.0, 1.0), (1.0, -2.0), "--x -2.0 must not be negative"),
        (tuple[Fraction, Positive[float]], (0.0, 2.0), (0.0, 0.0), "--x 0.0 must be greater than 0"),
        (tuple[Fraction, Positive[float]] | None, None, (2.0, 2.0), "--x 2.0 must be in [0, 1]"),
        (tuple[Positive[int] | None, ...], (None, 1), (None, 0), "--x 0 must be greater than 0"),
        (Positive[int] | tuple[Positive[int], ...], (1, 2), (1, 0), "--x 0 must be greater than 0"),
        (MayChange[Positive[int]], 1, 0, "--x 0 must be greater than 0"),
        (MayChange[Positive[int] | None], None, 0, "--x 0 must be greater than 0"),
        (MayChange[tuple[Positive[int], ...]], (1,), (0,), "--x 0 must be greater than 0"),
        (Annotated[Positive[int], "something else"], 1, 0, "--x 0 must be greater than 0"),
    ],
)
def test_bounds(hint, good, bad, words):
    assert problem(hint, good) is None
    assert problem(hint, bad) == words


HOLDS = {
    Positive[float]: lambda x: x > 0,
    NotNegative[float]: lambda x: x >= 0,
    Fraction: lambda x: 0 <= x <= 1,
    PositiveFraction: lambda x: 0 < x <= 1,
    BelowOne: lambda x: 0 <= x < 1,
    MayChange[Annotated[float, Gt(-1), Lt(1)]]: lambda x: -1 < x < 1,
    float: lambda x: True,
}


@given(st.sampled_from(list(HOLDS)), st.one_of(st.floats(), st.sampled_from([-1, 0, 1, 0.0, 1.0])))
def test_a_bound_holds_or_is_named(hint, value):
    """Whether it stands alone, in a union or in a tuple."""
    holds = HOLDS[hint](value) and abs(value) <= MAX_FLOAT
    for where, x in (
        (hint, value),
        (hint | None, value),
        (tuple[hint, ...], (value,)),
        (tuple[str, hint], ("", value)),
    ):
        message = problem(where, x)
        assert (message is None) == holds
        assert holds or message.startswith(f"--x {value} must ")


# ---- markers ----


def test_what_may_change_is_said_beside_the_flag():
    @dataclass
    class Shared:
        a: MayChange[Positive[int]] = 1
        b: MayChange[Positive[int] | None] = None
        c: Positive[int] = 1
        d: MayChange[tuple[Literal["x", "y"], ...]] = ()
        e: MayChange[int] | None = None
        same: MayChange[str] = ""

    @dataclass
    class Args(Shared):
        same: str = "another default"
        c: Positive[int] = 2
        f: MayChange[bool] = False

    assert may_change(Args) == {"a", "b", "d", "e", "f", "same"}
    assert may_change(Shared) == {"a", "b", "d", "e", "same"}
    assert typing.get_type_hints(Args)["b"] == int | None


# ---- families ----


@dataclass
class Losses(BaseArgs):
    loss: Literal["clip", "cispo", "plain"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    cispo_high: float = 4.0
    lr: float = 1.0


LOSSES = dict(clip=("clip_low", "clip_high"), cispo=("cispo_high",), plain=())


def test_a_flag_that_only_other_members_read_is_refused():
    for flags in (dict(clip_low=0.1), dict(lr=2.0), dict(clip_low=0.2, cispo_high=4.0)):
        require_read_by(Losses(**flags), LOSSES, "clip")
    for flags, chosen, words in (
        (dict(clip_low=0.1), "cispo", "--clip_low 0.1 would not be read: --loss is cispo"),
        (dict(cispo_high=1.0), "plain", "--cispo_high 1.0 would not be read: --loss is plain"),
        (dict(cispo_high=1.0), ("clip", "plain"), "--cispo_high 1.0 would not be read: --loss is clip plain"),
    ):
        with pytest.raises(ValueError) as error:
            require_read_by(Losses(**flags), LOSSES, chosen)
        assert str(error.value) == words
    require_read_by(Losses(cispo_high=1.0, clip_low=0.1), LOSSES, ("clip", "cispo"))
    with pytest.raises(ValueError, match="not be read: --advantage is plain"):
        require_read_by(Losses(clip_low=0.1), LOSSES, "plain", flag="advantage")


def test_a_default_that_a_script_declares_anew_is_a_default():
    @dataclass
    class Args(Losses):
        clip_low: float = 0.5

    require_read_by(Args(), LOSSES, "plain")
    Args().require_read("clip_low", False, "never")
    for wrong in (lambda: require_read_by(Args(clip_low=0.2), LOSSES, "plain"),
                  lambda: Args(clip_low=0.2).require_read("clip_low", False, "never")):  # fmt: skip
        with pytest.raises(ValueError, match="--clip_low 0.2 would not be read"):
            wrong()
