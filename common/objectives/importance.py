"""Importance weights and masks for off-policy samples.

The engine's policy differs numerically from the trainer's and may be stale. All functions are pure and take packed
streams, aligned with targets. Keyword-only parameters have the names of the flags that set them.

Shapes: T packed tokens. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): sequence of each token, 0..N-1.
"""

from typing import Literal

import torch
from torch import Tensor

from common.objectives.reduction import sequence_mean, sequence_sum

Correction = Literal["none", "token", "sequence"]
CorrectionMode = Literal["truncate", "mask"]


def importance_weights(
    log_ratio_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    level: Correction,
    mode: CorrectionMode,
    low: float,
    high: float,
    keep: tuple[float, float] | None,
) -> Tensor:
    """Return the importance weight of each token, pi_old / pi_engine, bounded. [T], without gradient.

    `log_ratio_T` is log(pi_old / pi_engine) of the trainer and the engine for the same weights. `level`: the ratio of
    the token, or of its whole completion (sequence); none returns ones. `mode`: truncate clips the ratio to [low, high]
    (IMPALA's rho, arXiv:1802.01561); mask sets a ratio outside of this interval to 0 (IcePop, at the level of tokens).
    `keep`: bounds of a completion's geometric mean of token ratios; completions outside of them get 0.
    """
    if level == "none":
        return torch.ones_like(log_ratio_T)
    at_level_T = sequence_sum(log_ratio_T, mask_T, sequence_ids_T) if level == "sequence" else log_ratio_T
    ratio_T = torch.exp(at_level_T).detach()
    weights_T = ratio_T.clamp(low, high)
    if mode == "mask":
        weights_T = torch.where((low <= ratio_T) & (ratio_T <= high), ratio_T, 0.0)
    if keep is not None:
        mean_ratio_T = sequence_mean(log_ratio_T, mask_T, sequence_ids_T).exp()
        weights_T = weights_T * ((keep[0] <= mean_ratio_T) & (mean_ratio_T <= keep[1]))
    return weights_T


def off_policy_mask(
    log_ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, threshold: float
) -> Tensor:
    """Mask completions with a negative advantage whose mean `log_ratio_T`, log(pi_engine / pi), over trained tokens
    exceeds `threshold` (DeepSeek-V3.2, arXiv:2512.02556 Eq. 9). Bool [T], False on masked tokens; without gradient."""
    return ~((advantages_T < 0) & (sequence_mean(log_ratio_T, mask_T, sequence_ids_T) > threshold))
