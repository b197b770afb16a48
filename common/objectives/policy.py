"""Shared parts of policy-gradient objectives: bounded exponentials, clipping, KL estimates, expert load balancing.

Shapes: T packed tokens, N sequences.
"""

import math
from typing import Literal

import torch
from torch import Tensor

EXPONENT_LIMIT = 60.0  # exp(60) = 1e26: ratios stop growing there and have no gradient beyond; inf times 0 would be NaN


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(min(x, 60)), which is finite and has no gradient beyond the bound."""
    return torch.exp(x.clamp(max=EXPONENT_LIMIT))


def is_clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0) -> Tensor:
    """Return where the clipped surrogate of PPO has no gradient because the ratio is out of bounds. Bool.

    For A > 0 the bound is 1 + high. For A < 0 it is 1 - low and, if positive, `dual` (arXiv:1912.09729 Eq. 5).
    """
    ratio = bounded_exp(log_ratio)
    too_high = (advantages > 0) & (ratio > 1 + high)
    too_low = (advantages < 0) & (ratio < 1 - low)
    return too_high | too_low | (advantages < 0) & (ratio > (dual or math.inf))


# ---- KL to the reference ----

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator = "k3", clamp: float = 0) -> Tensor:
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
        case "k3":  # exp stays finite, also on masked tokens; expm1 is accurate for small differences
            d_T = d_T.clamp(min=-EXPONENT_LIMIT)
            kl_T = torch.expm1(-d_T) + d_T
    return kl_T.clamp(-clamp, clamp) if clamp else kl_T


# ---- experts ----


def expert_balance(router_logits: tuple[Tensor, ...], lengths_N: Tensor, top_k: int) -> Tensor:
    """Return the load-balancing loss of each sequence, the mean over layers of sum_j load_j prob_j (arXiv:2412.19437
    Eq. 17-20). It is 1 for a uniform load, and experts / `top_k` if all tokens choose the same experts with certainty.

    load_j is the fraction of tokens that choose expert j, divided by the uniform fraction top_k / experts. prob_j is
    the mean probability of expert j and carries the gradient. `router_logits`: [T, experts] of each layer; `lengths_N`:
    tokens of each sequence. Shape [N], float32.
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
