"""Group advantages: the formula, and exact zeros where there is nothing to learn."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.advantages import group_advantages, leave_one_out

NAN = float("nan")


@given(st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=5))
def test_equals_the_naive_formula(rewards):
    scaled, centred = (group_advantages(torch.tensor(rewards), scale).tolist() for scale in (True, False))
    for group, s, c in zip(torch.tensor(rewards).tolist(), scaled, centred, strict=True):
        mean, std = statistics.fmean(group), statistics.stdev(group)
        assert c == pytest.approx([r - mean for r in group], abs=1e-9)
        assert s == pytest.approx([(r - mean) / (std + 1e-6) for r in group], rel=1e-6, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(reward, n):
    assert (group_advantages(torch.full((1, n), reward, dtype=torch.float64)) == 0).all()


def test_the_lone_correct_sample_counts():
    advantages = group_advantages(torch.tensor([[1.0, 0, 0, 0]]))
    assert advantages[0, 0] > 1 and (advantages[0, 1:] < 0).all()


def test_missing_rewards_are_left_out_of_their_group():
    with_nan = group_advantages(torch.tensor([[1.0, NAN, 0.0, 0.0]]))
    without = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    assert with_nan[0, 1] == 0
    torch.testing.assert_close(with_nan[:, [0, 2, 3]], without)
    for hopeless in ([NAN, NAN], [1.0, NAN]):
        assert (group_advantages(torch.tensor([hopeless])) == 0).all()


def test_groups_do_not_see_each_other():
    both = group_advantages(torch.tensor([[1.0, 0.0], [100.0, 50.0]]))
    torch.testing.assert_close(both[:1], group_advantages(torch.tensor([[1.0, 0.0]])))


# ---- leave one out ----


@given(st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_baseline_is_the_mean_of_the_others(rewards):
    for group, got in zip(rewards, leave_one_out(torch.tensor(rewards, dtype=torch.float64)).tolist(), strict=True):
        others = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(3)]
        assert got == pytest.approx([r - mean for r, mean in zip(group, others, strict=True)], abs=1e-9)


def test_a_missing_reward_is_in_no_baseline():
    assert leave_one_out(torch.tensor([[1.0, NAN, 0.0, 0.5]]))[0].tolist() == [0.75, 0, -0.75, 0]
    assert leave_one_out(torch.tensor([[1.0, NAN], [2.0, 2.0]])).tolist() == [[0, 0], [0, 0]]
