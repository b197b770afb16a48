"""rloo.py: the objective by hand and by naive formulas, and an unbiased gradient."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import double

import rloo

NAN = math.nan


# ---- advantages ----

triples = st.lists(st.lists(st.integers(-100, 100), min_size=3, max_size=3), min_size=1, max_size=5)


@given(triples)
def test_baseline_is_the_mean_of_the_others(rewards):
    for group, got in zip(rewards, rloo.advantages(double(rewards)).tolist(), strict=True):
        others = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(3)]
        assert got == pytest.approx(
            [r - mean for r, mean in zip(group, others, strict=True)], abs=1e-9
        )


def test_missing_reward_is_in_no_baseline_and_equal_rewards_have_no_advantage():
    assert rloo.advantages(torch.tensor([[1.0, NAN, 0.0, 0.5]]))[0].tolist() == [0.75, 0, -0.75, 0]
    for equal in ([1.0, NAN], [2.0, 2.0], [0.1, 0.1, 0.1], [NAN, NAN]):
        assert (rloo.advantages(double([equal])) == 0).all()


# ---- the loss ----

# log-probs of a completion, now and at the rollout; its importance weight; its advantage
rows = st.lists(
    st.tuples(
        st.floats(-8, -1), st.floats(-8, -1), st.floats(0, 2),
        st.sampled_from([-2.0, -0.5, 0.0, 1.0, 3.0]),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@given(rows, st.integers(1, 20))
def test_loss_and_gradient_equal_naive_code(rows, completions):
    new, old, weights, advantages = (double(column) for column in zip(*rows, strict=True))
    args, expected, slopes, clipped = rloo.Args(clip_low=0.1, clip_high=0.3), 0.0, [], []
    for logp, old_logp, weight, a in rows:
        ratio = math.exp(logp - old_logp)
        outside = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.9)
        expected -= weight * min(ratio * a, min(max(ratio, 0.9), 1.3) * a) / completions
        clipped.append(outside)
        slopes.append(0.0 if outside else -weight * ratio * a / completions)
    share_N, logged = rloo.loss(
        new.requires_grad_(), old, weights, advantages, torch.tensor(completions), args
    )
    assert share_N.sum().item() == pytest.approx(expected, abs=1e-9)
    assert torch.autograd.grad(share_N.sum(), new)[0].tolist() == pytest.approx(slopes, abs=1e-9)
    assert logged["loss"].sum().item() == pytest.approx(expected * completions, abs=1e-9)
    assert logged["clip_ratio/region_mean"].tolist() == clipped


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_extreme_ratios_do_not_overflow(advantage, log_ratio):
    logprobs_N = torch.tensor([log_ratio], requires_grad=True)
    share_N, _ = rloo.loss(
        logprobs_N, torch.zeros(1), torch.ones(1), double([advantage]), torch.tensor(1), rloo.Args()
    )
    assert share_N.isfinite() and torch.autograd.grad(share_N, logprobs_N)[0].isfinite().all()


def test_expected_gradient_is_that_of_the_expected_reward():
    """For a bandit with two actions and different rewards, the test enumerates all draws of k
    samples with their probabilities."""
    pays = double([0.3, 1.0])
    logits = double([0.4, -0.2]).requires_grad_()
    (analytic,) = torch.autograd.grad((logits.softmax(0) * pays).sum(), logits)
    for k in (2, 3):
        expected = torch.zeros(2, dtype=torch.float64)
        for actions in map(list, itertools.product((0, 1), repeat=k)):
            logps_N = logits.log_softmax(0)[actions]
            advantages_N = rloo.advantages(pays[actions][None])[0]
            share_N, _ = rloo.loss(
                logps_N, logps_N.detach(), torch.ones(k), advantages_N, torch.tensor(k), rloo.Args()
            )
            expected -= torch.autograd.grad(share_N.sum(), logits)[0] * logps_N.detach().sum().exp()
        torch.testing.assert_close(expected, analytic, rtol=1e-12, atol=1e-12)
