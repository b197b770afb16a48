"""Comparison of column-wise functions with naive scalar code, values and derivatives."""

import pytest
import torch
from hypothesis import strategies as st

logprob = st.floats(-8, -1e-3)
advantage = st.floats(-5, 5) | st.sampled_from([0.0, 1.0, -1.0])
rows = st.lists(
    st.tuples(logprob, logprob, advantage), min_size=1, max_size=8
)  # new, old, advantage


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
