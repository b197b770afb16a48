"""Reward shaping: scale and clip of rewards; coefficients of the KL and of the entropy bonus.

Keyword-only parameters have the names of the flags that set them.
"""

import math

from torch import Tensor


class KLCoefficient:
    """Coefficient of the KL, `value`, adapted to keep the KL near `target` nats (Ziegler et al.
    2019, arXiv:1909.08593 Eq. 3-4, with the factor exp(x), not 1 + x, which is positive for any
    horizon). In `horizon` completions it changes by a factor of exp(0.2) at most. A target of 0
    keeps it constant."""

    def __init__(self, beta: float, target: float, horizon: float):
        self.value = beta
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, completions: int) -> None:
        """Adapt the value after a step whose `completions` had this mean `kl`, in nats."""
        if self.target:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= math.exp(error * completions / self.horizon)

    def state_dict(self) -> dict:
        return dict(value=self.value)

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]


class EntropyCoefficient:
    """Coefficient of the entropy bonus, `value`, which acts against an entropy below `target` nats
    per token (arXiv:2505.22312, with the order of its code): after a step below the target `size`
    grows by `step` and is the value; after another one it shrinks, at most to 0, and the value is
    0. A target of 0 keeps the value constant."""

    def __init__(self, coef: float, target: float, step: float):
        self.value = coef
        self.size = coef
        self.target = target
        self.step = step

    def update(self, entropy: float) -> None:
        """Adapt the value after a step with this mean `entropy` of the policy, in nats."""
        if self.target:
            is_low = entropy < self.target
            self.size = max(0.0, self.size + (self.step if is_low else -self.step))
            self.value = self.size if is_low else 0.0

    def state_dict(self) -> dict:
        return dict(value=self.value, size=self.size)

    def load_state_dict(self, state: dict) -> None:
        self.value = state["value"]
        self.size = state["size"]


def shape_rewards(rewards: Tensor, *, reward_scale: float, reward_clip: float) -> Tensor:
    """Scale rewards, then clip them to [-reward_clip, reward_clip]; 0: no clip. Missing rewards
    (NaN) remain NaN."""
    scaled = rewards * reward_scale
    return scaled.clamp(-reward_clip, reward_clip) if reward_clip else scaled
