"""Types of flags with their bounds, which pydantic checks; and the words of a value on the
command line.

`lr: Positive[float]`, `max_steps: MayChange[Positive[int] | None]`, `reward: Several[str]`.
"""

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

# Configuration of all classes of flags: unknown names are errors, also in Python, and defaults keep
# their bounds too.
STRICT = ConfigDict(
    extra="forbid", validate_default=True, coerce_numbers_to_str=True, defer_build=True
)
MAX_FLOAT = 3e38


def _in_float32(number: T) -> T:
    """Return `number`; raise `ValueError` for NaN, infinity and what float32, the type of tensors,
    cannot hold."""
    if not abs(number) <= MAX_FLOAT:
        raise ValueError("must be finite in float32")
    return number


def as_tuple(value: Any) -> Any:
    """Return a single value as a tuple: `Args(reward="math")`, or `reward: math` in a file."""
    return value if value is None or isinstance(value, list | tuple) else (value,)


Real = Annotated[float, AfterValidator(_in_float32)]
Positive = Annotated[T, Field(gt=0), AfterValidator(_in_float32)]
NotNegative = Annotated[T, Field(ge=0), AfterValidator(_in_float32)]
AboveOne = Annotated[float, Field(gt=1), AfterValidator(_in_float32)]
AtLeast2 = Annotated[int, Field(ge=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Several = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]

# Marks a flag that may differ between the run that made a checkpoint and the run that resumes it:
# it changes how long, where or how often, but not what a step computes. (`max_steps` also stretches
# a decaying learning rate, and `rollout_ranks` from or to 0 changes the age of samples.)
MAY_CHANGE = object()
MayChange = Annotated[T, MAY_CHANGE]


def union_members(kind: Any) -> tuple:
    """Return the types of a union; of another type, itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def metavar_of(kind: Any) -> str:
    """Return the form of a flag's value, for messages: `FLOAT`, `{None}|INT`, `{a,b}`."""
    members = union_members(kind)
    if NoneType in members:
        form = metavar_of(next(member for member in members if member is not NoneType))
        is_choice = form.startswith("{") and "," in form
        return "{None," + form[1:] if is_choice else "{None}|" + form
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return "{" + " ".join(map(metavar_of, get_args(kind))) + "}"
    return kind.__name__.upper()


def from_words(name: str, kind: Any, words: list[str]) -> Any:
    """Return the value of the flag `name` as text, which pydantic checks as in a file. A boolean
    without words is true. Raises `ValueError` for too few or too many words."""
    members = union_members(kind)
    if NoneType in members and words == ["None"]:
        return None
    if bool in members:
        return " ".join(words) or True
    if get_origin(members[0]) is tuple:
        types = get_args(members[0])
        if types[-1] is not ... and len(words) != len(types):
            raise ValueError(f"--{name}: expected {metavar_of(kind)}")
        return tuple(words)
    if not words:
        raise ValueError(f"--{name}: expected {metavar_of(kind)}")
    if len(words) > 1:
        raise ValueError(f"unknown flag {words[1]}")
    return words[0]
