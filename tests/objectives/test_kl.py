"""KL estimates equal naive scalar code in float64, values and gradients."""

import math

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
