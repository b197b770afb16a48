"""Importance ratios of the updated policy, bounded and clipped, and importance weights for the
samples of the engine. The engine's policy differs from the trainer's in rounding, and may be some
steps older.

Shapes: T packed tokens. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): sequence of each
token, 0..N-1."""

import math
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import STRICT, Needs, Positive
from common.objectives.reduction import sequence_sum

# ---- the updated policy ----

# exp(60) = 1e26: ratios stop growing there and have no gradient beyond; inf times 0 would be NaN
EXPONENT_LIMIT = 60.0


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(min(x, 60)), which is finite and has no gradient beyond the bound."""
    return torch.exp(x.clamp(max=EXPONENT_LIMIT))


def is_clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where the clipped surrogate of PPO has no gradient, because the ratio is beyond its
    bound: above 1 + high for A > 0, below 1 - low for A < 0. Bool."""
    ratio = bounded_exp(log_ratio)
    is_above = (advantages > 0) & (ratio > 1 + high)
    is_below = (advantages < 0) & (ratio < 1 - low)
    return is_above | is_below


# ---- the engine's policy ----


Level = Literal["none", "token", "sequence", "token_mask", "sequence_mask"]
MASKS = ("token_mask", "sequence_mask")


class Correction(NamedTuple):
    """How importance weights are computed: `--correction` and `--correction_high`."""

    level: Level
    """the ratio of the token, or of its whole completion (sequence); none: all weights are 1"""
    high: float = 2.0
    """upper bound of a weight (IMPALA's rho, arXiv:1802.01561); a mask makes weights outside of
    [1 / high, high] 0 instead (IcePop, arXiv:2510.18855)"""


CORRECTED = Needs(correction=("token", "sequence", "token_mask", "sequence_mask", None))


@dataclass(config=STRICT)
class CorrectionArgs:
    """Importance weights for samples of the engine"""

    correction: Level | None = None
    """weigh sampled tokens by trainer probability / engine probability (importance weights). token:
    one weight per token; sequence: one per completion; token_mask, sequence_mask: the same, but
    what is out of bounds has no policy gradient; none: off; default: token, or sequence if the loss
    has one ratio per completion"""
    correction_high: Annotated[Positive[float], CORRECTED] = 2.0
    """limit importance weights to this; the lower bound of the masks is its inverse"""

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        if self.correction in MASKS and self.correction_high <= 1:
            problem = f"{self.correction} keeps weights from its inverse to it; give more than 1"
            raise ValueError(f"--correction_high {self.correction_high}: {problem}")
        return self

    def correction_form(self, by_completion: bool = False) -> Correction:
        """Return how importance weights are computed. `by_completion`: the loss has one ratio per
        completion; then a weight per token raises `ValueError`."""
        level = self.correction or ("sequence" if by_completion else "token")
        if by_completion and level in ("token", "token_mask"):
            advice = "sequence_mask" if level in MASKS else "sequence"
            raise ValueError(f"--correction {level}: a completion has one weight; use {advice}")
        return Correction(level, self.correction_high)


def importance_weights(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor,
    correction: Correction,
) -> Tensor:  # fmt: skip
    """Return the importance weight of each token, pi_old / pi_engine, bounded: the trainer's
    probability of the token over that of the engine that sampled it. [T], without gradient."""
    log_ratio_T = (old_logprobs_T - rollout_logprobs_T).detach()
    if correction.level == "none":
        return torch.ones_like(log_ratio_T)
    if correction.level in ("sequence", "sequence_mask"):
        log_ratio_T = sequence_sum(log_ratio_T, mask_T, sequence_ids_T)
    if correction.level in MASKS:
        return log_ratio_T.exp().where(log_ratio_T.abs() <= math.log(correction.high), 0)
    return log_ratio_T.exp().clamp(max=correction.high)
