"""Shaping of rewards by hand and by naive formulas, and a KL coefficient that finds its target."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.objectives.shaping import (
    KLCoefficient,
    overlong_penalties,
    overlong_ramp,
    shape_rewards,
    truncation_penalties,
)

NAN = float("nan")


# ---- rewards and penalties ----


@pytest.mark.parametrize(
    ("scale", "clip", "expected"),
    [(1.0, 0.0, [1, -4, NAN, 0.25]), (2.0, 0.0, [2, -8, NAN, 0.5]), (2.0, 1.5, [1.5, -1.5, NAN, 0.5])],
)
def test_rewards_are_scaled_then_clipped_and_missing_ones_stay_missing(scale, clip, expected):
    got = shape_rewards(torch.tensor([[1.0, -4.0, NAN, 0.25]]).double(), reward_scale=scale, reward_clip=clip)
    assert got[0].tolist() == pytest.approx(expected, nan_ok=True)


def test_what_was_cut_off_is_penalised():
    got = truncation_penalties(torch.tensor([[False, True], [True, False]]), missing_eos_penalty=0.5)
    assert got.tolist() == [[0, -0.5], [-0.5, 0]] and got.dtype == torch.float64


@given(st.integers(0, 40), st.integers(1, 30), st.sampled_from([0.2, 0.5, 1.0]))
def test_overlong_ramp(length, longest, fraction):
    start = longest - fraction * longest
    expected = 0.0 if length <= start else -1.0 if length > longest else (start - length) / (longest - start)
    got = overlong_ramp(torch.tensor([length]), longest, fraction * longest).item()
    assert got == pytest.approx(expected, abs=1e-9) and -1 <= got <= 0


@pytest.mark.parametrize(
    ("buffer", "weight", "expected"),
    [
        (0.0, 1.0, [[0, 0], [0, 0], [0, 0]]),
        (0.4, 1.0, [[-1, -1], [-0.5, -0.75], [0, -0.25]]),
        (0.4, 2.0, [[-2, -2], [-1, -1.5], [0, -0.5]]),
        (0.2, 1.0, [[-1, -1], [0, -0.5], [0, 0]]),
    ],
)
def test_overlong_penalties_begin_at_the_buffer_and_have_their_weight_at_the_end(buffer, weight, expected):
    lengths = torch.tensor([[10, 12], [8, 9], [1, 7]])
    got = overlong_penalties(lengths, overlong_buffer=buffer, overlong_penalty=weight, max_new_tokens=10)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


# ---- KL coefficient ----


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(2.0, 0.1), (2.2, 0.1 * math.exp(0.1 * 50 / 100)), (1.8, 0.1 * math.exp(-0.1 * 50 / 100)),
     (1000.0, 0.1 * math.exp(0.2 * 50 / 100)), (-3.0, 0.1 * math.exp(-0.2 * 50 / 100))],
)  # fmt: skip
def test_beta_follows_the_kl_to_its_target(kl, expected):
    beta = KLCoefficient(0.1, target=2.0, horizon=100)
    beta.update(kl, completions=50)
    assert beta.value == pytest.approx(expected, rel=1e-12)


def test_beta_without_a_target_stays_and_with_one_survives_a_checkpoint():
    constant = KLCoefficient(0.1, target=0.0, horizon=10_000)
    constant.update(1000.0, 50)
    assert constant.value == 0.1
    beta, resumed = (KLCoefficient(0.1, target=2.0, horizon=100) for _ in range(2))
    beta.update(5.0, 50)
    resumed.load_state_dict(beta.state_dict())
    assert resumed.value == beta.value != 0.1
