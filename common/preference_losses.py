"""Objectives of preference learning, each a pure function that reads like its equation: one value per pair, float64.

Everything is about whole completions: log-probs summed over their tokens (nats). Notation in the docstrings: pc, pr are
the policy's log-probs of chosen and rejected, lc, lr their log-ratios to the reference, nc, nr their lengths in tokens,
s the logistic function, and z = beta (f(lc) - f(lr)) with f the identity unless `--f_divergence` says otherwise.

Shapes: N pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config import RunArgs

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


@dataclass
class PreferenceArgs(RunArgs):
    """Flags of every script that learns from pairs."""

    loss: tuple[str, ...] = ("sigmoid",)
    """objectives (docs/dpo.md has the table); several are added up"""
    loss_weights: tuple[float, ...] = ()
    """weight of each objective; default: all 1"""
    beta: float = 0.1
    """scale of the implicit rewards: how strongly the policy is held to the reference"""
    label_smoothing: float = 0.0
    """probability that a preference is the wrong way round (sigmoid, robust, exo_pair)"""
    length_normalize: bool = True
    """ipo compares log-ratios per token; false: summed, as in the paper"""
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    """what holds the policy to the reference (sigmoid, robust, hinge, exo_pair, discopop)"""
    f_alpha: float = 0.5
    """order of the alpha divergence: 1 is reverse_kl, 0 is forward_kl"""
    simpo_gamma: float = 0.5
    """margin that simpo asks for, in units of its reward"""
    discopop_tau: float = 0.05
    """temperature at which discopop goes from the logistic to the exponential loss"""
    sft_weight: float = 0.0
    """weight of the chosen completion's negative log-likelihood, added to the objective (RPO)"""
    sft_length_normalize: bool = True
    """that likelihood is per token; false: summed over the completion"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("beta", "discopop_tau")
        self.require_finite("beta", "simpo_gamma", "f_alpha", "sft_weight")
        known = [*LOSSES, "kto"]
        for name in self.loss:
            if name not in known:
                raise ValueError(f"--loss {name}: unknown; there are {', '.join(known)}")
        names = " ".join(self.loss)
        if not self.loss or len(set(self.loss)) != len(self.loss):
            raise ValueError(f"--loss needs at least one name, and each once; here: {names or None}")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            raise ValueError(f"--loss_weights has {len(self.loss_weights)} values for {len(self.loss)} losses")
        for weight in (*self.loss_weights, self.sft_weight):
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError("--loss_weights and --sft_weight must be finite and not negative")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"--label_smoothing {self.label_smoothing} must be in [0, 0.5)")
        if "exo_pair" in self.loss and not self.label_smoothing:
            raise ValueError("--loss exo_pair needs --label_smoothing above 0 (its authors take 0.001)")
        read = dict(
            label_smoothing=SMOOTHED & set(self.loss), f_divergence=DIVERGENT & set(self.loss),
            f_alpha=self.f_divergence == "alpha", length_normalize="ipo" in self.loss,
            simpo_gamma="simpo" in self.loss, discopop_tau="discopop" in self.loss,
            sft_length_normalize=self.sft_weight,
        )  # fmt: skip
        for field in fields(self):
            if field.name in read and not read[field.name] and (value := getattr(self, field.name)) != field.default:
                raise ValueError(f"--{field.name} {value} would not be read: --loss {names}")
        if self.discopop_tau > 1:
            raise ValueError(f"--discopop_tau {self.discopop_tau} must be at most 1: the loss would have no bound")


def f(u: Tensor, args: PreferenceArgs) -> Tensor:
    """Derivative of the divergence's generator at the log-ratio u, up to constants that cancel (arXiv:2309.16240):
    reverse_kl u; forward_kl 1 - e^-u; js log 2 + log s(u); alpha (e^((a-1)u) - 1) / (a - 1)."""
    match args.f_divergence:
        case "js":
            return math.log(2) + logsigmoid(u)
        case "forward_kl":
            return -torch.expm1((-u).clamp(max=EXPONENT_LIMIT))
        case "alpha" if args.f_alpha != 1:
            a = args.f_alpha - 1
            return torch.expm1((a * u).clamp(max=EXPONENT_LIMIT)) / a
    return u


def _z(p: Pairs, args: PreferenceArgs) -> Tensor:
    return args.beta * (f(p.lc, args) - f(p.lr, args))


# ---- against a reference ----


def sigmoid(p: Pairs, args: PreferenceArgs) -> Tensor:
    """DPO (arXiv:2305.18290 Eq. 7), with label smoothing e cDPO: -(1 - e) log s(z) - e log s(-z)."""
    z, e = _z(p, args), args.label_smoothing
    return -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)


def robust(p: Pairs, args: PreferenceArgs) -> Tensor:
    """Robust DPO (arXiv:2403.00409): (-(1 - e) log s(z) + e log s(-z)) / (1 - 2e), unbiased under flipped labels."""
    z, e = _z(p, args), args.label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def hinge(p: Pairs, args: PreferenceArgs) -> Tensor:
    """SLiC (arXiv:2305.10425, in the form of RSO, arXiv:2309.06657): max(0, 1 - z)."""
    return torch.relu(1 - _z(p, args))


def ipo(p: Pairs, args: PreferenceArgs) -> Tensor:
    """IPO (arXiv:2310.12036): (lc - lr - 1 / (2 beta))^2; by default of log-ratios per token, lc/nc - lr/nr."""
    nc, nr = (p.chosen_lengths, p.rejected_lengths) if args.length_normalize else (1, 1)
    return (p.lc / nc - p.lr / nr - 1 / (2 * args.beta)).square()


def sigmoid_norm(p: Pairs, args: PreferenceArgs) -> Tensor:
    """Length-normalised DPO (Tulu 3, arXiv:2411.15124): -log s(beta (lc/nc - lr/nr))."""
    return -logsigmoid(args.beta * (p.lc / p.chosen_lengths - p.lr / p.rejected_lengths))


def exo_pair(p: Pairs, args: PreferenceArgs) -> Tensor:
    """EXO (arXiv:2402.00856): KL(model's preference || smoothed label),
    s(z) (log s(z) - log(1 - e)) + s(-z) (log s(-z) - log e)."""
    z, e = _z(p, args), args.label_smoothing
    return z.sigmoid() * (logsigmoid(z) - math.log1p(-e)) + (-z).sigmoid() * (logsigmoid(-z) - math.log(e))


def nca_pair(p: Pairs, args: PreferenceArgs) -> Tensor:
    """NCA (arXiv:2402.05369): -log s(beta lc) - 1/2 log s(-beta lc) - 1/2 log s(-beta lr)."""
    rc, rr = args.beta * p.lc, args.beta * p.lr
    return -logsigmoid(rc) - 0.5 * logsigmoid(-rc) - 0.5 * logsigmoid(-rr)


def bco_pair(p: Pairs, args: PreferenceArgs) -> Tensor:
    """BCO (arXiv:2404.04656) without its reward shift: -log s(beta lc) - log s(-beta lr)."""
    return -logsigmoid(args.beta * p.lc) - logsigmoid(-args.beta * p.lr)


def sppo_hard(p: Pairs, args: PreferenceArgs) -> Tensor:
    """SPPO (arXiv:2405.00675) with win probabilities 1 and 0: (lc - 1/(2 beta))^2 + (lr + 1/(2 beta))^2."""
    half = 1 / (2 * args.beta)
    return (p.lc - half).square() + (p.lr + half).square()


def apo_zero(p: Pairs, args: PreferenceArgs) -> Tensor:
    """APO-zero (arXiv:2408.06266): 1 - s(beta lc) + s(beta lr); chosen up, rejected down."""
    return (-args.beta * p.lc).sigmoid() + (args.beta * p.lr).sigmoid()


def apo_down(p: Pairs, args: PreferenceArgs) -> Tensor:
    """APO-down (arXiv:2408.06266): s(beta lc) + 1 - s(beta (lc - lr)); both down, rejected further."""
    return (args.beta * p.lc).sigmoid() + (-args.beta * (p.lc - p.lr)).sigmoid()


def aot(p: Pairs, args: PreferenceArgs) -> Tensor:
    """Alignment by optimal transport, paired (arXiv:2406.05882): -log s(beta (g_(i) - h_(i))), g_(i) the i-th smallest
    gap pc - pr of the policy and h_(i) the reference's. Of a whole global batch; in the order of the policy's pairs."""
    gaps, order = (p.chosen_logps - p.rejected_logps).sort()
    ref_gaps, _ = (p.ref_chosen_logps - p.ref_rejected_logps).sort()
    return -logsigmoid(args.beta * (gaps - ref_gaps))[order.argsort()]


def aot_unpaired(p: Pairs, args: PreferenceArgs) -> Tensor:
    """AOT, unpaired (arXiv:2406.05882): -log s(beta (lc_(i) - lr_(i))), the i-th smallest chosen against the i-th
    smallest rejected log-ratio. Of a whole global batch; in the order of the chosen."""
    lc, order = p.lc.sort()
    lr, _ = p.lr.sort()
    return -logsigmoid(args.beta * (lc - lr))[order.argsort()]


def discopop(p: Pairs, args: PreferenceArgs) -> Tensor:
    """DiscoPOP (arXiv:2406.08414): (1 - m) (-log s(z)) + m e^-z, m = s(z / tau), the product taken in the log."""
    z, tau = _z(p, args), args.discopop_tau
    return -(-z / tau).sigmoid() * logsigmoid(z) + torch.exp(logsigmoid(z / tau) - z)


# ---- without a reference ----


def simpo(p: Pairs, args: PreferenceArgs) -> Tensor:
    """SimPO (arXiv:2405.14734 Eq. 6): -log s(beta (pc/nc - pr/nr) - gamma)."""
    return -logsigmoid(args.beta * (p.mean_pc - p.mean_pr) - args.simpo_gamma)


def orpo(p: Pairs, args: PreferenceArgs) -> Tensor:
    """ORPO (arXiv:2403.07691 Eq. 6-7): -pc/nc - beta log s(log odds(chosen) / odds(rejected)), with odds = P / (1 - P)
    and log P = p/n. P stays 1e-9 below 1, where the odds would be infinite."""

    def log_odds(mean_p: Tensor) -> Tensor:
        mean_p = mean_p.clamp(max=-1e-9)
        return mean_p - torch.log(-torch.expm1(mean_p))

    return -p.mean_pc - args.beta * logsigmoid(log_odds(p.mean_pc) - log_odds(p.mean_pr))


def cpo(p: Pairs, args: PreferenceArgs) -> Tensor:
    """CPO (arXiv:2401.08417): -log s(beta (pc - pr)) - pc/nc."""
    return -logsigmoid(args.beta * (p.chosen_logps - p.rejected_logps)) - p.mean_pc


# ---- from the names to the loss ----

REFERENCED = (sigmoid, robust, hinge, ipo, sigmoid_norm, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down,
              aot, aot_unpaired, discopop)  # fmt: skip
LOSSES: dict[str, Callable[[Pairs, PreferenceArgs], Tensor]] = {
    function.__name__: function for function in (*REFERENCED, simpo, orpo, cpo)
}
REFERENCE_FREE = {"simpo", "orpo", "cpo"}
SMOOTHED = {"sigmoid", "robust", "exo_pair"}
DIVERGENT = {"sigmoid", "robust", "hinge", "exo_pair", "discopop"}  # built on z
OVER_BATCH = {"aot", "aot_unpaired"}  # sort: they need the whole global batch at once
PER_TOKEN = {"ipo", "sigmoid_norm", "simpo", "orpo"}  # their implicit reward is per token


def preference_losses(pairs: Pairs, args: PreferenceArgs) -> tuple[Tensor, dict[str, Tensor]]:
    """`(loss, parts)`, [N] each, not reduced: the objectives of `--loss` by name, and their sum with `--loss_weights`
    (as in MPO, arXiv:2411.10442) and with the weight of each pair."""
    parts = {name: LOSSES[name](pairs, args) for name in args.loss}
    weights = args.loss_weights or (1.0,) * len(parts)
    return pairs.weights * sum(weight * part for weight, part in zip(weights, parts.values(), strict=True)), parts


def implicit_rewards(pairs: Pairs, args: PreferenceArgs) -> tuple[Tensor, Tensor]:
    """What the first objective of `--loss` orders completions by, chosen and rejected, [N] each, without gradient:
    beta times the log-ratio to the reference (or the log-prob, without one), per token where the objective is."""
    name = args.loss[0]
    per_token = name in PER_TOKEN and (name != "ipo" or args.length_normalize)
    chosen, rejected = (pairs.chosen_logps, pairs.rejected_logps) if name in REFERENCE_FREE else (pairs.lc, pairs.lr)
    nc, nr = (pairs.chosen_lengths, pairs.rejected_lengths) if per_token else (1, 1)
    return args.beta * (chosen / nc).detach(), args.beta * (rejected / nr).detach()


def kto(
    log_ratios_N: Tensor, desirable_N: Tensor, baseline: Tensor | float, beta: float, weights: tuple[float, float]
) -> Tensor:
    """KTO (arXiv:2402.01306) of single completions: w_d (1 - s(beta (l - z0))) for a desirable one and
    w_u (1 - s(beta (z0 - l))) for an undesirable one, [N].

    `baseline` is z0 >= 0, an estimate of KL(policy || reference) over the global batch, without gradient; `weights` are
    (w_d, w_u).
    """
    desirable_N = desirable_N.to(log_ratios_N.dtype)  # 1 or 0
    sign_N, weight_N = 2 * desirable_N - 1, weights[0] * desirable_N + weights[1] * (1 - desirable_N)
    return weight_N * (-sign_N * beta * (log_ratios_N - baseline)).sigmoid()


def wpo_weights(mean_adjusted_logps: Tensor) -> Tensor:
    """WPO (arXiv:2406.11827): how likely the policy itself is to have written the completions, at most 1.

    `mean_adjusted_logps` [N] is, of a completion or added up over a pair, the mean over tokens of
    log p(token) - log sum_v p(v)^2. The result has no gradient.
    """
    return mean_adjusted_logps.detach().clamp(max=0).exp()
