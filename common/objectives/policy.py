"""Parts of policy-gradient objectives that several scripts share: bounded exponentials, clipping, KL estimates.

Shapes: T packed tokens, N sequences.
"""

import math
from typing import Literal

import torch
from torch import Tensor

EXPONENT_LIMIT = 60.0  # e^60 = 1e26: ratios stop growing there and have no gradient beyond; inf times 0 would be NaN


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(min(x, 60)): finite, and without gradient beyond the bound. inf times an advantage of 0 is NaN."""
    return torch.exp(x.clamp(max=EXPONENT_LIMIT))


def is_clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0) -> Tensor:
    """Return where the clipped surrogate of PPO has no gradient because the ratio has left a bound. Bool.

    With A > 0 the bound is 1 + high. With A < 0 it is 1 - low, and `dual` if that is positive (arXiv:1912.09729 Eq. 5).
    """
    ratio = bounded_exp(log_ratio)
    too_high = (advantages > 0) & (ratio > 1 + high)
    too_low = (advantages < 0) & (ratio < 1 - low)
    return too_high | too_low | (advantages < 0) & (ratio > (dual or math.inf))


# ---- KL to the reference ----

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator = "k3", clamp: float = 0.0
) -> Tensor:
    """Estimate KL(policy || reference) on each token from the policy's own samples (Schulman, "Approximating KL
    divergence", 2020), in nats, with d = log(policy / reference):

    k1: d, unbiased; the expected gradient of its mean is zero. k2: d^2 / 2, biased; its gradient is that of the KL. k3:
    exp(-d) - 1 + d, unbiased and never negative (GRPO, arXiv:2402.03300 Eq. 4). A positive `clamp` bounds the estimate
    to [-clamp, clamp]; beyond the bound there is no gradient.
    """
    d_T = logprobs_T - ref_logprobs_T
    match estimator:
        case "k1":
            kl_T = d_T
        case "k2":
            kl_T = d_T.square() / 2
        case "k3":  # exp stays finite, also on tokens that get masked; expm1 is accurate where the two nearly agree
            d_T = d_T.clamp(min=-EXPONENT_LIMIT)
            kl_T = torch.expm1(-d_T) + d_T
    return kl_T.clamp(-clamp, clamp) if clamp else kl_T


# ---- experts ----


def expert_balance(router_logits: tuple[Tensor, ...], lengths_N: Tensor, top_k: int) -> Tensor:
    """How unevenly each sequence's tokens are spread over the experts: [N], float32. 1 where they are even, more where
    they are not: number of experts / `top_k` where all choose the same and are sure of it. Mean over layers, each of
    which has `router_logits` [T, experts]. `lengths_N`: tokens of each sequence.

    sum_i f_i P_i of the sequence-wise balance loss (arXiv:2412.19437 Eq. 17-20): f_i is how often expert i is among the
    `top_k` chosen over how often it would be by even choice, P_i the mean of its probability, which the gradient goes
    through.
    """
    balance_N = torch.zeros(len(lengths_N), device=lengths_N.device)
    sequence_ids_T = torch.arange(len(lengths_N), device=lengths_N.device).repeat_interleave(lengths_N)
    for logits_TE in router_logits:
        probs_TE = logits_TE.float().softmax(-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter(-1, probs_TE.topk(top_k).indices, 1.0)
        sums_NE = probs_TE.new_zeros(len(lengths_N), probs_TE.shape[-1])
        f_NE = sums_NE.index_add(0, sequence_ids_T, chosen_TE) / lengths_N[:, None] * probs_TE.shape[-1] / top_k
        P_NE = sums_NE.index_add(0, sequence_ids_T, probs_TE) / lengths_N[:, None]
        balance_N = balance_N + (f_NE * P_NE).sum(-1)
    return balance_N / len(router_logits)
