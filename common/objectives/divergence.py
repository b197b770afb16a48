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


def jsd(logp_CV: Tensor, logq_CV: Tensor, *, b: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return b KL(q || m) + (1 - b) KL(pi || m) with m = b q + (1 - b) pi (arXiv:2306.13649 Eq. 1),
    and (1 - b) pi (log(pi / m) - KL(pi || m)).

    0 < b < 1: as b goes to 0 it approaches b forward_kl, as b goes to 1 (1 - b) reverse_kl.
    """
    logm_CV = mixture(logq_CV, logp_CV, b)
    q_to_m_C = torch.linalg.vecdot(logq_CV.exp(), logq_CV - logm_CV)
    p_to_m_C, gradient_CV = reverse_kl(logp_CV, logm_CV)
    return b * q_to_m_C + (1 - b) * p_to_m_C, (1 - b) * gradient_CV


def mixture(log_a_CV: Tensor, log_b_CV: Tensor, share: float) -> Tensor:
    """Return log(share a + (1 - share) b), for 0 < share < 1."""
    s = torch.tensor(share, dtype=torch.float64)
    return torch.logaddexp(log_a_CV + s.log().item(), log_b_CV + torch.log1p(-s).item())


def skewed_kl(logp_CV: Tensor, logq_CV: Tensor, *, a: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return KL(q || m) with m = a q + (1 - a) pi (arXiv:2402.03898), and
    (1 - a) (pi sum_j w_j - w) with w = q pi / m. As a goes to 0 it approaches forward_kl."""
    logm_CV = mixture(logq_CV, logp_CV, a)
    value_C = torch.linalg.vecdot(logq_CV.exp(), logq_CV - logm_CV)
    w_CV = (logq_CV + logp_CV - logm_CV).exp()
    return value_C, (1 - a) * (logp_CV.exp() * w_CV.sum(-1, keepdim=True) - w_CV)


def skewed_reverse_kl(logp_CV: Tensor, logq_CV: Tensor, *, a: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return KL(pi || m) with m = a pi + (1 - a) q (arXiv:2402.03898), and
    pi (g - sum_j pi_j g_j) with g = log(pi / m) - a pi / m. As a goes to 0 it approaches
    reverse_kl."""
    logm_CV = mixture(logp_CV, logq_CV, a)
    p_CV = logp_CV.exp()
    log_ratio_CV = logp_CV - logm_CV
    slope_CV = log_ratio_CV - a * log_ratio_CV.exp()
    mean_C = torch.linalg.vecdot(p_CV, slope_CV)
    return torch.linalg.vecdot(p_CV, log_ratio_CV), p_CV * (slope_CV - mean_C[:, None])


def adaptive_kl(
    logp_CV: Tensor, logq_CV: Tensor, *, head_mass: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Return w forward_kl + (1 - w) reverse_kl (AKL, arXiv:2404.02657), with a weight w of each
    token that has no gradient: the part of sum_j |q_j - pi_j| that lies in the head. The head has
    the teacher's most likely token and the next ones, up to a probability of `head_mass`."""
    q_CV, order_CV = logq_CV.exp().sort(-1, descending=True)
    gap_CV = (q_CV - logp_CV.exp().gather(-1, order_CV)).abs()
    is_head_CV = q_CV.cumsum(-1) <= head_mass
    is_head_CV[:, 0] = True
    head_C = (gap_CV * is_head_CV).sum(-1)
    w_C = head_C / gap_CV.sum(-1).clamp(min=torch.finfo(gap_CV.dtype).tiny)
    forward_C, forward_CV = forward_kl(logp_CV, logq_CV)
    reverse_C, reverse_CV = reverse_kl(logp_CV, logq_CV)
    return torch.lerp(reverse_C, forward_C, w_C), torch.lerp(reverse_CV, forward_CV, w_C[:, None])


ALL = (reverse_kl, forward_kl, jsd, skewed_kl, skewed_reverse_kl, adaptive_kl)
DIVERGENCES = {divergence.__name__: divergence for divergence in ALL}


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
