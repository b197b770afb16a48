"""Importance ratios of the updated policy, bounded and clipped; importance weights and masks for
samples of the engine, whose policy differs numerically from the trainer's and may be stale.

Shapes: T packed tokens. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): sequence of each
token, 0..N-1."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.objectives.reduction import sequence_mean, sequence_sum

# ---- the updated policy ----

# exp(60) = 1e26: ratios stop growing there and have no gradient beyond; inf times 0 would be NaN
EXPONENT_LIMIT = 60.0


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(min(x, 60)), which is finite and has no gradient beyond the bound."""
    return torch.exp(x.clamp(max=EXPONENT_LIMIT))


def is_clipped(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0
) -> Tensor:
    """Return where the clipped surrogate of PPO has no gradient because the ratio is out of bounds.
    Bool.

    For A > 0 the bound is 1 + high. For A < 0 it is 1 - low and, if positive, `dual`
    (arXiv:1912.09729 Eq. 5)."""
    ratio = bounded_exp(log_ratio)
    is_above = (advantages > 0) & (ratio > 1 + high)
    is_below = (advantages < 0) & (ratio < 1 - low)
    is_above_dual = (advantages < 0) & (ratio > (dual or math.inf))
    return is_above | is_below | is_above_dual


# ---- the engine's policy ----


@dataclass(frozen=True)
class Correction:
    """Form of the importance weights: `--correction` and the flags that begin with this word."""

    level: Literal["none", "token", "sequence"]
    """the ratio of the token, or of its whole completion (sequence); none: all weights are 1"""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: clip the ratio to [low, high] (IMPALA's rho, arXiv:1802.01561); mask: set a ratio
    outside of this interval to 0 (IcePop, at the level of tokens)"""
    low: float = 0.0
    high: float = 2.0
    filter: tuple[float, float] | None = None
    """bounds of a completion's geometric mean of token ratios; completions outside of them get 0"""
    reject: str | None = None
    bound: float | None = None
    """criterion of rejection.py and its bound; tokens or completions beyond it get 0"""
    normalize: bool = False
    """divide the weights by their mean over the global minibatch"""


def importance_weights(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor,
    correction: Correction, mean: float = 1,
) -> Tensor:  # fmt: skip
    """Return the importance weight of each token, pi_old / pi_engine, bounded, over `mean`. [T],
    without gradient. The log-probs are those of the trainer and of the engine that sampled. `mean`
    is that of the weights of the global minibatch (`mean_weight`), with `normalize`."""
    log_ratio_T = old_logprobs_T - rollout_logprobs_T
    at_level_T = log_ratio_T
    if correction.level == "sequence":
        at_level_T = sequence_sum(log_ratio_T, mask_T, sequence_ids_T)
    low = correction.low
    high = correction.high
    ratio_T = torch.exp(at_level_T).detach()
    weights_T = ratio_T.clamp(low, high)
    if correction.mode == "mask":
        weights_T = torch.where((low <= ratio_T) & (ratio_T <= high), ratio_T, 0.0)
    if correction.level == "none":
        weights_T = torch.ones_like(ratio_T)
    if correction.filter is not None:
        least, most = correction.filter
        mean_ratio_T = sequence_mean(log_ratio_T, mask_T, sequence_ids_T).exp()
        weights_T = weights_T * ((least <= mean_ratio_T) & (mean_ratio_T <= most))
    if correction.reject:
        from common.objectives.rejection import is_rejected

        weights_T = weights_T * ~is_rejected(
            old_logprobs_T, rollout_logprobs_T, mask_T, sequence_ids_T, correction
        )
    return weights_T / mean


def off_policy_mask(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    threshold: float,
) -> Tensor:
    """Return which tokens to keep: not those of completions with a negative advantage whose mean
    `log_ratio_T`, log(pi_engine / pi), over trained tokens exceeds `threshold` (DeepSeek-V3.2,
    arXiv:2512.02556 Eq. 9). Bool [T], without gradient."""
    return ~((advantages_T < 0) & (sequence_mean(log_ratio_T, mask_T, sequence_ids_T) > threshold))
