"""Weights for what the engine sampled: naive ratios, bounds, whole completions, and no gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.correction import correction_weights, importance_weights

# ---- of log-ratios ----


@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=8),
    st.sampled_from([(0.0, 2.0), (0.5, 5.0)]),
    st.sampled_from(["truncate", "mask"]),
)
def test_importance_weights(log_ratios, bounds, mode):
    low, high = bounds
    weights = importance_weights(torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True), mode, low, high)
    assert not weights.requires_grad
    for log_ratio, weight in zip(log_ratios, weights.tolist(), strict=True):
        ratio = math.exp(log_ratio)
        outside = min(max(ratio, low), high) if mode == "truncate" else 0.0
        assert weight == pytest.approx(ratio if low <= ratio <= high else outside, rel=1e-12)


def test_importance_weights_keep_the_bounds_themselves():
    log_ratio = torch.tensor([0.5, 2.0]).double().log()
    low, high = log_ratio.exp().tolist()
    assert importance_weights(log_ratio, "mask", low, high).tolist() == [low, high]


def test_an_absurd_ratio_is_truncated_or_dropped_and_not_infinite():
    weights = [importance_weights(torch.tensor([200.0]), mode, 0.0, 2.0).item() for mode in ("truncate", "mask")]
    assert weights == [2.0, 0.0]


# ---- of a packed stream ----

# Two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have absurd ones.
RATIOS = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3])
MASK, IDS = torch.tensor([False, True, True, True, False, True, True]), torch.tensor([0, 0, 0, 0, 1, 1, 1])
DEFAULTS = dict(
    correction="token", correction_mode="truncate", correction_low=0.0, correction_high=2.0, correction_filter=None
)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dict(correction="none"), [1, 1, 1, 1, 1]),
        ({}, [1, 2, 0.5, 2, 2]),
        (dict(correction_high=3.5), [1, 3.5, 0.5, 3, 3]),
        (dict(correction_low=0.8), [1, 2, 0.8, 2, 2]),
        (dict(correction_mode="mask"), [1, 0, 0.5, 0, 0]),
        (dict(correction_mode="mask", correction_low=0.8, correction_high=5.0), [1, 4, 0, 3, 3]),
        (dict(correction="sequence", correction_high=100.0), [2, 2, 2, 9, 9]),
        (dict(correction="sequence", correction_high=4.0), [2, 2, 2, 4, 4]),
        (dict(correction="sequence", correction_mode="mask", correction_high=4.0), [2, 2, 2, 0, 0]),
        (dict(correction_filter=(0.5, 2.0), correction_high=5.0), [1, 4, 0.5, 0, 0]),  # 2^(1/3) and 3
        (dict(correction_filter=(1.5, 4.0), correction_high=5.0), [0, 0, 0, 3, 3]),
        (dict(correction="sequence", correction_high=100.0, correction_filter=(0.5, 2.0)), [2, 2, 2, 0, 0]),
    ],
)
def test_correction_weights(flags, expected):
    weights_T = correction_weights(RATIOS.log().requires_grad_(), MASK, IDS, **DEFAULTS | flags)
    assert weights_T[MASK].tolist() == pytest.approx(expected, rel=1e-5)
    assert not weights_T.requires_grad


@pytest.mark.parametrize("flags", [{}, dict(correction="sequence"), dict(correction_filter=(0.5, 2.0))])
def test_correction_weights_without_trained_tokens_are_finite(flags):
    log_ratio_T, none_T, ids_T = torch.tensor([-3.0, 1e4, 1.0]), torch.zeros(3).bool(), torch.tensor([0, 0, 1])
    assert correction_weights(log_ratio_T, none_T, ids_T, **DEFAULTS | flags).isfinite().all()
