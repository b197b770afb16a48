"""The rule that a flag which is set has an effect."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from common.config.flags import as_tuple, is_set, shown


def require_default(args: Any, flags: Sequence[str], why: str) -> None:
    """Raise `ValueError` for the first of `flags` that is set: `--lora_alpha 8.0 has no effect with
    --lora_rank 0` if `why` is `with --lora_rank 0`."""
    for flag in flags:
        if is_set(args, flag):
            raise ValueError(f"--{flag} {shown(getattr(args, flag))} has no effect {why}")


def require_effect(args: Any, flag: str, table: Mapping[str, Sequence[str]]) -> None:
    """Raise `ValueError` for a flag that is set but read only by members of `table` that `--flag`
    does not choose.

    `table` lists the flags that each member reads. With `dict(clip=("clip_low",),
    cispo=("cispo_high",))` for `loss`: `--cispo_high 3.0 has no effect with --loss clip`."""
    chosen = as_tuple(getattr(args, flag))
    read = {name for member in chosen for name in table[member]}
    unread = [name for name in chain(*table.values()) if name not in read]
    require_default(args, unread, f"with --{flag} {' '.join(chosen)}")
