"""Policy losses: functions from `PolicyInputs` to `PolicyLoss`, in the table `POLICY_LOSSES`.

A is the advantage. rho = pi / pi_old is the importance ratio of a token, and rho_i that of its
whole completion, the product over its trained tokens. A number of a completion is repeated on each
of its tokens. Constants that a paper fixes are literals in its function.

Shapes: T packed tokens."""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import STRICT, BelowOne, Needs, NotNegative
from common.objectives.importance import bounded_exp, is_clipped
from common.objectives.reduction import sequence_mean, sequence_sum


class PolicyInputs(NamedTuple):
    """What a policy loss reads: [T] each, and the bounds for losses that clip."""

    logprobs_T: Tensor
    """log pi, with its gradient"""
    old_logprobs_T: Tensor
    A_T: Tensor
    mask_T: Tensor
    """trained tokens"""
    sequence_ids_T: Tensor
    """number of each token's completion"""
    clip_low: float = 0.2
    clip_high: float = 0.2

    @property
    def log_rho_T(self) -> Tensor:
        return self.logprobs_T - self.old_logprobs_T


class PolicyLoss(NamedTuple):
    loss_T: Tensor
    """loss of each token, to be minimised"""
    ratio_T: Tensor
    """importance ratio, of the token or of its completion"""
    stopped_T: Tensor
    """bool: no gradient, because a ratio or a divergence is beyond its bound"""


def reinforce(x: PolicyInputs) -> PolicyLoss:
    """-A log pi (Williams 1992). Unbiased only for the first update of a rollout."""
    return weighted(x, torch.ones_like(x.A_T), x.log_rho_T)


def gspo(x: PolicyInputs) -> PolicyLoss:
    """arXiv:2507.18071 Eq. 5 and 7: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), where
    s = rho_i^(1/n) is the geometric mean of the ratios of the n tokens of the completion."""
    log_s_T = sequence_mean(x.log_rho_T, x.mask_T, x.sequence_ids_T)
    s_T = bounded_exp(log_s_T)
    loss_T = -torch.min(s_T * x.A_T, s_T.clamp(1 - x.clip_low, 1 + x.clip_high) * x.A_T)
    return PolicyLoss(loss_T, s_T, is_clipped(log_s_T, x.A_T, x.clip_low, x.clip_high))


def gmpo(x: PolicyInputs) -> PolicyLoss:
    """arXiv:2507.20673: -s A, where s is the geometric mean of token ratios, each clipped to
    [exp(-clip_low), exp(clip_high)] in the direction of A. A clipped token has no gradient."""
    log_rho_T = x.log_rho_T
    clipped_T = torch.where(
        x.A_T < 0, log_rho_T.clamp(min=-x.clip_low), log_rho_T.clamp(max=x.clip_high)
    )
    s_T = bounded_exp(sequence_mean(clipped_T, x.mask_T, x.sequence_ids_T))
    return PolicyLoss(-s_T * x.A_T, s_T, (clipped_T != log_rho_T) & (x.A_T != 0))


def cispo(x: PolicyInputs) -> PolicyLoss:
    """arXiv:2506.13585 Eq. 4: -min(rho, 5) A log pi, without gradient through the weight min(rho,
    5). Tokens beyond the bound keep a gradient, of bounded weight; PPO would drop it."""
    return weighted(x, bounded_exp(x.log_rho_T).clamp(max=5), x.log_rho_T)


def dppo(x: PolicyInputs) -> PolicyLoss:
    """arXiv:2602.04879: -min(rho, 10) A log pi, without gradient through the weight; 0 where the
    token's probability has moved by more than 0.15 (total variation) in the direction of A."""
    distance_T = (x.logprobs_T.exp() - x.old_logprobs_T.exp()).abs()
    stopped_T = (distance_T > 0.15) & (x.log_rho_T * x.A_T > 0)
    weights_T = bounded_exp(x.log_rho_T).clamp(max=10)  # as in the code of the authors
    return weighted(x, weights_T * ~stopped_T, x.log_rho_T)._replace(stopped_T=stopped_T)


def sapo(x: PolicyInputs) -> PolicyLoss:
    """arXiv:2511.20347: -4 / tau sigma(tau (rho - 1)) A, a gate that closes gradually as rho leaves
    1; tau = 1 for A > 0, else 1.05."""
    rho_T = bounded_exp(x.log_rho_T)
    tau_T = torch.where(x.A_T > 0, 1.0, 1.05)
    loss_T = -4 / tau_T * torch.sigmoid(tau_T * (rho_T - 1)) * x.A_T
    return PolicyLoss(loss_T, rho_T, torch.zeros_like(x.mask_T))


def topr(x: PolicyInputs) -> PolicyLoss:
    """arXiv:2503.14286 Eq. 8: -A log pi, for A < 0 times min(rho_i, 1) without gradient. The ratio
    limits the push away from bad completions; that of good ones is ignored."""
    log_rho_T = sequence_sum(x.log_rho_T, x.mask_T, x.sequence_ids_T)
    weights_T = torch.where(x.A_T < 0, bounded_exp(log_rho_T).clamp(max=1), 1.0)
    return weighted(x, weights_T, log_rho_T)


def weighted(x: PolicyInputs, weights_T: Tensor, log_ratio_T: Tensor) -> PolicyLoss:
    """Return -w A log pi, without gradient through the weights w."""
    loss_T = weights_T.detach() * (-x.A_T * x.logprobs_T)
    return PolicyLoss(loss_T, bounded_exp(log_ratio_T), torch.zeros_like(x.mask_T))


Table = dict[str, Callable[[PolicyInputs], PolicyLoss]]
BY_TOKEN: Table = dict(dppo=dppo, cispo=cispo, sapo=sapo, reinforce=reinforce)
BY_COMPLETION: Table = dict(gspo=gspo, gmpo=gmpo, topr=topr)  # one advantage per completion
POLICY_LOSSES = BY_TOKEN | BY_COMPLETION


@dataclass(config=STRICT)
class PolicyLossArgs:
    """Policy loss"""

    loss: Literal["clip", *BY_TOKEN] = "clip"
    """minimise this policy loss of a token with advantage A (docs/losses.md). clip: PPO; dppo:
    bounded divergence; cispo: clips the weight of the gradient; sapo: soft clip; reinforce: -A log
    pi"""
    clip_low: Annotated[BelowOne, Needs(loss="clip")] = 0.2
    """clip the importance ratio below 1 - clip_low"""
    clip_high: Annotated[NotNegative[float], Needs(loss="clip")] = 0.2
    """clip the importance ratio above 1 + clip_high"""
