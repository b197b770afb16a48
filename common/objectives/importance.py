"""What makes up for samples of another policy: the engine's differs a little from the trainer's, and is older.

Pure functions of packed streams, aligned with targets. Keyword-only parameters have the names of the flags that set
them.

Shapes: T packed tokens. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): which sequence each is of, 0..N-1.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.config.flags import BaseArgs, NotNegative, Positive
from common.objectives.policy import sequence_mean, sequence_sum

Correction = Literal["none", "token", "sequence"]
CorrectionMode = Literal["truncate", "mask"]


@dataclass
class CorrectionArgs(BaseArgs):
    """Flags of the scripts that weigh samples because the engine, not the trainer, sampled them."""

    correction: Correction = "token"
    """weigh samples by trainer / engine probability, of each token or of the whole completion"""
    correction_mode: CorrectionMode = "truncate"
    """weights outside the bounds are set to the bound, or to 0"""
    correction_low: NotNegative[float] = 0.0
    """lower bound of the weights"""
    correction_high: Positive[float] = 2.0
    """upper bound of the weights"""
    correction_filter: tuple[NotNegative[float], NotNegative[float]] | None = None
    """drop completions whose geometric-mean trainer / engine ratio is outside these two bounds, e.g. 0.5 2"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, (low, high) in (
            ("correction_low and --correction_high", (self.correction_low, self.correction_high)),
            ("correction_filter", self.correction_filter or (0.0, 1.0)),
        ):
            if low >= high:
                raise ValueError(f"--{flag}: the bounds {low:g} and {high:g} cross")
        for flag in ("correction_mode", "correction_low", "correction_high", "correction_filter"):
            self.require_read(flag, self.correction != "none", "--correction is none")


def importance_weights(log_ratio: Tensor, mode: CorrectionMode, low: float, high: float) -> Tensor:
    """Weights without gradient for samples of the engine; `log_ratio` is log(trainer / engine) of tokens or of whole
    completions.

    truncate: clip(ratio, low, high) (truncated importance sampling; IMPALA's rho, arXiv:1802.01561). mask: the ratio
    where it lies in [low, high], else 0; of tokens that is IcePop.
    """
    ratio = torch.exp(log_ratio).detach()
    if mode == "truncate":
        return ratio.clamp(low, high)
    return torch.where((low <= ratio) & (ratio <= high), ratio, 0.0)


def correction_weights(
    log_ratio_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    correction: Correction,
    correction_mode: CorrectionMode,
    correction_low: float,
    correction_high: float,
    correction_filter: tuple[float, float] | None,
) -> Tensor:
    """What each token's loss is multiplied by because the engine, not the trainer, sampled it: [T], no gradient.

    `log_ratio_T` is old_logprobs - rollout_logprobs: of the trainer and of the engine, for the same weights. none:
    ones. token, sequence: `importance_weights` of the token, or of its whole completion. `correction_filter`
    (sequence-masked importance sampling) drops whole completions whose geometric mean of their tokens' ratios is
    outside its two bounds.
    """
    if correction == "none":
        return torch.ones_like(log_ratio_T)
    of_what_T = sequence_sum(log_ratio_T, mask_T, sequence_ids_T) if correction == "sequence" else log_ratio_T
    weights_T = importance_weights(of_what_T, correction_mode, correction_low, correction_high)
    if correction_filter is not None:
        low, high = correction_filter
        mean_ratio_T = sequence_mean(log_ratio_T, mask_T, sequence_ids_T).exp()
        weights_T = weights_T * ((low <= mean_ratio_T) & (mean_ratio_T <= high))
    return weights_T


def off_policy_mask(
    logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    *,
    off_policy_threshold: float | None,
) -> Tensor:
    """Which tokens keep their policy loss, bool [T]: False on every token of a completion with a negative advantage
    that the present policy has moved away from, by more than `off_policy_threshold` nats per token (DeepSeek-V3.2,
    arXiv:2512.02556 Eq. 9): mean_t(rollout_logprobs - logprobs) over its trained tokens. None: all True.

    Both the engine's difference and the updates since the rollout count. No gradient.
    """
    if off_policy_threshold is None:
        return torch.ones_like(mask_T)
    drift_T = sequence_mean(rollout_logprobs_T - logprobs_T, mask_T, sequence_ids_T)
    return ~((advantages_T < 0) & (drift_T > off_policy_threshold))
