"""KL estimates equal naive scalar code in float64, values and gradients, and exact sums over a
vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import check, rows

from common.objectives.kl import kl_estimate


@given(rows, st.sampled_from(["k1", "k2", "k3"]))
def test_kl_estimates_equal_naive_code(rows, estimator):
    def naive(new, ref, _):
        d = new - ref
        return dict(k1=(d, 1.0), k2=(d * d / 2, d), k3=(math.exp(-d) - 1 + d, 1 - math.exp(-d)))[
            estimator
        ]

    check(lambda new, ref, _: kl_estimate(new, ref, estimator=estimator), naive, rows)


def test_kl_k3_is_accurate_in_float32_where_the_policies_agree():
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 1e-3])
    exact = math.expm1(ref.double().item() - new.double().item()) - (
        ref.double().item() - new.double().item()
    )
    assert abs(kl_estimate(new, ref).item() / exact - 1) < 1e-3


def test_kl_k3_of_a_token_with_vanishing_probability_is_finite_in_float32():
    new = torch.tensor([-500.0], requires_grad=True)
    kl = kl_estimate(new, torch.tensor([-1.0]))
    (kl * 0).sum().backward()  # a masked token
    assert kl.isfinite().all() and new.grad.tolist() == [0.0]


POLICY = torch.tensor([0.5, -0.3, 1.2, 0.0]).double()
REFERENCE = torch.tensor([0.1, 0.4, 0.2, -0.5]).double()


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_k1_and_k3_estimate_the_kl_by_enumeration(estimator, unbiased):
    logp, logq = POLICY.log_softmax(0), REFERENCE.log_softmax(0)
    expectation = (logp.exp() * kl_estimate(logp, logq, estimator=estimator)).sum()
    exact = (logp.exp() * (logp - logq)).sum()
    assert bool((expectation - exact).abs() < 1e-12) == unbiased


@pytest.mark.parametrize(("estimator", "factor"), [("k1", 0.0), ("k2", 1.0)])
def test_expected_gradient_of_k2_is_that_of_the_kl_and_of_k1_is_zero(estimator, factor):
    logits, logq = POLICY.clone().requires_grad_(), REFERENCE.log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    samples = logp.detach().exp() * kl_estimate(logp, logq, estimator=estimator)
    (estimated,) = torch.autograd.grad(samples.sum(), logits)
    torch.testing.assert_close(estimated, factor * exact, rtol=1e-12, atol=1e-12)
