"""Flags against the launch: whether they fit the number of ranks, and the flags of the run that is resumed."""

from dataclasses import asdict
from typing import Any

from common.config.flags import MAY_CHANGE
from common.config.groups import BaseArgs, OnlineArgs, SamplingArgs


def check_ranks(args: BaseArgs, ranks: int) -> None:
    """Raise `ValueError` if the flags do not fit this number of ranks."""
    rollout_ranks = args.rollout_ranks if isinstance(args, OnlineArgs) else 0
    if rollout_ranks >= ranks:
        raise ValueError(f"--rollout_ranks {rollout_ranks} must be less than the number of ranks ({ranks})")
    training, generating = ranks - rollout_ranks, rollout_ranks or ranks
    for flag in ("batch_size", "prompts_per_step"):
        if (size := getattr(args, flag, 0)) % training:
            raise ValueError(f"--{flag} {size} must be a multiple of the number of training ranks ({training})")
    if isinstance(args, OnlineArgs) and args.prompts_per_step % (shares := training * args.minibatches):
        what = f"the number of training ranks times --minibatches ({shares})"
        raise ValueError(f"--prompts_per_step {args.prompts_per_step} must be a multiple of {what}")
    if isinstance(args, SamplingArgs) and generating % (size := args.tensor_parallel_size):
        raise ValueError(f"--tensor_parallel_size {size} must divide the {generating} generating ranks")
    for flag in ("context_ranks", "shard_ranks"):
        if (size := getattr(args, flag)) and training % size:
            raise ValueError(f"--{flag} {size} must divide the {training} training ranks")


def flags_of(args: BaseArgs) -> dict[str, Any]:
    """Return the flags by name, in values that YAML has: the content of args.yaml."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(args).items()}


def may_change(args: BaseArgs, then: dict[str, Any]) -> set[str]:
    """Return the flags that may differ from `then`, those of the run that is resumed: flags marked `MayChange` by the
    class of `args` or a base, and `max_staleness` if it had no effect then or has none now."""
    classes = [vars(cls).get("__pydantic_fields__", {}) for cls in type(args).__mro__]
    free = {name for fields in classes for name, field in fields.items() if MAY_CHANGE in field.metadata}
    read_now = isinstance(args, OnlineArgs) and (args.rollout_ranks > 0 or args.oversample > 1)
    read_then = then.get("rollout_ranks", 0) > 0 or then.get("oversample", 1) > 1
    return free if read_now and read_then else free | {"max_staleness"}
