"""Divergences between a student's next-token distribution pi and its teacher's q.

A divergence takes log-probs [C, V] and returns its value [C] in nats. In code, p is pi.

Both distributions may be coarsened: K tokens are kept, and all other tokens count as one. The
divergence is then a lower bound of the full one (data processing inequality), and does not depend
on how the rest is distributed.

Shapes: C tokens, V vocabulary, K tokens that are kept, S = K + 1, or V if all tokens are kept."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from common.config.flags import STRICT, Needs, NotNegative

Divergence = Callable[[Tensor, Tensor], Tensor]


def reverse_kl(logp_CV: Tensor, logq_CV: Tensor) -> Tensor:
    """Return KL(pi || q) = sum_j pi_j log(pi_j / q_j)."""
    return torch.linalg.vecdot(logp_CV.exp(), logp_CV - logq_CV)


def forward_kl(logp_CV: Tensor, logq_CV: Tensor) -> Tensor:
    """Return KL(q || pi) = sum_j q_j log(q_j / pi_j)."""
    return torch.linalg.vecdot(logq_CV.exp(), logq_CV - logp_CV)


def jsd(logp_CV: Tensor, logq_CV: Tensor, *, b: float = 0.5) -> Tensor:
    """Return b KL(q || m) + (1 - b) KL(pi || m) with m = b q + (1 - b) pi (arXiv:2306.13649 Eq. 1).

    0 < b < 1. As b goes to 0, this approaches b forward_kl; as b goes to 1, (1 - b) reverse_kl."""
    logm_CV = mixture(logq_CV, logp_CV, b)
    return b * reverse_kl(logq_CV, logm_CV) + (1 - b) * reverse_kl(logp_CV, logm_CV)


def mixture(log_a_CV: Tensor, log_b_CV: Tensor, weight: float) -> Tensor:
    """Return log(w a + (1 - w) b), for a weight 0 < w < 1."""
    w = torch.tensor(weight, dtype=torch.float64)
    return torch.logaddexp(log_a_CV + w.log().item(), log_b_CV + torch.log1p(-w).item())


ALL = (reverse_kl, forward_kl, jsd)
DIVERGENCES = {divergence.__name__: divergence for divergence in ALL}


def coarsen(logp_CV: Tensor, tokens_CK: Tensor) -> Tensor:
    """Return the log-probs of K tokens and, if there are others, the log-prob of all others
    together. [C, S] with S = K + 1, or K without others."""
    kept_CK = logp_CV.gather(1, tokens_CK)
    if tokens_CK.shape[1] == logp_CV.shape[1]:
        return kept_CK
    # 1 - sum p would cancel
    rest_C1 = logp_CV.scatter(1, tokens_CK, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([kept_CK, rest_C1], 1)


FULL = Needs(estimator="full")


@dataclass(config=STRICT)
class DivergenceArgs:
    """Divergence from the teacher"""

    divergence: Annotated[Literal[tuple(DIVERGENCES)], FULL] = "reverse_kl"
    """minimise this divergence of student pi from teacher q. reverse_kl: KL(pi || q); forward_kl:
    KL(q || pi); jsd: of both to their mixture"""
    top_k: Annotated[NotNegative[int], FULL] = 0
    """compare this many of the teacher's most likely tokens, and all others as one token: a lower
    bound of the divergence; 0: all tokens"""
