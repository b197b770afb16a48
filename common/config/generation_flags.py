"""Flags of the evaluation by generation, of scripts that train on given completions."""

from typing import Annotated, Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, MayChange, Needs, NotNegative, Positive, Several

GENERATE = Needs(eval_generate=True)


@dataclass(config=STRICT)
class GenerateArgs:
    """Evaluation by generation"""

    eval_generate: Annotated[MayChange[NotNegative[int]], Needs(eval_every=True)] = 0
    """number of held-out prompts that are completed greedily before training and at each
    evaluation, for eval/solved and eval/reward; 0: off"""
    eval_reward: Annotated[MayChange[Several[str]], GENERATE] = ("exact_match",)
    """rewards of these completions (docs/rewards.md lists all)"""
    eval_new_tokens: Annotated[MayChange[Positive[int]], GENERATE] = 256
    """maximum length of these completions, in tokens"""

    @model_validator(mode="after")
    def _check_generation(self: Any) -> Any:  # reads flags of `TrainArgs`
        if self.eval_generate and self.eval_new_tokens >= self.pack_capacity:
            flag = f"--eval_new_tokens {self.eval_new_tokens}"
            raise ValueError(f"{flag} leaves no room for a prompt in {self.pack_flags}; lower it")
        return self
