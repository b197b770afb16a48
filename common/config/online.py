"""Flags of scripts that sample: `SamplingArgs`, and `OnlineArgs` of those that train on their
samples (groups.py)."""

from typing import ClassVar, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT
from common.config.groups import BaseArgs, TrainArgs
from common.config.sampling import MODEL_KINDS, CompletionArgs, EngineArgs, RolloutArgs, ScoringArgs
from common.config.training import EvalSampleArgs, PrefixArgs

# Defaults for the built-in models and task, as in groups.py.
TINY_ONLINE = dict(lr=4e-4, lr_schedule="linear", max_steps=60, eval_every=10, prompts_per_step=16,
                   samples_per_prompt=16, max_new_tokens=5, prompt_format="plain")  # fmt: skip


@dataclass(config=STRICT)
class SamplingArgs(EngineArgs, ScoringArgs, CompletionArgs, PrefixArgs, BaseArgs):
    """Flags of every script that samples completions."""

    truncation = None  # `TruncationArgs` has flags for it
    decodes_greedily = False  # whether each prompt has a greedy completion beside the sampled ones
    PACKS_BRANCHES: ClassVar[bool] = True
    """whether the script can train on the branches of an agent's episode"""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.agent is not None and (self.environment is not None or self.tools):
            raise ValueError("--agent excludes --environment and --tools; give one of them")
        if self.agent is not None and not self.PACKS_BRANCHES:
            raise ValueError("--agent: this script cannot train on the branches of an episode")
        has_reward = "environment" in self.reward
        if self.agent is None and has_reward != (self.environment is not None):
            problem = "--environment and --reward environment need each other"
            raise ValueError(f"{problem}; give both or neither")
        if self.tools or self.agent is not None:
            object.__setattr__(self, "prompt_format", "chat")
        if self.max_new_tokens >= self.pack_capacity:
            flag = f"--max_new_tokens {self.max_new_tokens}"
            raise ValueError(f"{flag} leaves no room for a prompt in {self.pack_flags}")
        ranks = [name for name in self.reward if name.startswith("rank:")]
        if not all(map(str.strip, self.rubric)):
            raise ValueError("--rubric: a criterion is empty")
        if ranks and self.samples_per_prompt + self.decodes_greedily < 2:
            raise ValueError(f"--reward {ranks[0]} needs --samples_per_prompt 2 or more")
        return self

    @property
    def reward_models(self) -> list[str]:
        """Reward models and judges in `--reward`, with their kinds: `model:PATH`."""
        return [name for name in self.reward if name.startswith(MODEL_KINDS)]

    @property
    def has_turns(self) -> bool:
        """Whether a completion is an episode, which may have several turns of the model."""
        return self.environment is not None or self.agent is not None or bool(self.tools)


@dataclass(config=STRICT)
class OnlineArgs(RolloutArgs, SamplingArgs, EvalSampleArgs, TrainArgs):
    """Flags of every script that trains on its own samples."""

    TINY_DEFAULTS: ClassVar[dict] = TINY_ONLINE
    ROWS_FLAG: ClassVar[str] = "prompts_per_step"
    model: str = "tiny-sft"

    @property
    def live_rollout_ranks(self) -> int:
        """Number of ranks of this launch that only generate: none in a dry run."""
        return 0 if self.dry_run else self.rollout_ranks

    @property
    def updates_per_rollout(self) -> int:
        """Number of optimizer steps per rollout."""
        return self.minibatches * self.epochs_per_rollout
