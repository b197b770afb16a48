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


def test_divergence_is_zero_for_equal_and_finite_for_distant_distributions():
    near_CV, far_CV = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[1e4, 0.0, -1e4]])
    for divergence in CHOSEN.values():
        for part in value_and_gradient(divergence, near_CV, near_CV.log_softmax(-1)):
            torch.testing.assert_close(part, torch.zeros_like(part), atol=1e-6, rtol=0)
        for p, q in ((near_CV, far_CV), (far_CV, near_CV), (far_CV, far_CV)):
            found = value_and_gradient(divergence, p, q.log_softmax(-1))
            assert all(part.isfinite().all() for part in found)
    assert CHOSEN["jsd_0.5"](near_CV.log_softmax(-1), far_CV.log_softmax(-1)) < math.log(2) + 1e-6
