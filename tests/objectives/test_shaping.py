"""Reward shaping, the coefficients of the KL and of the entropy bonus, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.objectives.shaping import EntropyCoefficient, KLCoefficient, shape_rewards

NAN = float("nan")


# ---- rewards ----


@pytest.mark.parametrize(
    ("scale", "clip", "expected"),
    [
        (1.0, 0.0, [1, -4, NAN, 0.25]),
        (2.0, 0.0, [2, -8, NAN, 0.5]),
        (2.0, 1.5, [1.5, -1.5, NAN, 0.5]),
    ],
)
def test_rewards_are_scaled_then_clipped_and_missing_ones_stay_missing(scale, clip, expected):
    got = shape_rewards(
        torch.tensor([[1.0, -4.0, NAN, 0.25]]).double(), reward_scale=scale, reward_clip=clip
    )
    assert got[0].tolist() == pytest.approx(expected, nan_ok=True)


# ---- KL coefficient ----


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(2.0, 0.1), (2.2, 0.1 * math.exp(0.1 * 50 / 100)), (1.8, 0.1 * math.exp(-0.1 * 50 / 100)),
     (1000.0, 0.1 * math.exp(0.2 * 50 / 100)), (-3.0, 0.1 * math.exp(-0.2 * 50 / 100))],
)  # fmt: skip
def test_beta_follows_the_kl_error_by_at_most_a_fifth(kl, expected):
    beta = KLCoefficient(0.1, target=2.0, horizon=100)
    beta.update(kl, completions=50)
    assert beta.value == pytest.approx(expected, rel=1e-12)


def test_beta_is_constant_without_a_target_and_is_restored_from_a_checkpoint():
    constant = KLCoefficient(0.1, target=0.0, horizon=10_000)
    constant.update(1000.0, 50)
    assert constant.value == 0.1
    beta, resumed = (KLCoefficient(0.1, target=2.0, horizon=100) for _ in range(2))
    beta.update(5.0, 50)
    resumed.load_state_dict(beta.state_dict())
    assert resumed.value == beta.value != 0.1


# ---- coefficient of the entropy bonus ----


@given(st.lists(st.integers(0, 8), max_size=12), st.sampled_from([0.0, 0.25]))
def test_entropy_coefficient_equals_naive_code(entropies, start):
    """The target is 4. Steps of 1/8 are exact in floating point."""
    coefficient = EntropyCoefficient(start, target=4.0, step=0.125)
    size = value = start
    for entropy in entropies:
        size = max(0, size + 0.125) if entropy < 4 else max(0, size - 0.125)
        value = size if entropy < 4 else 0
        coefficient.update(float(entropy))
        assert coefficient.value == value
        resumed = EntropyCoefficient(start, target=4.0, step=0.125)
        resumed.load_state_dict(coefficient.state_dict())
        coefficient = resumed


@pytest.mark.parametrize("target", [0.0, 1e-9])
def test_entropy_coefficient_without_a_target_or_far_above_it_stays(target):
    """Far above the target there is no bonus, as with --entropy_coef 0."""
    coefficient = EntropyCoefficient(0.0 if target else 0.1, target, step=0.01)
    before = coefficient.value
    for entropy in (3.0, 1e-3, 0.5):
        coefficient.update(entropy)
    assert coefficient.value == before
