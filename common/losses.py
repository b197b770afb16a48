"""Objectives, each a pure function that reads like its equation. Inputs are float32 packed streams.

Per-token functions return one value per token, not reduced and not masked: the script multiplies by its loss mask and
divides by a count over the whole global batch.

Shapes: T packed tokens.
"""

import torch
from torch import Tensor


def clip_policy_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347 Eq. 7) with separate bounds (DAPO, arXiv:2503.14476 Eq. 8).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = exp(logprobs - old_logprobs). The gradient is zero
    where moving r further in the direction A asks for would leave the bounds.
    """
    ratio_T = torch.exp(logprobs_T - old_logprobs_T)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.min(ratio_T * advantages_T, clipped_T * advantages_T)


def kl_k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's own samples: r - 1 - log r, r = ref / policy.

    The k3 estimator of Schulman's note "Approximating KL divergence", as in GRPO (arXiv:2402.03300 Eq. 4): never
    negative, unbiased as a value. expm1 keeps it accurate where the two nearly agree.
    """
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(max=60)  # exp stays finite, also on tokens that get masked
    return torch.expm1(log_ratio_T) - log_ratio_T


def truncated_importance_weights(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, cap: float) -> Tensor:
    """min(trainer / engine, cap) per token, without gradient: corrects for the engine sampling from slightly other
    probabilities than the trainer computes (truncated importance sampling; IMPALA's rho, arXiv:1802.01561)."""
    return torch.exp(old_logprobs_T - rollout_logprobs_T).clamp(max=cap).detach()
