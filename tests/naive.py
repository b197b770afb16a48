"""Naive scalar code, and its comparison with functions of columns, values and derivatives."""

import math
import statistics

import pytest
import torch
from hypothesis import strategies as st

logprob = st.floats(-8, -1e-3)
advantage = st.floats(-5, 5) | st.sampled_from([0.0, 1.0, -1.0])
# new, old, advantage
rows = st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=8)


def columns(rows):
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def check(function, naive, rows, rel=1e-9):
    """Compare `function` of columns, with the gradient of the first, to `naive` of one row, which
    gives (value, derivative)."""
    first, *others = columns(rows)
    first.requires_grad_()
    values = function(first, *others)
    assert values.shape == first.shape
    (slopes,) = torch.autograd.grad(values.sum(), first)
    for row, value, slope in zip(rows, values.tolist(), slopes.tolist(), strict=True):
        assert (value, slope) == pytest.approx(naive(*row), rel=rel, abs=1e-9), row


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def known(values):
    return [x for x in values if not math.isnan(x)]


def naive_centred(group):
    """Return the rewards of a group minus their mean; 0 for equal ones, NaN for missing ones."""
    mean, equal = statistics.fmean(known(group) or [0.0]), len(set(known(group))) == 1
    return [0.0 if equal and not math.isnan(r) else r - mean for r in group]


def naive_whiten(values):
    """Return the whitened values of a flat list in which every value counts once."""
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(x - mean) / (std + 1e-6) for x in values]
