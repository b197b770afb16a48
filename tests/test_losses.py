"""Objectives equal naive scalar code in float64, values and gradients; and the traps they must avoid."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from common.losses import clip_policy_loss, importance_weights, kl_estimate

floats = st.floats(-5, 5, allow_nan=False, width=32)
rows = st.lists(st.tuples(st.floats(-8, -1e-3), st.floats(-8, -1e-3), floats), min_size=1, max_size=8)


def columns(rows):
    return (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))


@given(rows)
def test_clip_policy_loss_value_and_gradient(rows):
    new, old, advantage = columns(rows)
    new.requires_grad_()
    loss = clip_policy_loss(new, old, advantage, 0.2, 0.28)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    for i, (n, o, a) in enumerate(rows):
        r = math.exp(n - o)
        assert math.isclose(loss[i].item(), -min(r * a, min(max(r, 0.8), 1.28) * a), rel_tol=1e-9, abs_tol=1e-12)
        clipped = (r > 1.28 and a > 0) or (r < 0.8 and a < 0)
        assert math.isclose(grad[i].item(), 0.0 if clipped else -r * a, rel_tol=1e-9, abs_tol=1e-12)


def test_clip_bounds_are_asymmetric_and_one_sided():
    ratio = torch.tensor([1.29, 1.27, 0.79, 0.81, 1.29, 0.79], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    new = ratio.log().requires_grad_()
    clip_policy_loss(new, torch.zeros(6, dtype=torch.float64), advantage, 0.2, 0.28).sum().backward()
    assert (new.grad == 0).tolist() == [True, False, True, False, False, False]


def test_on_policy_gradient_is_reinforce():
    logprobs = torch.randn(5, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(5, dtype=torch.float64)
    clip_policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.28).sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@given(rows)
def test_kl_k3_value_gradient_and_sign(rows):
    new, ref, _ = columns(rows)
    new.requires_grad_()
    kl = kl_estimate(new, ref)
    (grad,) = torch.autograd.grad(kl.sum(), new)
    assert (kl >= 0).all()
    for i, (n, r, _) in enumerate(rows):
        assert math.isclose(kl[i].item(), math.exp(r - n) - 1 - (r - n), rel_tol=1e-7, abs_tol=1e-9)
        assert math.isclose(grad[i].item(), 1 - math.exp(r - n), rel_tol=1e-9, abs_tol=1e-9)


def test_kl_k3_is_accurate_in_float32_where_the_policies_agree():
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 1e-3])
    exact = math.expm1(ref.double().item() - new.double().item()) - (ref.double().item() - new.double().item())
    assert abs(kl_estimate(new, ref).item() / exact - 1) < 1e-3


def test_kl_k3_estimates_the_kl_by_enumeration():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.25, 0.25]).double()
    expectation = (p * kl_estimate(p.log(), q.log())).sum()  # samples from p, weighted by their probability
    torch.testing.assert_close(expectation, (p * (p / q).log()).sum())


def test_importance_weights_are_truncated_or_masked_and_without_gradient():
    ratio = torch.tensor([1.0, 7.0, 0.3]).requires_grad_()
    truncated, masked = (importance_weights(ratio.log(), mode, 0.5, 2.0) for mode in ("truncate", "mask"))
    torch.testing.assert_close(truncated, torch.tensor([1.0, 2.0, 0.5]))
    torch.testing.assert_close(masked, torch.tensor([1.0, 0.0, 0.0]))
    assert not truncated.requires_grad and not masked.requires_grad
