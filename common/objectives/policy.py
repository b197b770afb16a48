"""Objectives of sft.py and the online scripts, each a pure function of tensors and floats that reads like its equation.

A policy loss is `f(log_ratio, advantages, logprobs)` and gives one value per element, not reduced and not masked. What
is an element is the caller's choice: tokens ([T]) or whole completions ([N]). `log_ratio` is log(policy / old policy);
that of a completion may also stand on each of its tokens, by `sequence_sum` or `sequence_mean`. Losses that need no
`logprobs`, or no `log_ratio`, do not read it. `reduction_weights` says what each token counts. Keyword-only parameters
have the names of the flags that set them.

Shapes: T packed tokens, N sequences. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): which sequence, 0..N-1.
"""

import math
from typing import Literal

import torch
from torch import Tensor

EXPONENT_LIMIT = 60.0  # e^60 = 1e26: ratios stop growing there and have no gradient beyond; inf times 0 would be NaN

# ---- sums over a sequence ----


def sequence_sum(x_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Sum over the trained tokens of its sequence, on every token: [T], float64. What the others hold is not read."""
    trained_T = torch.where(mask_T, x_T, 0).double()
    sums_T = torch.zeros_like(trained_T)  # N <= T: room for every sequence, without asking the device for N
    return sums_T.index_add(0, sequence_ids_T, trained_T)[sequence_ids_T]


def sequence_mean(x_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Mean over the trained tokens of its sequence, on every token: [T], float64. 0 without any."""
    lengths_T = sequence_sum(mask_T, mask_T, sequence_ids_T)
    return sequence_sum(x_T, mask_T, sequence_ids_T) / lengths_T.clamp(min=1)


# ---- supervised ----


def nll_loss(logprobs: Tensor) -> Tensor:
    """-logp: maximum likelihood, the cross-entropy of the tokens that are there."""
    return -logprobs


def dft_loss(logprobs: Tensor) -> Tensor:
    """-sg(p) logp (DFT, arXiv:2508.05629), p = exp(logp). Its gradient is that of -p: a token counts the less the more
    unlikely it is, where that of -logp grows as 1/p."""
    return logprobs.exp().detach() * nll_loss(logprobs)


# ---- policy ----


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(max=EXPONENT_LIMIT))


def clip_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Tensor:
    """PPO's clipped surrogate (arXiv:1707.06347 Eq. 7) with separate bounds (DAPO, arXiv:2503.14476 Eq. 8).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_ratio). The gradient is zero where moving r further
    in the direction A asks for would leave the bounds. With `dual_clip` c > 1 the loss of a negative advantage is at
    most c |A| (arXiv:1912.09729 Eq. 5), whatever r is.

    Of log-ratios summed over a completion it is RLOO's loss; of their mean over a completion, GSPO's (arXiv:2507.18071
    Eq. 5).
    """
    ratio = _ratio(log_ratio)
    objective = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        bounded = torch.max(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    return -objective


def clipped(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> Tensor:
    """Where `clip_policy_loss` has no gradient because r has left a bound, that of `dual_clip` included: bool."""
    ratio = _ratio(log_ratio)
    too_high = (advantages > 0) & (ratio > 1 + clip_high)
    too_low = (advantages < 0) & (ratio < 1 - clip_low)
    too_bad = (advantages < 0) & (ratio > (dual_clip or math.inf))
    return too_high | too_low | too_bad


def reinforce_loss(log_ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """-A logp (Williams 1992): the policy gradient without importance ratio."""
    return -advantages * logprobs


def cispo_loss(log_ratio: Tensor, advantages: Tensor, logprobs: Tensor, *, cispo_high: float) -> Tensor:
    """-sg(min(r, 1 + cispo_high)) A logp (CISPO, arXiv:2506.13585 Eq. 4): weights are clipped, gradients never are."""
    weights = _ratio(log_ratio).clamp(max=1 + cispo_high).detach()
    return weights * reinforce_loss(log_ratio, advantages, logprobs)


def sapo_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor | None = None,
    *,
    sapo_tau_positive: float,
    sapo_tau_negative: float,
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A (SAPO, arXiv:2511.20347): a gate that closes gradually as r leaves 1.

    The gradient with respect to r is -A at r = 1 and decays on both sides, faster for the larger temperature: tau is
    `sapo_tau_positive` for A > 0 and `sapo_tau_negative` otherwise.
    """
    tau = torch.where(advantages > 0, sapo_tau_positive, sapo_tau_negative)
    return -4 / tau * torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * advantages


def topr_loss(log_ratio: Tensor, advantages: Tensor, logprobs: Tensor) -> Tensor:
    """-w A logp (TOPR, arXiv:2503.14286 Eq. 8): w = 1 for A >= 0, and min(r, 1) of the whole completion for A < 0.

    Good completions are imitated however unlikely they have become, bad ones are pushed away only as long as they are
    likely. `log_ratio`: that of the completion, on each of its tokens.
    """
    weights = torch.where(advantages < 0, _ratio(log_ratio).clamp(max=1), 1.0).detach()
    return weights * reinforce_loss(log_ratio, advantages, logprobs)


def vespo_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    vespo_k_positive: float = 2.0,
    vespo_lambda_positive: float = 3.0,
    vespo_k_negative: float = 3.0,
    vespo_lambda_negative: float = 2.0,
) -> Tensor:
    """-sg(phi(w)) A logp (VESPO, arXiv:2602.10693), phi(w) = w^k exp(lambda (1 - w)), w = r of the whole completion.

    The weight phi is 1 on-policy, largest at w = k / lambda, and vanishes where w does or grows. k and lambda are the
    positive ones for A >= 0. `log_ratio`: log w, on each token of the completion.
    """

    def log_phi(k: float, lambda_: float) -> Tensor:
        return k * log_ratio + lambda_ * (1 - _ratio(log_ratio))

    positive, negative = (vespo_k_positive, vespo_lambda_positive), (vespo_k_negative, vespo_lambda_negative)
    log_weights = torch.where(advantages < 0, log_phi(*negative), log_phi(*positive)).detach()
    return log_weights.clamp(max=EXPONENT_LIMIT).exp() * reinforce_loss(log_ratio, advantages, logprobs)


# ---- KL to the reference ----

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    old_logprobs_T: Tensor | None = None,
    *,
    kl_estimator: KLEstimator = "k3",
    kl_clamp: float = 0.0,
    unbiased_kl: bool = False,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's own samples (Schulman, "Approximating KL
    divergence", 2020), with d = log(policy / reference), in nats.

    k1: d, unbiased. k2: d^2 / 2, never negative; its gradient is that of the KL (k1's is zero on average). k3:
    exp(-d) - 1 + d, unbiased and never negative, as in GRPO (arXiv:2402.03300 Eq. 4). `kl_clamp` > 0 bounds the
    estimate to [-kl_clamp, kl_clamp]; beyond it there is no gradient.

    The samples are of the old policy, though: `unbiased_kl` multiplies the clamped estimate by r = exp(logprobs -
    old_logprobs), with its gradient (DeepSeek-V3.2, arXiv:2512.02556). In expectation, value and gradient of k1 and k3
    are then those of the KL.
    """
    log_ratio_T = logprobs_T - ref_logprobs_T
    if kl_estimator == "k1":
        kl_T = log_ratio_T
    elif kl_estimator == "k2":
        kl_T = log_ratio_T.square() / 2
    else:  # exp stays finite, also on tokens that get masked; expm1 is accurate where the two nearly agree
        log_ratio_T = log_ratio_T.clamp(min=-EXPONENT_LIMIT)
        kl_T = torch.expm1(-log_ratio_T) + log_ratio_T
    kl_T = kl_T.clamp(-kl_clamp, kl_clamp) if kl_clamp else kl_T
    if unbiased_kl:
        assert old_logprobs_T is not None
        kl_T = _ratio(logprobs_T - old_logprobs_T) * kl_T
    return kl_T


# ---- value ----


def clip_value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, value_clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2 per token: PPO's value loss, with the trust region of the
    policy's carried over to the values. c = `value_clip`; 0: the plain squared error."""
    loss_T = (values_T - returns_T).square()
    if value_clip:
        clipped_T = torch.clamp(values_T, old_values_T - value_clip, old_values_T + value_clip)
        loss_T = torch.max(loss_T, (clipped_T - returns_T).square())
    return loss_T / 2


# ---- what a token counts ----

Reduction = Literal["token", "sequence", "sequence_sum", "constant"]


def reduction_weights(
    mask_T: Tensor, lengths_T: Tensor, tokens: Tensor, sequences: Tensor, *, reduction: Reduction, max_new_tokens: int
) -> Tensor:
    """Weights [T] that make sum(weights x loss) the reduction over a global minibatch; 0 on tokens not trained.

    token: mean over its `tokens` (DAPO, arXiv:2503.14476). sequence: mean over its `sequences` of their means (GRPO).
    sequence_sum: mean over its sequences of their sums (REINFORCE). constant: that, divided by `max_new_tokens`, the
    most tokens a completion may have (Dr. GRPO, arXiv:2503.20783). `sequences` counts those with a trained token;
    `lengths_T` has the trained tokens of each token's sequence, float64.
    """
    tokens, sequences = tokens.clamp(min=1), sequences.clamp(min=1)  # everything may be masked
    if reduction == "token":
        return mask_T / tokens
    if reduction == "sequence":
        return mask_T / lengths_T.clamp(min=1) / sequences
    return mask_T / sequences / (max_new_tokens if reduction == "constant" else 1)


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
