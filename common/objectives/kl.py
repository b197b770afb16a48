"""Estimators of the KL to the reference, from samples of the policy.

Shapes: T packed tokens."""

from typing import Annotated, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import STRICT, Needs
from common.objectives.importance import EXPONENT_LIMIT

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: KLEstimator = "k3"
) -> Tensor:
    """Estimate KL(policy || reference) on each token from the policy's own samples (Schulman,
    "Approximating KL divergence", 2020), in nats, with d = log(policy / reference):

    k1: d, unbiased; the expected gradient of its mean is zero. k2: d^2 / 2, biased; its gradient is
    the KL's. k3: exp(-d) - 1 + d, unbiased and never negative (GRPO, arXiv:2402.03300 Eq.
    4)."""
    d_T = logprobs_T - ref_logprobs_T
    match estimator:
        case "k1":
            return d_T
        case "k2":
            return d_T.square() / 2
        case "k3":
            # exp stays finite, also on masked tokens; expm1 is accurate for small differences
            d_T = d_T.clamp(min=-EXPONENT_LIMIT)
            return torch.expm1(-d_T) + d_T
    raise ValueError(estimator)


KL = Needs(beta=True, log_kl=True)


@dataclass(config=STRICT)
class KLEstimateArgs:
    """KL per token"""

    kl_estimator: Annotated[KLEstimator, KL] = "k1"
    """estimate the KL per token, with d = log(policy / reference). k1: d; k2: d^2 / 2; k3: exp(-d)
    - 1 + d"""


@dataclass(config=STRICT)
class LogKLArgs:
    """KL to the starting model"""

    log_kl: bool = False
    """log the KL to the starting model also with beta 0, at the cost of its memory and of one
    forward pass a step"""
