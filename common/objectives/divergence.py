"""Divergences of a student's next-token distribution pi from its teacher's q, each with its
gradient.

A divergence takes log-probs [C, V] and returns its value [C] in nats, and the gradient of the value
with respect to the student's logits, [C, V]: pi (g - sum_j pi_j g_j), where g = d value / d pi. In
code, p is pi.

Both distributions may be coarsened to K tokens and one more for all other tokens. The divergence is
then a lower bound of the full one (data processing inequality), and does not depend on the
distribution over the other tokens.

Shapes: C tokens, V vocabulary, K tokens that are kept, S = K + 1, or V if all tokens are kept.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def reverse_kl(logp_CV: Tensor, logq_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(pi || q) = sum_j pi_j log(pi_j / q_j), and pi (log(pi / q) - KL)."""
    p_CV = logp_CV.exp()
    log_ratio_CV = logp_CV - logq_CV
    value_C = torch.linalg.vecdot(p_CV, log_ratio_CV)
    return value_C, p_CV * (log_ratio_CV - value_C[:, None])


def forward_kl(logp_CV: Tensor, logq_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(q || pi) = sum_j q_j log(q_j / pi_j), and pi - q."""
    q_CV = logq_CV.exp()
    return torch.linalg.vecdot(q_CV, logq_CV - logp_CV), logp_CV.exp() - q_CV


def jsd(logp_CV: Tensor, logq_CV: Tensor, *, jsd_beta: float) -> tuple[Tensor, Tensor]:
    """Return b KL(q || m) + (1 - b) KL(pi || m) with m = b q + (1 - b) pi (arXiv:2306.13649 Eq. 1),
    and (1 - b) pi (log(pi / m) - KL(pi || m)).

    0 < b < 1: as b goes to 0 it approaches b forward_kl, as b goes to 1 (1 - b) reverse_kl.
    """
    b = torch.tensor(jsd_beta, dtype=torch.float64)
    logm_CV = torch.logaddexp(logq_CV + b.log().item(), logp_CV + torch.log1p(-b).item())
    q_to_m_C = torch.linalg.vecdot(logq_CV.exp(), logq_CV - logm_CV)
    p_to_m_C, gradient_CV = reverse_kl(logp_CV, logm_CV)
    return jsd_beta * q_to_m_C + (1 - jsd_beta) * p_to_m_C, (1 - jsd_beta) * gradient_CV


DIVERGENCES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}


def coarsen(logp_CV: Tensor, tokens_CK: Tensor) -> Tensor:
    """Return the log-probs of K tokens, followed by that of all other tokens together, if there are
    any: [C, S]."""
    kept_CK = logp_CV.gather(1, tokens_CK)
    if tokens_CK.shape[1] == logp_CV.shape[1]:
        return kept_CK
    # 1 - sum p would cancel
    rest_C1 = logp_CV.scatter(1, tokens_CK, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([kept_CK, rest_C1], 1)


def spread_gradient(
    gradient_CS: Tensor, logp_CV: Tensor, logp_CS: Tensor, tokens_CK: Tensor
) -> Tensor:
    """Return the gradient with respect to all logits, [C, V], from the gradient with respect to the
    coarsened ones: each of the other tokens gets a share in proportion to pi."""
    K = tokens_CK.shape[1]
    share_CV = (logp_CV - logp_CS[:, -1:]).exp()
    return (share_CV * gradient_CS[:, -1:]).scatter(1, tokens_CK, gradient_CS[:, :K])
