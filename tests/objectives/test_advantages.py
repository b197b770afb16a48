"""Advantages from rewards: naive formulas, exact zeros for equal rewards, and missing rewards."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import double, known, naive_centred

import dapo
import grpo
import reinforce
import rloo
from common.objectives.advantages import (
    VARIANTS,
    centre_groups,
    gae,
    group_mean,
    group_mean_batch_std,
    group_ratio,
    group_std,
    unequal,
)

NAN = float("nan")
reward = st.floats(-100, 100).map(lambda x: round(x, 3))
gappy = st.lists(st.lists(reward | st.just(NAN), min_size=3, max_size=3), min_size=1, max_size=4)


def naive_std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


# ---- a group ----


@given(gappy)
def test_group_advantages_equal_the_naive_formula(rewards):
    """A group with fewer than two rewards has none to compare."""
    stds = group_std(double(rewards))[:, 0].tolist()
    centred = centre_groups(double(rewards)).tolist()
    scaled = grpo.advantages(double(rewards))
    assert torch.equal(scaled, dapo.advantages(double(rewards)))
    for group, std, c, s in zip(rewards, stds, centred, scaled.tolist(), strict=True):
        expected = [0.0 if math.isnan(x) else x for x in naive_centred(group)]
        assert std == pytest.approx(naive_std(known(group)), abs=1e-9)
        assert c == pytest.approx(expected, abs=1e-9)
        assert s == pytest.approx([x / (std + 1e-6) for x in expected], rel=1e-6, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.integers(1, 3))
def test_equal_rewards_give_exactly_zero_in_every_estimator(reward, n, groups):
    rewards = torch.full((groups, n), reward, dtype=torch.float64)
    of_scripts = grpo.advantages, rloo.advantages, reinforce.leave_one_out
    for advantages in (*of_scripts, *VARIANTS.values()):
        if advantages is not group_ratio or reward >= 0:  # it refuses negative rewards
            found = advantages(rewards)
            assert (found == 0).all() and found.dtype == torch.float64, advantages


def test_unequal_selects_groups_with_different_rewards():
    different = [1, 0, 0, 0], [1e-12, 0, 0, 0], [NAN, 1, 0, 1]
    equal = [0, 0, 0, 0], [1, 1, 1, 1], [NAN, 1, 1, 1]
    assert unequal(double(different)).all() and not unequal(double(equal)).any()
    assert not unequal(double([[NAN, NAN], [1, NAN], [NAN, -1]])).any()


def test_rounding_makes_no_difference():
    for group in ([0.1 + 0.2, 0.3], [sum([0.1] * 10), 1, 1], [0.1 + 0.2 - 0.3, 0, NAN]):
        assert not unequal(double([group])).any() and group_std(double([group])) == 0
        assert (grpo.advantages(double([group])) == 0).all()
    assert unequal(double([[1000.001, 1000.002], [1e-9, 2e-9], [1e6, 1e6 + 1e-3]])).all()


def test_missing_rewards_are_excluded_from_group_statistics():
    with_nan = grpo.advantages(torch.tensor([[1.0, NAN, 0.0, 0.0]]))
    without = grpo.advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    assert with_nan[0, 1] == 0
    torch.testing.assert_close(with_nan[:, [0, 2, 3]], without)
    for hopeless in ([NAN, NAN], [1.0, NAN]):
        assert (grpo.advantages(torch.tensor([hopeless])) == 0).all()


def test_advantages_depend_only_on_the_own_group():
    both = grpo.advantages(torch.tensor([[1.0, 0.0], [100.0, 50.0], [1.0, 0.0]]))
    torch.testing.assert_close(both[:1], grpo.advantages(torch.tensor([[1.0, 0.0]])))
    torch.testing.assert_close(both[2], both[0])


# ---- variants of a group ----

GROUPS = ([1.0, 0.0, 0.0, 0.0, 1.0], [0.25, 3.0, 0.25, 0.0, 1.5], [0.0] * 5, [2.0] * 5)


def test_group_ratio_divides_by_the_mean():
    """MaxRL (arXiv:2602.02710 Algorithm 1), also with an unknown reward."""
    for group in (*GROUPS, [1.0, NAN, 0.0, 0.5, 0.5]):
        mean = statistics.fmean(known(group))
        (got,) = group_ratio(double([group])).tolist()
        expected = [0.0 if math.isnan(r) or not mean else (r - mean) / mean for r in group]
        assert got == pytest.approx(expected, rel=1e-5)
        by_mean = group_mean(double([group]))[0] / (mean + 1e-6)
        assert got == pytest.approx(by_mean.tolist(), rel=1e-12)
    assert (group_ratio(double(GROUPS[2:])) == 0).all()


def test_group_ratio_refuses_a_negative_reward():
    with pytest.raises(ValueError, match="^--advantage group_ratio: a reward"):
        group_ratio(double([[0.0, -0.5]]))


@given(gappy)
def test_group_mean_batch_std_equals_naive_code(rewards):
    std = naive_std(known(r for group in rewards for r in group))
    got = group_mean_batch_std(double(rewards)).tolist()
    for group, advantages in zip(rewards, got, strict=True):
        expected = [0.0 if math.isnan(c) else c / (std + 1e-6) for c in naive_centred(group)]
        assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-6)


# ---- one value per token ----

step = st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2))  # trained, reward, value
unit = st.sampled_from([0.0, 0.3, 0.95, 1.0])
# a prompt, then tokens of which some are not trained: tool output, or the whole of a masked
# completion
sequence = st.tuples(st.integers(0, 3), st.lists(step, min_size=1, max_size=7))
packed = st.lists(sequence, min_size=1, max_size=4)


def naive_gae(rewards, values, gamma, lam):
    """Return the sum over all later deltas of one sequence's trained tokens."""
    values = [*values, 0.0]  # no token follows the last one
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


@given(packed, unit, unit)
def test_gae_is_the_sum_over_discounted_deltas_of_trained_tokens(sequences, gamma, lam):
    stream, expected = [], []  # (reward, value, trained, sequence)
    for n, (prompt, steps) in enumerate(sequences):
        stream += [(7.0, -5.0, False, n)] * prompt + [(r, v, trained, n) for trained, r, v in steps]
        rewards = [r for trained, r, _ in steps if trained]
        values = [v for trained, _, v in steps if trained]
        advantages = iter(naive_gae(rewards, values, gamma, lam))
        expected += [0.0] * prompt
        expected += [next(advantages) if trained else 0.0 for trained, _, _ in steps]
    rewards, values, mask, ids = zip(*stream, strict=True)
    where = torch.tensor(mask), torch.tensor(ids)
    got = gae(double(rewards), double(values), *where, lam, gamma)
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert got.dtype == torch.float64


def test_gae_of_a_masked_sequence_is_zero():
    nan_T = torch.full((3,), NAN)
    none_T, ids_T = torch.zeros(3).bool(), torch.zeros(3).long()
    assert gae(nan_T, nan_T, none_T, ids_T, 1.0).tolist() == [0, 0, 0]
    one_T = torch.tensor([NAN, 1.0, NAN])
    got = gae(one_T, one_T, torch.tensor([False, True, False]), ids_T, 1.0)
    assert got.tolist() == [0, 0, 0]
