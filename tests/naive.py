"""Naive scalar code for objectives, and `check`, which compares values and derivatives with it."""

import math
import statistics

import pytest
import torch
from hypothesis import strategies as st

from common.objectives.policy import PolicyInputs

logprob = st.floats(-8, -1e-3)
advantage = st.floats(-5, 5) | st.sampled_from([0.0, 1.0, -1.0])
# new, old, advantage
rows = st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=8)


def columns(rows):
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def check(function, naive, rows, rel=1e-9):
    """Compare `function` of columns, and the gradient with respect to the first one, with `naive`,
    which returns (value, derivative) for one row."""
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
    """Return the rewards of a group minus their mean: 0 for equal ones, NaN for missing ones."""
    mean, equal = statistics.fmean(known(group) or [0.0]), len(set(known(group))) == 1
    return [0.0 if equal and not math.isnan(r) else r - mean for r in group]


def tokens(new, old, A, low=0.2, high=0.28, mask=None, ids=None) -> PolicyInputs:
    """Return a policy loss's inputs. By default each token is trained, a completion of its own."""
    mask = torch.ones(len(new)).bool() if mask is None else mask
    ids = torch.arange(len(new)) if ids is None else ids
    return PolicyInputs(new, old, A, mask, ids, low, high)


def naive_logps(hf, sample):
    """Compute the log-prob of one completion with plain transformers."""
    ids = torch.tensor([sample.ids])
    logp_TV = hf(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    picked = logp_TV.gather(-1, ids[0, 1:, None])[:, 0]
    return picked[torch.tensor([*sample.loss_mask[1:]], dtype=torch.bool)].sum().item()
