"""Groups of flags for objectives of completions: importance weights, policy losses and KL."""

from typing import Annotated, Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.flags import STRICT, BelowOne, Needs, NotNegative, Positive
from common.objectives.importance import Correction, Level
from common.objectives.policy import BY_TOKEN

CORRECTED = Needs(correction=("token", "sequence", "token_mask", "sequence_mask", None))


@dataclass(config=STRICT)
class CorrectionArgs:
    """Importance weights for samples of the engine"""

    one_weight_per_completion = False  # no flag: whether a completion always has one weight
    correction: Level | None = None
    """importance weights: trainer probability / engine probability of the sampled tokens. token:
    one weight per token; sequence: one per completion; token_mask, sequence_mask: the same, but
    what is out of bounds has no policy gradient; none: off; default: token, or sequence if the loss
    has one ratio per completion"""
    correction_high: Annotated[Positive[float], CORRECTED] = 2.0
    """upper bound of the importance weights; the lower one of the masks is its inverse"""

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        level = self.correction or ""
        if level.startswith("token") and self.one_weight_per_completion:
            advice = level.replace("token", "sequence")
            raise ValueError(f"--correction {level}: a completion has one weight; use {advice}")
        if level.endswith("mask") and self.correction_high <= 1:
            problem = f"{level} keeps weights from its inverse to it; give more than 1"
            raise ValueError(f"--correction_high {self.correction_high}: {problem}")
        return self

    @property
    def correction_form(self) -> Correction:
        """Form of the importance weights."""
        default = "sequence" if self.one_weight_per_completion else "token"
        return Correction(self.correction or default, self.correction_high)


@dataclass(config=STRICT)
class PolicyLossArgs:
    """Policy loss"""

    loss: Literal["clip", *BY_TOKEN] = "clip"
    """policy loss of a token with advantage A (docs/losses.md). clip: PPO; dppo: bounded
    divergence; cispo: clips the weight of the gradient; sapo: soft clip; reinforce: -A log pi"""
    clip_low: Annotated[BelowOne, Needs(loss="clip")] = 0.2
    """distance from 1 of the lower bound of the importance ratio"""
    clip_high: Annotated[NotNegative[float], Needs(loss="clip")] = 0.2
    """distance from 1 of the upper bound of the importance ratio"""


KL = Needs(beta=True, log_kl=True)


@dataclass(config=STRICT)
class KLEstimateArgs:
    """KL per token"""

    kl_estimator: Annotated[Literal["k1", "k2", "k3"], KL] = "k1"
    """estimator of the KL per token, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3:
    exp(-d) - 1 + d"""


@dataclass(config=STRICT)
class LogKLArgs:
    """KL to the starting model"""

    log_kl: bool = False
    """log the KL to the starting model also with beta 0, at the cost of its memory and of one
    forward pass a step"""
