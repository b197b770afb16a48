"""Types of flags with their bounds, which pydantic checks, and the rule that a flag which is set has an effect.

`lr: Positive[float]`, `max_steps: MayChange[Positive[int] | None]`, `reward: Several[str]`.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

# Configuration of all classes of flags: unknown names are errors, also in Python, and defaults keep their bounds too.
STRICT = ConfigDict(extra="forbid", validate_default=True, coerce_numbers_to_str=True, defer_build=True)
MAX_FLOAT = 3e38


def _in_float32(number: T) -> T:
    """Return `number`; raise `ValueError` for NaN, infinity and what float32, the type of tensors, cannot hold."""
    if not abs(number) <= MAX_FLOAT:
        raise ValueError("must be finite in float32")
    return number


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
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Several = Annotated[tuple[T, ...], BeforeValidator(as_tuple)]

# Marks a flag that may differ between the run that made a checkpoint and the run that resumes it: it changes how long,
# where or how often, but not what a step computes. (`max_steps` also stretches a decaying learning rate, and
# `rollout_ranks` from or to 0 changes the age of samples.)
MAY_CHANGE = object()
MayChange = Annotated[T, MAY_CHANGE]


def require_default(args: Any, flags: Sequence[str], why: str) -> None:
    """Raise `ValueError` for the first of `flags` that is set: `--lora_alpha 8.0 has no effect with --lora_rank 0` if
    `why` is `with --lora_rank 0`."""
    for flag in flags:
        value = getattr(args, flag)
        if value != type(args).__dataclass_fields__[flag].default:
            given = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise ValueError(f"--{flag} {given} has no effect {why}")


def require_effect(args: Any, flag: str, table: Mapping[str, Sequence[str]]) -> None:
    """Raise `ValueError` for a flag that is set but read only by members of `table` that `--flag` does not choose.

    `table` lists the flags that each member reads. With `dict(clip=("clip_low",), cispo=("cispo_high",))` for `loss`:
    `--cispo_high 3.0 has no effect with --loss clip`.
    """
    chosen = as_tuple(getattr(args, flag))
    read = {name for member in chosen for name in table[member]}
    unread = [name for name in chain(*table.values()) if name not in read]
    require_default(args, unread, f"with --{flag} {' '.join(chosen)}")
