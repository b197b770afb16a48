"""Reward shaping: scale and clip of rewards, the penalty of truncated completions, and the coefficient of the KL.

Functions are elementwise. Keyword-only parameters have the names of the flags that set them.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from common.config.flags import BaseArgs, NotNegative, Positive


@dataclass
class RewardArgs(BaseArgs):
    """Flags of the scripts that shape the reward and take the KL to the starting model from it."""

    beta: NotNegative[float] = 0.0
    """weight of the KL penalty to the starting model; 0 never loads it"""
    kl_target: NotNegative[float] = 0.0
    """adapt beta so that the logged KL stays near this many nats (per completion in rloo.py and ppo.py, per token in
    reinforce.py); 0: beta stays as it is"""
    kl_horizon: Positive[int] = 10_000
    """with --kl_target: in this many completions beta grows or shrinks by a fifth at most (arXiv:1909.08593)"""
    reward_scale: Positive[float] = 1.0
    """rewards are multiplied by this"""
    reward_clip: NotNegative[float] = 0.0
    """scaled rewards are clipped to [-reward_clip, reward_clip]; 0: off"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target and not self.beta:
            raise ValueError("--kl_target adapts --beta: start it above 0")
        self.require_read("kl_horizon", self.kl_target > 0, "--kl_target is 0")


class KLCoefficient:
    """Weight of the KL, `value`, constant or adapted to keep the KL near `target` nats (Ziegler et al. 2019,
    arXiv:1909.08593 Eq. 3-4, with e^x for their factor 1 + x, so that it stays positive for any horizon). It changes by
    a fifth at most in `horizon` completions. A target of 0 keeps it constant."""

    def __init__(self, beta: float, target: float, horizon: float):
        self.value, self.target, self.horizon = beta, target, horizon

    def update(self, kl: float, completions: int) -> None:
        """Adapt the value after a step whose `completions` had this mean `kl`, in nats."""
        if self.target:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= math.exp(error * completions / self.horizon)

    def state_dict(self) -> dict:
        return dict(value=self.value)

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


def shape_rewards(rewards: Tensor, *, reward_scale: float, reward_clip: float) -> Tensor:
    """Scale rewards, then clip them to [-reward_clip, reward_clip]; 0: no clip. Missing rewards (NaN) stay missing."""
    scaled = rewards * reward_scale
    return scaled.clamp(-reward_clip, reward_clip) if reward_clip else scaled
