"""The preference losses besides DPO, which dpo.py and online_dpo.py write out themselves. Each
gives one value per pair, in float64.

Log-probs are sums over the tokens of a completion, in nats. Notation: lc, lr are the log-ratios of
chosen and rejected to the reference, pc, pr the policy's log-probs, nc, nr the lengths in tokens,
sigma the logistic function, and z = beta (f(lc) - f(lr)), where f (`f_slope`) depends on
`f_divergence` and is the identity by default.

`READS` names the flags of each objective.

Shapes: W pairs."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import pydantic
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import logsigmoid

from common.config.flags import STRICT, Needs, NotNegative, Positive, Several
from common.objectives.importance import EXPONENT_LIMIT

FDivergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
SIMPO_GAMMA = 0.5  # margin by which the chosen reward should exceed the rejected one


@dataclass
class Pairs:
    """Inputs of the objectives for W pairs, [W] each, float64. Log-probs are sums over the
    completion, in nats. Without a reference model its log-probs are 0."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor

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


def f_slope(u: Tensor, f_divergence: FDivergence) -> Tensor:
    """Return f(u) for the log-ratio u, up to constants that cancel: the derivative of the
    divergence's generator (arXiv:2309.16240). reverse_kl: u; forward_kl: 1 - exp(-u); js: log 2 +
    log sigma(u); alpha: (exp(a u) - 1) / a with a = -1/2."""
    match f_divergence:
        case "js":
            return math.log(2) + logsigmoid(u)
        case "forward_kl":
            return -torch.expm1((-u).clamp(max=EXPONENT_LIMIT))
        case "alpha":
            return -2 * torch.expm1((-u / 2).clamp(max=EXPONENT_LIMIT))
        case "reverse_kl":
            return u


# Flags of each objective, beside beta.
READS: dict[str, tuple[str, ...]] = {
    "sigmoid": ("f_divergence", "label_smoothing"),
    "robust": ("f_divergence", "label_smoothing"),
    "hinge": ("f_divergence",),
    "ipo": (),
    "sigmoid_norm": (),
    "exo_pair": ("f_divergence", "label_smoothing"),
    "nca_pair": (),
    "bco_pair": (),
    "sppo_hard": (),
    "apo_zero": (),
    "apo_down": (),
    "discopop": ("f_divergence",),
    "simpo": (),
    "orpo": (),
    "cpo": (),
}
REFERENCE_FREE = {"simpo", "orpo", "cpo"}
REFERENCED = tuple(name for name in READS if name not in REFERENCE_FREE)
PER_TOKEN = {"ipo", "sigmoid_norm", "simpo", "orpo"}  # implicit reward per token


def preference_loss(
    name: str, p: Pairs, *, beta: float, label_smoothing: float, f_divergence: FDivergence
) -> Tensor:
    """Return the objective `name` of each pair, [W], float64. DPO's own, `sigmoid`, is in
    dpo.py."""
    z = beta * (f_slope(p.lc, f_divergence) - f_slope(p.lr, f_divergence))
    rc = beta * p.lc
    rr = beta * p.lr
    e = label_smoothing
    match name:
        case "robust":
            # robust DPO (arXiv:2403.00409): unbiased if labels are flipped with probability e
            return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)
        case "hinge":  # SLiC (arXiv:2305.10425, in the form of RSO, arXiv:2309.06657)
            return torch.relu(1 - z)
        case "ipo":  # arXiv:2310.12036, with log-ratios per token; the paper has sums
            gap = p.lc / p.chosen_lengths - p.lr / p.rejected_lengths
            return (gap - 1 / (2 * beta)).square()
        case "sigmoid_norm":  # length-normalised DPO (Tulu 3, arXiv:2411.15124)
            return -logsigmoid(beta * (p.lc / p.chosen_lengths - p.lr / p.rejected_lengths))
        case "exo_pair":  # EXO (arXiv:2402.00856): KL(model's preference || smoothed label)
            chosen = z.sigmoid() * (logsigmoid(z) - math.log1p(-e))
            rejected = (-z).sigmoid() * (logsigmoid(-z) - math.log(e))
            return chosen + rejected
        case "nca_pair":  # NCA (arXiv:2402.05369)
            return -logsigmoid(rc) - 0.5 * logsigmoid(-rc) - 0.5 * logsigmoid(-rr)
        case "bco_pair":  # BCO (arXiv:2404.04656) without its reward shift
            return -logsigmoid(rc) - logsigmoid(-rr)
        case "sppo_hard":  # SPPO (arXiv:2405.00675) with win probabilities 1 and 0
            return (p.lc - 1 / (2 * beta)).square() + (p.lr + 1 / (2 * beta)).square()
        case "apo_zero":  # arXiv:2408.06266: 1 - sigma(rc) + sigma(rr); chosen up, rejected down
            return (-rc).sigmoid() + rr.sigmoid()
        case "apo_down":
            # arXiv:2408.06266: sigma(rc) + 1 - sigma(rc - rr); both down, rejected further
            return rc.sigmoid() + (-beta * (p.lc - p.lr)).sigmoid()
        case "discopop":
            # arXiv:2406.08414: -sigma(-z/tau) log sigma(z) + sigma(z/tau) exp(-z), the second
            # product in the log
            tau = 0.05
            return -(-z / tau).sigmoid() * logsigmoid(z) + torch.exp(logsigmoid(z / tau) - z)
        case "simpo":  # arXiv:2405.14734 Eq. 6
            return -logsigmoid(beta * (p.mean_pc - p.mean_pr) - SIMPO_GAMMA)
        case "orpo":  # arXiv:2403.07691 Eq. 6-7
            return -p.mean_pc - beta * logsigmoid(_log_odds(p.mean_pc) - _log_odds(p.mean_pr))
        case "cpo":  # arXiv:2401.08417
            return -logsigmoid(beta * (p.chosen_logps - p.rejected_logps)) - p.mean_pc
    raise ValueError(name)


def _log_odds(mean_p: Tensor) -> Tensor:
    """Return log P / (1 - P) with log P = mean_p. P is kept 1e-9 below 1, where odds are
    infinite."""
    mean_p = mean_p.clamp(max=-1e-9)
    return mean_p - torch.log(-torch.expm1(mean_p))


def implicit_rewards(name: str, pairs: Pairs, beta: float) -> tuple[Tensor, Tensor]:
    """Return the implicit rewards of chosen and rejected under the objective `name`: beta times the
    log-ratio to the reference, or beta times the log-prob for objectives without a reference;
    divided by the length if the objective is per token. [W] each, without gradient."""
    without = name in REFERENCE_FREE
    chosen = pairs.chosen_logps if without else pairs.lc
    rejected = pairs.rejected_logps if without else pairs.lr
    if name in PER_TOKEN:
        chosen = chosen / pairs.chosen_lengths
        rejected = rejected / pairs.rejected_lengths
    return beta * chosen.detach(), beta * rejected.detach()


def needed_by_loss(flag: str) -> Needs:
    """Return the condition that a flag is read by one of the losses."""
    return Needs(loss=tuple(name for name, flags in READS.items() if flag in flags))


@pydantic.dataclasses.dataclass(config=STRICT)
class PreferenceArgs:
    """Preference losses"""

    loss: Several[Literal[tuple(READS)]] = ("sigmoid",)
    """add up these losses on pairs (equations: docs/dpo.md). sigmoid: DPO; robust: DPO for noisy
    labels; hinge: SLiC; ipo: squared distance to a margin; sigmoid_norm: DPO per token; exo_pair:
    KL to smoothed labels; nca_pair, bco_pair: each side against zero; sppo_hard: each side to a
    target; apo_zero: chosen up, rejected down; apo_down: both down; discopop: logistic and
    exponential. Without a reference: simpo: margin per token; orpo: odds ratio; cpo: DPO and
    likelihood"""
    loss_weights: Several[NotNegative[float]] = ()
    """multiply each loss by its weight; default: all 1"""
    beta: Positive[float] = 0.1
    """scale the implicit rewards by this: larger values keep the policy closer to the reference"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), needed_by_loss("label_smoothing")] = 0.0
    """assume that chosen and rejected are swapped with this probability"""
    f_divergence: Annotated[FDivergence, needed_by_loss("f_divergence")] = "reverse_kl"
    """keep the policy close to the reference by this divergence (js: Jensen-Shannon; alpha: of
    order 1/2, between reverse_kl and forward_kl)"""
    sft_weight: NotNegative[float] = 0.0
    """add the chosen completion's negative log-likelihood per token to the loss with this weight
    (RPO)"""

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Flags that `preference.preference_loss` reads."""
        return dict(
            beta=self.beta, label_smoothing=self.label_smoothing, f_divergence=self.f_divergence
        )

    @model_validator(mode="after")
    def _check_preference(self) -> Self:
        names = f"--loss {' '.join(self.loss)}"
        if not self.loss or len({*self.loss}) < len(self.loss):
            raise ValueError(f"{names}: name at least one loss, each of them once")
        if self.loss_weights and len(self.loss_weights) != len(self.loss):
            counts = f"{len(self.loss_weights)} values for {len(self.loss)} losses"
            raise ValueError(f"--loss_weights has {counts}")
        if "exo_pair" in self.loss and not self.label_smoothing:
            advice = "needs --label_smoothing above 0 (its authors take 0.001)"
            raise ValueError(f"--loss exo_pair {advice}")
        return self
