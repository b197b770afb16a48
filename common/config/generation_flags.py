"""Flags of the evaluation by generation, of scripts that train on given completions."""

from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, MayChange, NotNegative, Positive, Several
from common.config.rules import require_default


@dataclass(config=STRICT)
class GenerateArgs:
    """Evaluation by generation"""

    eval_generate: MayChange[NotNegative[int]] = 0
    """number of held-out prompts that are completed greedily before training and at each
    evaluation, for eval/solved and eval/reward; 0: off"""
    eval_reward: MayChange[Several[str]] = ("exact_match",)
    """rewards of these completions (docs/rewards.md lists all)"""
    eval_new_tokens: MayChange[Positive[int]] = 256
    """maximum length of these completions, in tokens"""

    @model_validator(mode="after")
    def _check_generation(self: Any) -> Any:  # reads flags of `TrainArgs`
        if not self.eval_generate:
            require_default(self, ("eval_reward", "eval_new_tokens"), "with --eval_generate 0")
        elif not self.eval_every:
            raise ValueError(
                f"--eval_generate {self.eval_generate} needs evaluations; set --eval_every above 0"
            )
        elif self.eval_new_tokens >= self.pack_capacity:
            flag = f"--eval_new_tokens {self.eval_new_tokens}"
            raise ValueError(f"{flag} leaves no room for a prompt in {self.pack_flags}; lower it")
        return self
