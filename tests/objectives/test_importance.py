"""Importance weights of off-policy samples: naive ratios, bounds, whole completions, and
no gradient."""

import pytest
import torch

from common.objectives.importance import Correction, importance_weights

# ---- a packed stream ----

# Two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have extreme ratios.
RATIOS = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3])
MASK = torch.tensor([False, True, True, True, False, True, True])
IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dict(level="none"), [1, 1, 1, 1, 1]),
        (dict(high=1e30), [1, 4, 0.5, 3, 3]),
        ({}, [1, 2, 0.5, 2, 2]),
        (dict(high=3.5), [1, 3.5, 0.5, 3, 3]),
        (dict(level="sequence", high=100.0), [2, 2, 2, 9, 9]),
        (dict(level="sequence", high=4.0), [2, 2, 2, 4, 4]),
    ],
)
def test_weights_follow_level_and_bounds(flags, expected):
    correction = Correction(**dict(level="token") | flags)
    old_T = RATIOS.log().requires_grad_()
    weights_T = importance_weights(old_T, torch.zeros(7), MASK, IDS, correction)
    assert weights_T[MASK].tolist() == pytest.approx(expected, rel=1e-5)
    assert not weights_T.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_without_trained_tokens_are_finite(level):
    log_ratio_T = torch.tensor([-3.0, 1e4, 1.0])
    none_T = torch.zeros(3).bool()
    ids_T = torch.tensor([0, 0, 1])
    streams = log_ratio_T, torch.zeros(3), none_T, ids_T
    assert importance_weights(*streams, Correction(level)).isfinite().all()
