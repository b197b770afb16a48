"""Objectives of the online scripts, each a pure function that reads like its equation. Inputs are packed streams.

Every function returns one value per element, not reduced and not masked. What is an element is the caller's choice:
tokens ([T]) for most, whole sequences ([N]) for RLOO. `reduction_weights` then says what each token counts.

Shapes: T packed tokens, N sequences.
"""

from typing import Literal

import torch
from torch import Tensor

from common.packing import PackedBatch

# ---- policy ----


def clip_policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347 Eq. 7) with separate bounds (DAPO, arXiv:2503.14476 Eq. 8).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old_logprobs). The gradient is zero where
    moving r further in the direction A asks for would leave the bounds. With `dual_clip` c > 1 the loss of a negative
    advantage is at most c |A| (arXiv:1912.09729 Eq. 5), whatever r is.

    Of log-probs summed over a sequence it is RLOO's loss; of their mean over a sequence, GSPO's (arXiv:2507.18071
    Eq. 5, whose ratio is exp(mean log-ratio)).
    """
    ratio_T = torch.exp(logprobs_T - old_logprobs_T)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    objective_T = torch.min(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip:
        bounded_T = torch.max(objective_T, dual_clip * advantages_T)
        objective_T = torch.where(advantages_T < 0, bounded_T, objective_T)
    return -objective_T


def reinforce_loss(logprobs_T: Tensor, advantages_T: Tensor) -> Tensor:
    """-A logp (Williams 1992): the policy gradient without importance ratio."""
    return -advantages_T * logprobs_T


def cispo_loss(logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, high: float) -> Tensor:
    """-sg(min(r, 1 + high)) A logp (CISPO, arXiv:2506.13585 Eq. 4): weights are clipped, gradients never are."""
    weights_T = torch.exp(logprobs_T - old_logprobs_T).clamp(max=1 + high).detach()
    return weights_T * reinforce_loss(logprobs_T, advantages_T)


def sapo_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, tau_positive: float, tau_negative: float
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A (SAPO, arXiv:2511.20347): a gate that closes gradually as r leaves 1.

    The gradient with respect to r is -A at r = 1 and decays on both sides, faster for the larger temperature: tau is
    `tau_positive` for A > 0 and `tau_negative` otherwise.
    """
    tau_T = torch.where(advantages_T > 0, tau_positive, tau_negative)
    ratio_T = torch.exp(logprobs_T - old_logprobs_T)
    return -4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantages_T


def topr_loss(logprobs_T: Tensor, sequence_log_ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
    """-w A logp (TOPR, arXiv:2503.14286 Eq. 8): w = 1 for A >= 0, and min(r, 1) of the whole completion for A < 0.

    Good completions are imitated however unlikely they have become, bad ones are pushed away only as long as they are
    likely. `sequence_log_ratio_T`: log(policy / old policy) of the completion, on each of its tokens.
    """
    weights_T = torch.where(advantages_T < 0, sequence_log_ratio_T.exp().clamp(max=1), 1.0).detach()
    return weights_T * reinforce_loss(logprobs_T, advantages_T)


# ---- KL to the reference ----

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator = "k3", clamp: float = 0) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's own samples (Schulman, "Approximating KL
    divergence", 2020), with d = log(policy / reference).

    k1: d, unbiased. k2: d^2 / 2, never negative; its gradient is that of the KL (k1's is zero on average). k3:
    exp(-d) - 1 + d, unbiased and never negative, as in GRPO (arXiv:2402.03300 Eq. 4). `clamp` > 0 bounds the
    estimate to [-clamp, clamp]; beyond it there is no gradient.
    """
    log_ratio_T = logprobs_T - ref_logprobs_T
    if estimator == "k1":
        kl_T = log_ratio_T
    elif estimator == "k2":
        kl_T = log_ratio_T.square() / 2
    else:  # exp stays finite, also on tokens that get masked; expm1 is accurate where the two nearly agree
        log_ratio_T = log_ratio_T.clamp(min=-60)
        kl_T = torch.expm1(-log_ratio_T) + log_ratio_T
    return kl_T.clamp(-clamp, clamp) if clamp else kl_T


# ---- value ----


def clip_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2 per token: PPO's value loss, with the trust region
    of the policy's carried over to the values. clip = 0: the plain squared error."""
    loss_T = (values_T - returns_T).square()
    if clip:
        clipped_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
        loss_T = torch.max(loss_T, (clipped_T - returns_T).square())
    return loss_T / 2


# ---- engine against trainer ----


def importance_weights(log_ratio: Tensor, mode: Literal["truncate", "mask"], low: float, high: float) -> Tensor:
    """Weights without gradient for samples of the engine, whose probabilities differ a little from the trainer's;
    `log_ratio` is log(trainer / engine) of tokens or of whole completions.

    truncate: clip(ratio, low, high) (truncated importance sampling; IMPALA's rho, arXiv:1802.01561). mask: the ratio
    where it lies in [low, high], else 0; of tokens that is IcePop.
    """
    ratio = torch.exp(log_ratio).detach()
    if mode == "truncate":
        return ratio.clamp(low, high)
    return torch.where((low <= ratio) & (ratio <= high), ratio, 0.0)


# ---- what a token counts ----

Reduction = Literal["token", "sequence", "sequence_sum", "constant"]


def reduction_weights(mb: PackedBatch, reduction: Reduction, tokens: Tensor, sequences: Tensor, longest: int) -> Tensor:
    """Weights [T] that make sum(weights x loss) the reduction over a global minibatch; 0 on tokens not trained.

    token: mean over its `tokens` (DAPO, arXiv:2503.14476). sequence: mean over its `sequences` of their means (GRPO).
    sequence_sum: mean over its sequences of their sums (REINFORCE). constant: that, divided by `longest`, the most
    tokens a completion may have (Dr. GRPO, arXiv:2503.20783). `sequences` counts those with a trained token.
    """
    tokens, sequences = tokens.clamp(min=1), sequences.clamp(min=1)  # everything may be masked
    if reduction == "token":
        return mb.loss_mask_T / tokens
    if reduction == "sequence":
        lengths_T = mb.sequence_sum_T(torch.ones_like(mb.loss_mask_T, dtype=torch.float64))
        return mb.loss_mask_T / lengths_T.clamp(min=1) / sequences
    return mb.loss_mask_T / sequences / (longest if reduction == "constant" else 1)
