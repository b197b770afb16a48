"""Flags of each kind of script, as unions of groups: `BaseArgs`, `TrainArgs`, `SamplingArgs`, `OnlineArgs`.

A group (training.py, sampling.py, objectives.py) is a pydantic dataclass without a base and a section of --help. The
types of its flags carry their bounds (flags.py). A script's `Args` inherits what it needs in any order, overrides
defaults and adds its own flags. Rules between flags are validators of their group or union, because pydantic runs those
of all bases; rules of one script are in its `__post_init__`.
"""

from typing import ClassVar, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT
from common.config.sampling import CompletionArgs, EngineArgs, RolloutArgs, ScoringArgs
from common.config.training import (
    CheckpointArgs,
    DataArgs,
    HeldOutArgs,
    LoRAArgs,
    ModelArgs,
    OptimArgs,
    PrefixArgs,
    RunArgs,
)

# Defaults for the built-in models and task, which need other values than real ones (parse.py).
BUILT_IN_MODELS = ("tiny", "tiny-sft")
TINY_TRAINING = dict(lr=3e-3, warmup_steps=10, max_steps=100, eval_every=20, prompt_format="plain")
TINY_GENERATE = dict(eval_generate=256, eval_new_tokens=5)
TINY_ONLINE = dict(lr=4e-4, lr_schedule="linear", max_steps=60, eval_every=10, prompts_per_step=16,
                   samples_per_prompt=16, max_new_tokens=5, prompt_format="plain")  # fmt: skip


@dataclass(config=STRICT)
class BaseArgs(RunArgs, DataArgs, ModelArgs):
    """Flags of every script."""

    TINY_DEFAULTS: ClassVar[dict] = {}
    """defaults for the built-in models and task; for other data, the learning rates only"""
    PRESETS: ClassVar[dict[str, dict]] = {}
    """flags that each value of `--preset` sets"""
    MOVED: ClassVar[dict[str, dict[str, str]]] = {}
    """values of a flag that are scripts of their own, with the command to run in place of each"""


@dataclass(config=STRICT)
class TrainArgs(LoRAArgs, CheckpointArgs, OptimArgs, HeldOutArgs, BaseArgs):
    """Flags of every script that trains."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_TRAINING


@dataclass(config=STRICT)
class SamplingArgs(EngineArgs, ScoringArgs, CompletionArgs, PrefixArgs, BaseArgs):
    """Flags of every script that samples completions."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if ("environment" in self.reward) != (self.environment is not None):
            raise ValueError("--environment and --reward environment need each other; give both or neither")
        if self.max_new_tokens is None:
            self.max_new_tokens = min(256, max(1, self.room // 2))
        if self.max_new_tokens >= self.room:
            flag = f"--max_new_tokens {self.max_new_tokens}"
            raise ValueError(f"{flag} leaves no room for a prompt in {self.room_flags}; raise it")
        return self


@dataclass(config=STRICT)
class OnlineArgs(RolloutArgs, SamplingArgs, TrainArgs):
    """Flags of every script that trains on its own samples."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_ONLINE
    model: str = "tiny-sft"

    @model_validator(mode="after")
    def _check_online(self) -> Self:
        if self.batch_invariant and self.rollout_ranks:  # NCCL may hang: vLLM sets its protocol on rollout ranks only
            raise ValueError("--batch_invariant true needs --rollout_ranks 0")
        return self

    @property
    def updates_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.minibatches * self.epochs_per_rollout
