"""Rewards by length: naive formulas, and their place among other rewards."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data.sample import Completion
from common.metrics.meter import Meter
from common.rewards.lengths import by_length
from tests.rewards.test_total import ROW, make

LONGEST = 20
completion = st.tuples(st.sampled_from([0.0, 1.0, math.nan]), st.integers(1, LONGEST))
groups = st.lists(st.lists(completion, min_size=3, max_size=3), min_size=1, max_size=3)


def tables(groups):
    right, lengths = ([[sample[i] for sample in group] for group in groups] for i in (0, 1))
    return torch.tensor(right).double(), torch.tensor(lengths)


def cosine(right: float, length: int) -> float:
    """Eq. of arXiv:2502.03373 with r_0 and r_L of right and wrong completions."""
    if math.isnan(right):
        return math.nan
    if length == LONGEST:
        return -10.0
    short, long = (2.0, 1.0) if right else (-10.0, 0.0)
    return long + 0.5 * (short - long) * (1 + math.cos(math.pi * length / LONGEST))


@given(groups)
def test_cosine_reward_equals_naive_code(groups):
    got = by_length("cosine_length", *tables(groups), LONGEST)
    expected = [[cosine(*sample) for sample in group] for group in groups]
    torch.testing.assert_close(got, torch.tensor(expected).double(), equal_nan=True)


def test_cosine_reward_prefers_short_right_and_long_wrong_completions():
    lengths = torch.arange(1, LONGEST)[None]
    right, wrong = (
        by_length("cosine_length", torch.full(lengths.shape, first).double(), lengths, LONGEST)
        for first in (1.5, 0.5)
    )
    assert (right.diff() < 0).all() and (wrong.diff() > 0).all() and right.min() > wrong.max()


@given(groups)
def test_adaptive_penalty_equals_naive_code(groups):
    expected = []
    for group in groups:
        known = [right for right, _ in group if not math.isnan(right)]
        rate = max(sum(known) / len(known), 1 / 3) if known else math.nan
        expected.append([-rate * n / LONGEST + (0 * right) for right, n in group])
    got = by_length("adaptive_length", *tables(groups), LONGEST)
    torch.testing.assert_close(got, torch.tensor(expected).double(), equal_nan=True)


def rollout(*pairs):
    return [[Completion([0] * (1 + n), [False] + [True] * n, 1, ROW, text=text)
             for text, n in pairs]]  # fmt: skip


def test_rewards_by_length_read_the_first_reward():
    batch = rollout(("18", 64), ("18", 128), ("7", 32), ("8", 256))  # of 256 tokens
    rewards = make(("adaptive_length", "exact_match")[::-1], (1.0, 0.5))
    total, parts, _ = rewards(batch, Meter())
    assert list(parts) == ["exact_match", "adaptive_length"]
    assert parts["adaptive_length"].tolist() == [[-0.125, -0.25, -0.0625, -0.5]]
    assert total.tolist() == [[1 - 0.0625, 1 - 0.125, -0.03125, -0.25]]
    total, parts, _ = make(("exact_match", "cosine_length", "format"), (0.0, 1.0, 1.0))(
        batch, Meter()
    )
    assert list(parts) == ["exact_match", "cosine_length", "format"]
    assert total.tolist() == [[pytest.approx(x) for x in parts["cosine_length"][0].tolist()]]
    assert total[0, 0] > total[0, 1] > total[0, 2] > total[0, 3] == -10


def test_reward_by_length_follows_another_one():
    with pytest.raises(ValueError, match="cosine_length: name a reward for right answers before"):
        make(("cosine_length", "exact_match"))
