"""Divergences and their gradients equal those of naive loops over the vocabulary."""

import math
from functools import partial

import pytest
import torch

from common.objectives.divergence import forward_kl, jsd, reverse_kl

EXACT = dict(rtol=1e-9, atol=1e-9)
CHOSEN = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd_0.1": partial(jsd, b=0.1),
    "jsd_0.5": partial(jsd, b=0.5),
    "jsd_0.9": partial(jsd, b=0.9),
}


def kl(a_TV, b_TV):
    """Return KL(a || b) of probabilities, per token of the vocabulary."""
    return sum(
        a_T * (a_T.log() - b_T.log())
        for a_T, b_T in zip(a_TV.unbind(1), b_TV.unbind(1), strict=True)
    )


def naive(name, p_TV, q_TV):
    if name == "reverse_kl":
        return kl(p_TV, q_TV)
    if name == "forward_kl":
        return kl(q_TV, p_TV)
    b = float(name.removeprefix("jsd_"))
    mixed_TV = b * q_TV + (1 - b) * p_TV
    return b * kl(q_TV, mixed_TV) + (1 - b) * kl(p_TV, mixed_TV)


def draw(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def value_and_gradient(divergence, logits_CV, logq_CV):
    """Return the value [C] and its gradient with respect to the student's logits, [C, V]."""
    logits_CV = logits_CV.clone().requires_grad_()
    value_C = divergence(logits_CV.log_softmax(-1), logq_CV)
    return value_C.detach(), torch.autograd.grad(value_C.sum(), logits_CV)[0]


@pytest.mark.parametrize("name", CHOSEN)
def test_values_and_gradients_equal_naive_code(name):
    logits_CV, logq_CV = draw(5, 11), draw(5, 11, seed=4).log_softmax(-1)
    ours = value_and_gradient(CHOSEN[name], logits_CV, logq_CV)
    wanted = value_and_gradient(
        lambda logp_CV, logq_CV: naive(name, logp_CV.exp(), logq_CV.exp()), logits_CV, logq_CV
    )
    torch.testing.assert_close(ours, wanted, **EXACT)


def test_jsd_approaches_the_two_kl_divergences():
    """jsd is b forward_kl as b goes to 0, and (1 - b) reverse_kl as b goes to 1
    (arXiv:2306.13649)."""
    logits_CV, logq_CV = draw(4, 9), draw(4, 9, seed=4).log_softmax(-1)
    for b, other in ((1e-7, forward_kl), (1 - 1e-7, reverse_kl)):
        found = value_and_gradient(partial(jsd, b=b), logits_CV, logq_CV)
        for ours, wanted in zip(found, value_and_gradient(other, logits_CV, logq_CV), strict=True):
            torch.testing.assert_close(ours / 1e-7, wanted, rtol=1e-5, atol=1e-5)


def test_divergence_is_zero_for_equal_and_finite_for_distant_distributions():
    near_CV, far_CV = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1e4, 0.0, -1e4]])
    for divergence in CHOSEN.values():
        for part in value_and_gradient(divergence, near_CV, near_CV.log_softmax(-1)):
            torch.testing.assert_close(part, torch.zeros_like(part), atol=1e-6, rtol=0)
        for p, q in ((near_CV, far_CV), (far_CV, near_CV), (far_CV, far_CV)):
            found = value_and_gradient(divergence, p, q.log_softmax(-1))
            assert all(part.isfinite().all() for part in found)
    assert CHOSEN["jsd_0.5"](near_CV.log_softmax(-1), far_CV.log_softmax(-1)) < math.log(2) + 1e-6


def test_sampled_estimator_is_unbiased():
    """The expected gradient of the clipped loss with advantage log q - log p, over all tokens of a
    small vocabulary, is that of KL(p || q)."""
    generator = torch.Generator().manual_seed(2)
    logits_V = torch.randn(7, dtype=torch.float64, generator=generator).requires_grad_()
    logq_V = torch.randn(7, dtype=torch.float64, generator=generator).log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)
    (wanted,) = torch.autograd.grad(
        (logp_V.exp() * (logp_V - logq_V)).sum(), logits_V, retain_graph=True
    )
    expected = torch.zeros_like(wanted)
    for v in range(7):
        advantage = logq_V[v] - logp_V[v].detach()
        # PPO's loss on policy: the clip is inactive
        loss = -torch.exp(logp_V[v] - logp_V[v].detach()) * advantage
        (slope_V,) = torch.autograd.grad(loss, logits_V, retain_graph=True)
        expected += logp_V[v].exp().detach() * slope_V
    torch.testing.assert_close(expected, wanted, rtol=1e-12, atol=1e-12)
