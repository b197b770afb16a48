"""Types of flags with their bounds, which pydantic checks, and with what they need (`Needs`).

`lr: Positive[float]`, `max_steps: MayChange[Positive[int] | None]`, `reward: Several[str]`,
`clip_low: Annotated[BelowOne, Needs(loss="clip")]`."""

import re
from collections.abc import Container, Iterable
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

# Configuration of all classes of flags: unknown names are errors, also in Python, defaults keep
# their bounds too, and nothing is set after parsing.
STRICT = ConfigDict(
    extra="forbid", validate_default=True, coerce_numbers_to_str=True, defer_build=True, frozen=True
)
MAX_FLOAT = 3e38


def _in_float32(number: T) -> T:
    """Return `number`; raise `ValueError` for NaN, infinity and what float32, the type of tensors,
    cannot hold."""
    if not abs(number) <= MAX_FLOAT:
        raise ValueError("must be finite in float32")
    return number


def _number_and_kind(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x\w+", text):
        raise ValueError("must be a number and a kind of GPUs, such as 8xH100")
    return text


def as_tuple(value: Any) -> Any:
    """Return a single value as a tuple: `Args(reward="math")`, or `reward: math` in a file."""
    return value if value is None or isinstance(value, list | tuple) else (value,)


Real = Annotated[float, AfterValidator(_in_float32)]
Positive = Annotated[T, Field(gt=0), AfterValidator(_in_float32)]
NotNegative = Annotated[T, Field(ge=0), AfterValidator(_in_float32)]
AtLeast2 = Annotated[int, Field(ge=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Gpus = Annotated[str, AfterValidator(_number_and_kind)]
Several = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]

# Marks a flag that may differ between the run that made a checkpoint and the run that resumes it:
# it changes how long, where or how often, but not what a step computes. (`max_steps` also stretches
# a decaying learning rate, and `rollout_ranks` from or to 0 changes the age of samples.)
MAY_CHANGE = object()
MayChange = Annotated[T, MAY_CHANGE]


class Needs:
    """Metadata of a flag that has an effect only with another flag, or with one of several.

    `Needs(loss="clip")`: with this value, with one of `("clip", "gspo")`, or with it in a list;
    "judge:" is the beginning of a value. `Needs(beta=True)`: with any value but 0, false, none and
    an empty list. `Needs(agent=None)`: without this flag. Of two `Needs` both must be met."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def is_met(self, args: Any) -> bool:
        """Return whether any needed flag has its value, or the script has none of them."""
        known = {name: wanted for name, wanted in self.values.items() if hasattr(args, name)}
        return not known or any(fits(getattr(args, name), x) for name, x in known.items())

    def unmet(self, args: Any) -> str:
        """Return why the flag has no effect: `with --loss cispo`, `without --tools`."""
        given = {name: getattr(args, name, None) for name in self.values}
        present = {name: value for name, value in given.items() if value not in (None, ())}
        if not present:
            return f"without {either(given)}"
        return "with " + " and ".join(f"--{name} {shown(x)}" for name, x in present.items())

    def text(self, flags: Container[str]) -> str:
        """Return the condition for the help of a script with these flags; empty if it always
        holds."""
        known = {name: wanted for name, wanted in self.values.items() if name in flags}
        if not known:
            return ""
        if [*known.values()] == [None]:
            return f"only without {either(known)}"
        forms = [name if x is True else f"{name} {shown(x, ', ')}" for name, x in known.items()]
        return f"only with {either(forms)}"


def fits(value: Any, wanted: Any) -> bool:
    """Return whether a value is wanted by a member of `Needs`."""
    if wanted is True or not wanted:
        return bool(value) == bool(wanted)
    return any(
        member == choice or str(choice).endswith(":") and str(member).startswith(choice)
        for member in as_tuple(value) or (None,)
        for choice in as_tuple(wanted)
    )


def either(names: Iterable[str]) -> str:
    """Return `--a, --b or --c`."""
    *others, last = [f"--{name}" for name in names]
    return f"{', '.join(others)} or {last}" if others else last


def shown(value: Any, comma: str = " ") -> str:
    """Return a value as on the command line."""
    if isinstance(value, tuple | list):
        return comma.join(shown(member) for member in value if member is not None)
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def marks_of(args_class: type) -> dict[str, list]:
    """Return what marks each flag, such as `Needs`, also where a script changes its default."""
    found: dict[str, list] = {}
    for cls in args_class.__mro__:
        for name, field in vars(cls).get("__pydantic_fields__", {}).items():
            marks = found.setdefault(name, [])
            marks += [mark for mark in field.metadata if mark not in marks]
    return found


def needs_of(args_class: type, flag: str) -> list[Needs]:
    """Return what a flag needs."""
    return [mark for mark in marks_of(args_class).get(flag, ()) if isinstance(mark, Needs)]


def check_needs(args: Any) -> None:
    """Raise `ValueError` for a flag that is set and has no effect."""
    for field in fields(args):
        flag, value = field.name, getattr(args, field.name)
        if value in (field.default, args.TINY_DEFAULTS.get(flag, field.default)):
            continue
        for need in needs_of(type(args), flag):
            if not need.is_met(args):
                raise ValueError(f"--{flag} {shown(value)} has no effect {need.unmet(args)}")


def union_members(kind: Any) -> tuple:
    """Return the types of a union; of another type, itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
