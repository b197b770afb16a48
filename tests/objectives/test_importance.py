"""Importance weights and masks for off-policy samples: naive ratios, bounds, whole completions, and
no gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.objectives.importance import Correction, importance_weights, off_policy_mask

# ---- single log-ratios ----


def bounded(log_ratio, high):
    """Return the weights of single tokens."""
    mask, ids = torch.ones(len(log_ratio)).bool(), torch.arange(len(log_ratio))
    engine = torch.zeros_like(log_ratio)
    return importance_weights(log_ratio, engine, mask, ids, Correction("token", high))


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=8), st.sampled_from([2.0, 5.0]))
def test_importance_weights_equal_bounded_ratios(log_ratios, high):
    weights = bounded(torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True), high)
    assert not weights.requires_grad
    expected = [min(math.exp(log_ratio), high) for log_ratio in log_ratios]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)


def test_extreme_ratio_is_truncated_to_a_finite_weight():
    assert bounded(torch.tensor([200.0]), 2.0).item() == 2.0


# ---- a packed stream ----

# Two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have extreme ratios.
RATIOS = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3])
MASK, IDS = (
    torch.tensor([False, True, True, True, False, True, True]),
    torch.tensor([0, 0, 0, 0, 1, 1, 1]),
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dict(level="none"), [1, 1, 1, 1, 1]),
        ({}, [1, 2, 0.5, 2, 2]),
        (dict(high=3.5), [1, 3.5, 0.5, 3, 3]),
        (dict(level="sequence", high=100.0), [2, 2, 2, 9, 9]),
        (dict(level="sequence", high=4.0), [2, 2, 2, 4, 4]),
        (dict(filter=(0.5, 2.0), high=5.0), [1, 4, 0.5, 0, 0]),  # 2^(1/3) and 3
        (dict(filter=(1.5, 4.0), high=5.0), [0, 0, 0, 3, 3]),
        (dict(level="sequence", high=100.0, filter=(0.5, 2.0)), [2, 2, 2, 0, 0]),
    ],
)
def test_weights_follow_level_and_bounds(flags, expected):
    correction = Correction(**dict(level="token") | flags)
    old_T = RATIOS.log().requires_grad_()
    weights_T = importance_weights(old_T, torch.zeros(7), MASK, IDS, correction)
    assert weights_T[MASK].tolist() == pytest.approx(expected, rel=1e-5)
    assert not weights_T.requires_grad


@pytest.mark.parametrize("flags", [{}, dict(level="sequence"), dict(filter=(0.5, 2.0))])
def test_weights_without_trained_tokens_are_finite(flags):
    log_ratio_T, none_T, ids_T = (
        torch.tensor([-3.0, 1e4, 1.0]),
        torch.zeros(3).bool(),
        torch.tensor([0, 0, 1]),
    )
    correction = Correction(**dict(level="token") | flags)
    streams = log_ratio_T, torch.zeros(3), none_T, ids_T
    assert importance_weights(*streams, correction).isfinite().all()


# ---- off-policy sequence masking ----

logprob = st.integers(-512, 0).map(lambda k: k / 64)  # no mean equals a threshold
token = st.tuples(
    st.booleans(), logprob, logprob
)  # trained, log-prob under the policy, log-prob under the engine
completions = st.lists(
    st.tuples(st.sampled_from([-2.0, 0.0, 1.0]), st.lists(token, min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


@given(completions, st.sampled_from([-0.501, 0.001, 0.501, 2.001]))
def test_off_policy_mask_equals_naive_code(completions, threshold):
    stream, expected = [], []
    for n, (advantage, tokens) in enumerate(completions):
        drift = [rollout - logprob for trained, logprob, rollout in tokens if trained]
        dropped = advantage < 0 and sum(drift) / max(1, len(drift)) > threshold
        stream += [
            (trained, logprob, rollout, advantage, n) for trained, logprob, rollout in tokens
        ]
        expected += [not dropped] * len(tokens)
    mask, logprobs, rollout_logprobs, advantages, ids = (
        torch.tensor(column) for column in zip(*stream, strict=True)
    )
    got = off_policy_mask(
        rollout_logprobs - logprobs.requires_grad_(), advantages, mask, ids, threshold
    )
    assert got.tolist() == expected and got.dtype == torch.bool and not got.requires_grad


def test_off_policy_mask_drops_completions_with_negative_advantage_and_fallen_logprob():
    """Three completions of two trained tokens. The log-probs of the first and third fell by 1 and
    0, those of the second rose; the advantages of the first two are negative. Prompts differ."""
    mask_T, ids_T = torch.tensor([False, True, True] * 3), torch.arange(3).repeat_interleave(3)
    logprobs_T = torch.tensor([9.0, -2, -1, 9, 0, 0, 9, -2, -1])
    streams = torch.tensor([-1.0, -1, 1]).repeat_interleave(3), mask_T, ids_T
    for threshold, kept in ((0.4, [False, True, True]), (0.6, [True, True, True])):
        got = off_policy_mask(-1.0 - logprobs_T, *streams, threshold)
        assert got.tolist() == [x for x in kept for _ in range(3)]
