"""Types of flags with their bounds, and the rule that a changed flag must have an effect."""

import dataclasses
import math
import typing
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic.dataclasses import dataclass

from common.config.extra import extra
from common.config.flags import (
    MAX_FLOAT,
    STRICT,
    AtLeast2,
    BelowOne,
    Gpus,
    MayChange,
    Needs,
    NotNegative,
    Positive,
    PositiveFraction,
    Real,
    Several,
    check_needs,
    values_of,
)
from common.config.parse import one_line

# ---- bounds ----


def built(hint: Any, value: Any) -> Any:
    """Return the value of a flag `x` of this type, or its error on one line."""
    flags = dataclass(type("Flags", (), {"__annotations__": {"x": hint}}), config=STRICT)
    try:
        return flags(x=value).x
    except ValueError as error:
        return one_line(error)


@pytest.mark.parametrize(
    ("hint", "given", "taken"),
    [
        (Positive[int], 1, 1),
        (Positive[int], 2.0, 2),
        (Positive[int], 0, "--x 0 must be greater than 0"),
        (AtLeast2, 1, "--x 1 must be greater than or equal to 2"),
        (Real | None, None, None),
        (Real | None, -math.inf, "--x -inf must be finite in float32"),
        (Positive[float], MAX_FLOAT, MAX_FLOAT),
        (Positive[float], "1e-3", 1e-3),
        (Positive[float], 1e39, "--x 1e+39 must be finite in float32"),
        (Positive[float], math.nan, "--x nan must be greater than 0"),
        (Several[NotNegative[float]], (0.0,), (0.0,)),
        (Several[NotNegative[float]], (1.0, -2.0), "--x -2 must be greater than or equal to 0"),
        (PositiveFraction, 0, "--x 0 must be greater than 0"),
        (BelowOne, 1, "--x 1 must be less than 1"),
        (MayChange[Positive[int] | None], 0, "--x 0 must be greater than 0"),
        (Gpus, "8H100", "--x 8H100 must be a number and a kind of GPUs, such as 8xH100"),
        (bool, "false", False),
        (str, 2024, "2024"),
        (str, True, "--x True must be a valid string"),
        (Several[str], "a", ("a",)),
        (Several[str], ["a", "b"], ("a", "b")),
        (Literal["a", "b"], "c", "--x c must be 'a' or 'b'"),
    ],
)
def test_values_are_converted_to_the_type_and_have_bounds(hint, given, taken):
    value = built(hint, given)
    assert value == taken and type(value) is type(taken)


def test_constructor_refuses_a_default_out_of_bounds_and_an_unknown_name():
    @dataclass(config=STRICT)
    class Group:
        x: Positive[int] = 1

    @dataclass
    class Args(Group):
        x: Positive[int] = 0

    with pytest.raises(ValueError, match="greater than 0"):
        Args()
    with pytest.raises(ValueError, match="Unexpected keyword"):
        Args(x=1, y=2)
    assert typing.get_type_hints(Args)["x"] is int
    assert dataclasses.replace(Args(x=3), x=4) == Args(x=4)


# ---- flags without effect ----

CLIP = Needs(loss=("clip", "gspo"))


@dataclass
class Losses:
    TINY_DEFAULTS: ClassVar[dict] = dict(generate=256, new_tokens=5)
    loss: Several[Literal["clip", "gspo", "plain"]] = ("clip",)
    clip_low: Annotated[float, CLIP] = 0.2
    beta: float = 0.0
    kl: Annotated[str, Needs(beta=True), Needs(agent=None)] = "k1"
    agent: str | None = None
    tools: Several[str] = ()
    turns: Annotated[int, Needs(agent=True, tools=True)] = 8
    generate: int = 0
    new_tokens: Annotated[int, Needs(generate=True)] = 256
    absent: Annotated[int, Needs(environment=None)] = 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(loss="plain", clip_low=0.2), None),  # the default
        (dict(loss="gspo", clip_low=0.1), None),
        (dict(loss=("plain", "clip"), clip_low=0.1), None),
        (dict(loss="plain", clip_low=0.1), "--clip_low 0.1 has no effect with --loss plain"),
        (dict(kl="k3"), "--kl k3 has no effect with --beta 0"),
        (dict(kl="k3", beta=0.1), None),
        (dict(kl="k3", beta=0.1, agent="x"), "--kl k3 has no effect with --agent x"),
        (dict(turns=3), "--turns 3 has no effect without --agent or --tools"),
        (dict(turns=3, tools="x"), None),
        (dict(new_tokens=4), "--new_tokens 4 has no effect with --generate 0"),
        (dict(new_tokens=5), None),  # the default for the built-in model
        (dict(absent=3), None),
    ],
)
def test_flag_without_effect_is_refused(flags, words):
    if words is None:
        return check_needs(Losses(**flags))
    with pytest.raises(ValueError, match=f"^{words}$"):
        check_needs(Losses(**flags))


# ---- imports from extras ----


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("PIL.Image", "^--x needs the Python package PIL, which is not installed$"),
        ("extras", "^--x needs extras/images, which is not here$"),
        ("extras.tools.schemas", "^--x needs extras/tools, which is not here$"),
    ],
)
def test_a_missing_import_of_an_extra_is_one_line(module, words):
    with pytest.raises(ValueError, match=words), extra("images", "--x"):
        raise ModuleNotFoundError(name=module)


@pytest.mark.parametrize("module", ["common.nothing", None])
def test_a_wrong_import_is_a_bug(module):
    with pytest.raises(ModuleNotFoundError), extra("images", "--x"):
        raise ModuleNotFoundError(name=module)


# ---- values of name=value ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, text) for text in """
            no off yes on No y n 12:30 1:2:3 0042 -007 1_000 0b11 00.5 2024-02-20 2024-02-30
            2001-12-14t21:59:43Z x x:y a=b << = !x *x &x - ? @x `x 3% +- . 3,5 [1 {a nan inf
        """.split()],
        *[(text, text) for text in ("a: b", "- a", "3 # three", "# x", " 3", "'a' b", "9" * 5000)],
        ("true", True), ("False", False), ("null", None), ("~", None), ("3", 3), ("-3", -3),
        ("0", 0), ("0x1f", 31), ("0.5", 0.5), (".5", 0.5), ("1e-3", 0.001), ("-2.", -2.0),
        (".inf", math.inf), ("[1, no, 12:30]", [1, "no", "12:30"]), ('"3"', "3"),
        ('{"a": {"b": [true, "no"]}}', dict(a=dict(b=[True, "no"]))), ("{a: no}", dict(a="no")),
    ],
)  # fmt: skip
def test_values_are_those_of_yaml_1_2_or_text(text, value):
    found = values_of("template_kwargs", (f"x={text}",))["x"]
    assert found == value and type(found) is type(value)
