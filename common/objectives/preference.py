"""Objectives of preference learning, each a pure function that reads like its equation: one value per pair, float64.

Everything is about whole completions: log-probs summed over their tokens (nats). Notation in the docstrings: pc, pr are
the policy's log-probs of chosen and rejected, lc, lr their log-ratios to the reference, nc, nr their lengths in tokens,
s the logistic function, and z = beta (f(lc) - f(lr)) with f the identity unless `f_divergence` says otherwise.

What an objective reads beside the pairs is in its signature: keyword-only, with the names of the flags that set it.

Shapes: N pairs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

FDivergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
EXPONENT_LIMIT = 60.0  # e^60 = 1e26: exponentials stop growing there, and so do their gradients


@dataclass
class Pairs:
    """What the objectives see of N pairs: [N] each, float64. Log-probs are sums over the completion, in nats; the
    reference's are 0 where there is none."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    weights: Tensor  # how much each pair counts: 1, or `wpo_weights`

    @property
    def lc(self) -> Tensor:
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def lr(self) -> Tensor:
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def mean_pc(self) -> Tensor:
        return self.chosen_logps / self.chosen_lengths

    @property
    def mean_pr(self) -> Tensor:
        return self.rejected_logps / self.rejected_lengths

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def f(u: Tensor, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    """Derivative of the divergence's generator at the log-ratio u, up to constants that cancel (arXiv:2309.16240):
    reverse_kl u; forward_kl 1 - e^-u; js log 2 + log s(u); alpha (e^((a-1)u) - 1) / (a - 1)."""
    match f_divergence:
        case "js":
            return math.log(2) + logsigmoid(u)
        case "forward_kl":
            return -torch.expm1((-u).clamp(max=EXPONENT_LIMIT))
        case "alpha" if f_alpha != 1:
            a = f_alpha - 1
            return torch.expm1((a * u).clamp(max=EXPONENT_LIMIT)) / a
    return u


def _z(p: Pairs, beta: float, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    return beta * (f(p.lc, f_divergence, f_alpha) - f(p.lr, f_divergence, f_alpha))


# ---- against a reference ----


def sigmoid(p: Pairs, *, beta: float, label_smoothing: float, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    """DPO (arXiv:2305.18290 Eq. 7), with label smoothing e cDPO: -(1 - e) log s(z) - e log s(-z)."""
    z, e = _z(p, beta, f_divergence, f_alpha), label_smoothing
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def robust(p: Pairs, *, beta: float, label_smoothing: float, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    """Robust DPO (arXiv:2403.00409): (-(1 - e) log s(z) + e log s(-z)) / (1 - 2e), unbiased under flipped labels."""
    z, e = _z(p, beta, f_divergence, f_alpha), label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def hinge(p: Pairs, *, beta: float, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    """SLiC (arXiv:2305.10425, in the form of RSO, arXiv:2309.06657): max(0, 1 - z)."""
    return torch.relu(1 - _z(p, beta, f_divergence, f_alpha))


def ipo(p: Pairs, *, beta: float, length_normalize: bool) -> Tensor:
    """IPO (arXiv:2310.12036): (lc - lr - 1 / (2 beta))^2; by default of log-ratios per token, lc/nc - lr/nr."""
    nc, nr = (p.chosen_lengths, p.rejected_lengths) if length_normalize else (1, 1)
    return (p.lc / nc - p.lr / nr - 1 / (2 * beta)).square()


def sigmoid_norm(p: Pairs, *, beta: float) -> Tensor:
    """Length-normalised DPO (Tulu 3, arXiv:2411.15124): -log s(beta (lc/nc - lr/nr))."""
    return -logsigmoid(beta * (p.lc / p.chosen_lengths - p.lr / p.rejected_lengths))


def exo_pair(p: Pairs, *, beta: float, label_smoothing: float, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    """EXO (arXiv:2402.00856): KL(model's preference || smoothed label),
    s(z) (log s(z) - log(1 - e)) + s(-z) (log s(-z) - log e)."""
    z, e = _z(p, beta, f_divergence, f_alpha), label_smoothing
    return z.sigmoid() * (logsigmoid(z) - math.log1p(-e)) + (-z).sigmoid() * (logsigmoid(-z) - math.log(e))


def nca_pair(p: Pairs, *, beta: float) -> Tensor:
    """NCA (arXiv:2402.05369): -log s(beta lc) - 1/2 log s(-beta lc) - 1/2 log s(-beta lr)."""
    rc, rr = beta * p.lc, beta * p.lr
    return -logsigmoid(rc) - 0.5 * logsigmoid(-rc) - 0.5 * logsigmoid(-rr)


def bco_pair(p: Pairs, *, beta: float) -> Tensor:
    """BCO (arXiv:2404.04656) without its reward shift: -log s(beta lc) - log s(-beta lr)."""
    return -logsigmoid(beta * p.lc) - logsigmoid(-beta * p.lr)


def sppo_hard(p: Pairs, *, beta: float) -> Tensor:
    """SPPO (arXiv:2405.00675) with win probabilities 1 and 0: (lc - 1/(2 beta))^2 + (lr + 1/(2 beta))^2."""
    half = 1 / (2 * beta)
    return (p.lc - half).square() + (p.lr + half).square()


def apo_zero(p: Pairs, *, beta: float) -> Tensor:
    """APO-zero (arXiv:2408.06266): 1 - s(beta lc) + s(beta lr); chosen up, rejected down."""
    return (-beta * p.lc).sigmoid() + (beta * p.lr).sigmoid()


def apo_down(p: Pairs, *, beta: float) -> Tensor:
    """APO-down (arXiv:2408.06266): s(beta lc) + 1 - s(beta (lc - lr)); both down, rejected further."""
    return (beta * p.lc).sigmoid() + (-beta * (p.lc - p.lr)).sigmoid()


def aot(p: Pairs, *, beta: float) -> Tensor:
    """Alignment by optimal transport, paired (arXiv:2406.05882): -log s(beta (g_(i) - h_(i))), g_(i) the i-th smallest
    gap pc - pr of the policy and h_(i) the reference's. Of a whole global batch; in the order of the policy's pairs."""
    gaps, order = (p.chosen_logps - p.rejected_logps).sort()
    ref_gaps, _ = (p.ref_chosen_logps - p.ref_rejected_logps).sort()
    return -logsigmoid(beta * (gaps - ref_gaps))[order.argsort()]


def aot_unpaired(p: Pairs, *, beta: float) -> Tensor:
    """AOT, unpaired (arXiv:2406.05882): -log s(beta (lc_(i) - lr_(i))), the i-th smallest chosen against the i-th
    smallest rejected log-ratio. Of a whole global batch; in the order of the chosen."""
    lc, order = p.lc.sort()
    lr, _ = p.lr.sort()
    return -logsigmoid(beta * (lc - lr))[order.argsort()]


def discopop(p: Pairs, *, beta: float, discopop_tau: float, f_divergence: FDivergence, f_alpha: float) -> Tensor:
    """DiscoPOP (arXiv:2406.08414): (1 - m) (-log s(z)) + m e^-z, m = s(z / tau), the product taken in the log."""
    z, tau = _z(p, beta, f_divergence, f_alpha), discopop_tau
    return -(-z / tau).sigmoid() * logsigmoid(z) + torch.exp(logsigmoid(z / tau) - z)


# ---- without a reference ----


def simpo(p: Pairs, *, beta: float, simpo_gamma: float) -> Tensor:
    """SimPO (arXiv:2405.14734 Eq. 6): -log s(beta (pc/nc - pr/nr) - gamma)."""
    return -logsigmoid(beta * (p.mean_pc - p.mean_pr) - simpo_gamma)


def orpo(p: Pairs, *, beta: float) -> Tensor:
    """ORPO (arXiv:2403.07691 Eq. 6-7): -pc/nc - beta log s(log odds(chosen) / odds(rejected)), with odds = P / (1 - P)
    and log P = p/n. P stays 1e-9 below 1, where the odds would be infinite."""

    def log_odds(mean_p: Tensor) -> Tensor:
        mean_p = mean_p.clamp(max=-1e-9)
        return mean_p - torch.log(-torch.expm1(mean_p))

    return -p.mean_pc - beta * logsigmoid(log_odds(p.mean_pc) - log_odds(p.mean_pr))


def cpo(p: Pairs, *, beta: float) -> Tensor:
    """CPO (arXiv:2401.08417): -log s(beta (pc - pr)) - pc/nc."""
    return -logsigmoid(beta * (p.chosen_logps - p.rejected_logps)) - p.mean_pc


# ---- from the names to the loss ----

REFERENCED = (sigmoid, robust, hinge, ipo, sigmoid_norm, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down,
              aot, aot_unpaired, discopop)  # fmt: skip
LOSSES: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in (*REFERENCED, simpo, orpo, cpo)}
REFERENCE_FREE = {"simpo", "orpo", "cpo"}
OVER_BATCH = {"aot", "aot_unpaired"}  # sort: they need the whole global batch at once
PER_TOKEN = {"ipo", "sigmoid_norm", "simpo", "orpo"}  # their implicit reward is per token


def preference_losses(
    pairs: Pairs, objectives: dict[str, Callable[[Pairs], Tensor]], weights: Sequence[float] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """`(loss, parts)`, [N] each, not reduced: the objectives by name, and their sum with `weights`, one for each (as in
    MPO, arXiv:2411.10442; default: all 1), times the weight of each pair."""
    parts = {name: objective(pairs) for name, objective in objectives.items()}
    weights = weights or [1.0] * len(parts)
    return pairs.weights * sum(weight * part for weight, part in zip(weights, parts.values(), strict=True)), parts


def rewards_per_token(name: str, length_normalize: bool) -> bool:
    """Whether the implicit reward of this objective is per token."""
    return name in PER_TOKEN and (name != "ipo" or length_normalize)


def implicit_rewards(pairs: Pairs, *, per_token: bool, referenced: bool, beta: float) -> tuple[Tensor, Tensor]:
    """What an objective orders completions by, chosen and rejected, [N] each, without gradient: beta times the
    log-ratio to the reference (the log-prob, where it is not `referenced`), `per_token` or summed."""
    chosen, rejected = (pairs.lc, pairs.lr) if referenced else (pairs.chosen_logps, pairs.rejected_logps)
    nc, nr = (pairs.chosen_lengths, pairs.rejected_lengths) if per_token else (1, 1)
    return beta * (chosen / nc).detach(), beta * (rejected / nr).detach()


# ---- single completions, and weights of pairs ----


def kto(
    log_ratios_N: Tensor,
    desirable_N: Tensor,
    baseline: Tensor | float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """KTO (arXiv:2402.01306) of single completions: w_d (1 - s(beta (l - z0))) for a desirable one and
    w_u (1 - s(beta (z0 - l))) for an undesirable one, [N].

    `baseline` is z0 >= 0, an estimate of KL(policy || reference) over the global batch, without gradient; w_d, w_u are
    `desirable_weight` and `undesirable_weight`.
    """
    desirable_N = desirable_N.to(log_ratios_N.dtype)  # 1 or 0
    sign_N = 2 * desirable_N - 1
    weight_N = desirable_weight * desirable_N + undesirable_weight * (1 - desirable_N)
    return weight_N * (-sign_N * beta * (log_ratios_N - baseline)).sigmoid()


def wpo_weights(mean_adjusted_logps: Tensor) -> Tensor:
    """WPO (arXiv:2406.11827): how likely the policy itself is to have written the completions, at most 1.

    `mean_adjusted_logps` [N] is, of a completion or added up over a pair, the mean over tokens of
    log p(token) - log sum_v p(v)^2. The result has no gradient.
    """
    return mean_adjusted_logps.detach().clamp(max=0).exp()
