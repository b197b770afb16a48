"""Evaluation by generation, and intervals."""

import dataclasses
import math
import statistics
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import completion

from common.evaluate.held_out import evaluate_prompts, wilson_interval

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

    args = SimpleNamespace(eval_samples=1, eval_temperature=0.0, seed=0)
    sampler = SimpleNamespace(sample_now=sample_now, args=args)
    parts = dict(
        first=torch.tensor([[1.0], [0.5], [NAN]]), second=torch.tensor([[2.0], [2.0], [2.0]])
    )
    got = evaluate_prompts(sampler, 7, [{}, {}, {}], Scored())
    assert asked["step"] == 7 and asked["n"] == 1 and asked["temperature"] == 0
    assert got["eval/solved"] == pytest.approx(1 / 2) and got[
        "eval/rewards/first/mean"
    ] == pytest.approx(0.75)
    assert got["eval/rewards/first/words"] == 3 and not any("error" in name for name in got)
    assert got["eval/rewards/second/mean"] == 2 and got["eval/reward"] == pytest.approx(2.75)
    rows = [dict(_dataset="x"), dict(_dataset="y"), dict(_dataset="y")]
    of_sets = evaluate_prompts(sampler, 7, rows, Scored())
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


def test_sampled_evaluation_has_pass_at_k_and_an_error_over_prompts():
    """8 samples of each of four prompts, of which 8, 4, 1 and 0 are right; two sets."""
    right_P = [8, 4, 1, 0]
    rewards_PS = torch.tensor([[1.0] * c + [0.0] * (8 - c) for c in right_P])
    seeds_of = []

    def sample_now(step, held_out, seeds, n, temperature):
        assert n == 8 and temperature == 0.7
        seeds_of.append(seeds)
        return [
            [dataclasses.replace(completion(3), row=dict(_dataset=name)) for _ in range(n)]
            for name in "aabb"
        ]

    rewards = Mock(return_value=(rewards_PS, dict(x=rewards_PS), {}))
    rewards.first = lambda parts: parts["x"]
    args = SimpleNamespace(eval_samples=8, eval_temperature=0.7, seed=3)
    sampler = SimpleNamespace(sample_now=sample_now, args=args)
    got = evaluate_prompts(sampler, 0, [{}] * 4, rewards)
    assert evaluate_prompts(sampler, 5, [{}] * 4, rewards) == got
    assert seeds_of[0] == seeds_of[1] and len(set(seeds_of[0])) == 4
    means_P = [c / 8 for c in right_P]
    assert got["eval/solved"] == pytest.approx(statistics.mean(means_P))
    assert got["eval/solved_stderr"] == pytest.approx(statistics.pstdev(means_P) / 2)
    assert got["eval/solved_stderr/a"] == pytest.approx(0.25 / math.sqrt(2))
    for k in (2, 4, 8):
        expected = statistics.mean(1 - math.comb(8 - c, k) / math.comb(8, k) for c in right_P)
        assert got[f"eval/pass_at_{k}"] == pytest.approx(expected)
    assert got["eval/pass_at_8/a"] == 1 and got["eval/pass_at_8/b"] == 0.5


def test_wilson_interval_equals_published_tables():
    """Newcombe 1998 (doi:10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E), Table
    I."""
    for hits, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
    ):
        assert wilson_interval(hits / count, count) == pytest.approx((low, high), abs=5e-5)
