"""The values of a meter do not depend on the split of a batch."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.metrics.meter import Meter, evaluate_sets


def test_mean_is_weighted_and_max_and_min_are_not(device):
    meter = Meter()
    meter.mean("a", 6.0, 2)
    meter.mean("a", torch.tensor(1.0), torch.tensor(3))
    meter.mean("plain", 1)
    meter.mean("plain", 2)
    for value in (3.0, torch.tensor(-5.0), 4):
        meter.max("largest", value)
        meter.min("smallest", value)
    assert meter.reduce() == dict(a=1.4, plain=1.5, largest=4.0, smallest=-5.0)


TOKENS = st.tuples(st.floats(-10, 10, width=32), st.booleans())


@given(st.lists(st.lists(TOKENS, min_size=1), min_size=1, max_size=5))
def test_masked_mean_does_not_depend_on_the_split(micro_batches):
    meter, tokens = Meter(), [token for mb in micro_batches for token in mb]
    for mb in micro_batches:
        values, mask = zip(*mb, strict=True)
        meter.masked_mean("x", torch.tensor(values, dtype=torch.float64), torch.tensor(mask))
    kept = [value for value, trained in tokens if trained]
    mean = math.fsum(kept) / max(1, len(kept))
    assert meter.reduce() == (dict(x=pytest.approx(mean, abs=1e-9)) if kept else {})


def test_reduce_returns_every_value_once():
    meter = Meter()
    assert meter.reduce() == {}
    meter.mean("empty", 0.0, 0)
    meter.mean("x", 1.0)
    assert meter.reduce() == dict(x=1.0)
    assert meter.reduce() == {}
    meter.mean("x", 1.0)
    meter.sum("x", 1.0)
    with pytest.raises(AssertionError, match="x is sum and another kind"):
        meter.reduce()


def test_times_add_up_within_a_step(monkeypatch):
    clock = iter([0.0, 1.5, 10.0, 10.25, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter()
    for _ in range(2):
        with meter.time("nap"):
            pass
    assert meter.reduce() == {"time/nap": 1.75}
    with meter.time("nap"):
        pass
    assert meter.reduce() == {"time/nap": 4.0}


def test_spread_and_effective_fraction_do_not_depend_on_the_split():
    values = torch.tensor([1.0, 2, 4, 9], dtype=torch.float64)
    for parts in ([values], [values[:1], values[1:]], list(values.split(1))):
        meter = Meter()
        for part in parts:
            meter.std("spread", part)
            meter.effective_fraction("ess", part, torch.ones(len(part), dtype=torch.bool))
        got = meter.reduce()
        assert got["spread"] == pytest.approx(values.std(correction=0).item())
        assert got["ess"] == pytest.approx((values.mean() ** 2 / values.square().mean()).item())
    meter.std("spread", values[:0])
    meter.effective_fraction("ess", values, torch.zeros(len(values), dtype=torch.bool))
    assert meter.reduce() == {}


def test_meter_keeps_no_autograd_graph():
    meter, x = Meter(), torch.ones(3, requires_grad=True)
    meter.masked_mean("x", x * 2, torch.tensor([True, True, False]))
    ((row,),) = meter.entries.values()
    assert not any(x.requires_grad for x in row)
    assert meter.reduce() == dict(x=2.0)


@pytest.mark.parametrize("named", [True, False])
def test_held_out_sets_are_measured_separately_and_jointly(device, named):
    """The mean over all is weighted by the samples of each set; rows without a set have no separate
    metrics."""
    rows = [dict(_dataset=name) if named else {} for name in "aba"]
    asked = []

    def evaluate(mine: list[int]) -> Meter:
        asked.append(mine)
        meter = Meter()
        for n in mine:
            meter.mean("x", 10.0 * n, n + 1)
            meter.max("most", n)
        return meter

    of_sets = {"x/a": 20 / 4, "most/a": 2, "x/b": 10 / 2, "most/b": 1} if named else {}
    assert evaluate_sets(SimpleNamespace(rows=rows), evaluate) == {"x": 30 / 6, "most": 2} | of_sets
    assert asked == ([[0, 2], [1]] if named else [[0, 1, 2]])
