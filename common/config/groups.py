"""Flags of each kind of script, as unions of groups: `BaseArgs`, `TrainArgs`; in online.py
`SamplingArgs` and `OnlineArgs`.

A group (training.py, sampling.py, objectives.py) is a pydantic dataclass without a base and a
section of --help. The types of its flags carry their bounds (flags.py). A script's `Args` inherits
what it needs in any order, overrides defaults and adds its own flags.
Rules between flags are validators of their group or union, because pydantic runs those of all
bases; rules of one script are in its `__post_init__`."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import MAY_CHANGE, STRICT, check_needs, marks_of
from common.config.training import (
    CheckpointArgs,
    DataArgs,
    HeldOutArgs,
    LoRAArgs,
    ModelArgs,
    OptimArgs,
    RunArgs,
)

# Defaults for the built-in models and task, which need other values than real ones (parse.py).
BUILT_IN_MODELS = ("tiny", "tiny-sft", "tiny-images")
TINY_TRAINING = dict(lr=3e-3, warmup_steps=10, max_steps=100, eval_every=20, prompt_format="plain")
TINY_GENERATE = dict(eval_generate=256, max_new_tokens=5)


@dataclass(config=STRICT)
class BaseArgs(RunArgs, DataArgs, ModelArgs):
    """Flags of every script."""

    TINY_DEFAULTS: ClassVar[dict] = {}
    """defaults for the built-in models and task; for other data, the learning rates only"""
    PRESETS: ClassVar[dict[str, dict]] = {}
    """flags that each value of `--preset` sets"""

    # Flags of some scripts that models, encoders, exports and runs of all read; no flags here.
    agent = None
    share_prefix = 0
    stop_token_ids = ()
    vision = None
    offload = "none"

    @model_validator(mode="after")
    def _check_needs(self) -> Self:
        check_needs(self)
        return self


@dataclass(config=STRICT)
class TrainArgs(  # pyrefly: ignore[inconsistent-inheritance]
    LoRAArgs, CheckpointArgs, OptimArgs, HeldOutArgs, BaseArgs
):
    """Flags of every script that trains."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_TRAINING
    ROWS_FLAG: ClassVar[str] = "batch_size"
    """flag with the number of rows of a step"""

    @property
    def rows_per_step(self) -> int:
        """Number of rows of a step, over all ranks."""
        return getattr(self, self.ROWS_FLAG)


def check_ranks(args: BaseArgs, ranks: int) -> None:
    """Raise `ValueError` if the flags do not fit this number of ranks."""
    rollout_ranks = getattr(args, "rollout_ranks", 0)
    if rollout_ranks >= ranks:
        flag = f"--rollout_ranks {rollout_ranks}"
        raise ValueError(f"{flag} must be less than the number of ranks ({ranks})")
    training = ranks - rollout_ranks
    if isinstance(args, TrainArgs):
        rows = f"--{args.ROWS_FLAG} {args.rows_per_step} must be a multiple of the number of"
        if args.rows_per_step % training:
            raise ValueError(f"{rows} training ranks ({training})")
        shares = training * getattr(args, "minibatches", 1)
        if args.rows_per_step % shares:
            raise ValueError(f"{rows} training ranks times --minibatches ({shares})")
    for flag, count, kind in (
        ("tensor_parallel_size", rollout_ranks or ranks, "generating"),
        ("context_ranks", training, "training"),
        ("shard_ranks", training, "training"),
    ):
        size = getattr(args, flag, None) or 1
        if count % size:
            raise ValueError(f"--{flag} {size} must divide the {count} {kind} ranks")


def flags_of(args: BaseArgs) -> dict[str, Any]:
    """Return the flags by name, in values that YAML has: the content of args.yaml."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(args).items()
    }


def may_change(args: BaseArgs, then: dict[str, Any]) -> set[str]:
    """Return the flags that may differ from `then`, those of the run that is resumed: flags marked
    `MayChange` by the class of `args` or a base, and `max_staleness` if it had no effect then or
    has none now."""
    free = {flag for flag, marks in marks_of(type(args)).items() if MAY_CHANGE in marks}
    has_effect = getattr(args, "rollout_ranks", 0) and then.get("rollout_ranks")
    return free if has_effect else free | {"max_staleness"}


def script_of(args_class: type) -> Path:
    """Return the file of the script that declares these flags."""
    return Path(sys.modules[args_class.__module__].__file__)
