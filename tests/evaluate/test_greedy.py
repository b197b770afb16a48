"""Metrics of greedy completions of held-out prompts."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import completion

from common.evaluate.greedy import evaluate_prompts

CPU, NAN = torch.device("cpu"), math.nan


def test_solved_uses_the_first_reward_and_ignores_a_missing_one():
    """Evaluation samples one greedy completion per prompt; the sum of the rewards is logged too."""
    asked = {}

    def sample_now(step, held_out, seeds, n, temperature):
        asked.update(step=step, seeds=seeds, n=n, temperature=temperature)
        groups = [[completion(3)] for _ in held_out]
        for (sample,), row in zip(groups, held_out, strict=True):
            sample.row = row
        return groups

    class Scored:
        def __call__(self, groups, meter):
            meter.mean("reward/error_fraction", 0, 3)
            return sum(parts.values()), parts, {"first/words": torch.tensor([[1.0], [3.0], [5.0]])}

        def first(self, parts):
            return parts["first"]

    parts = dict(
        first=torch.tensor([[1.0], [0.5], [NAN]]), second=torch.tensor([[2.0], [2.0], [2.0]])
    )
    got = evaluate_prompts(SimpleNamespace(sample_now=sample_now), 7, [{}, {}, {}], Scored())
    assert asked == dict(step=7, seeds=[0, 0, 0], n=1, temperature=0.0)
    assert got["eval/solved"] == pytest.approx(1 / 2) and got[
        "eval/rewards/first/mean"
    ] == pytest.approx(0.75)
    assert got["eval/rewards/first/words"] == 3 and not any("error" in name for name in got)
    assert got["eval/rewards/second/mean"] == 2 and got["eval/reward"] == pytest.approx(2.75)
    rows = [dict(_dataset="x"), dict(_dataset="y"), dict(_dataset="y")]
    of_sets = evaluate_prompts(SimpleNamespace(sample_now=sample_now), 7, rows, Scored())
    assert {name: x for name, x in of_sets.items() if not name.endswith(("/x", "/y"))} == got
    assert (
        len(of_sets) == 3 * len(got)
        and of_sets["eval/solved/x"] == 1
        and of_sets["eval/solved/y"] == 0
    )
    assert (
        of_sets["eval/rewards/first/mean/y"] == 0.5 and of_sets["eval/rewards/first/words/y"] == 4
    )
    assert of_sets["eval/reward/x"] == 3 and of_sets["eval/reward/y"] == 2.5
