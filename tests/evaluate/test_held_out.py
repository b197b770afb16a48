"""Evaluation by generation, and intervals."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from helpers import completion

from common.evaluate.held_out import evaluate_prompts
from common.evaluate.offline import wilson_interval
from common.metrics.meter import Meter

NAN = math.nan


class Scored:
    """A sampler and its rewards: tables [P, S] by name, of rows with these data sets."""

    def __init__(self, parts: dict, numbers: dict | None = None, sets: str = ""):
        self.parts = {name: torch.tensor(rows) for name, rows in parts.items()}
        self.numbers = {name: torch.tensor(rows) for name, rows in (numbers or {}).items()}
        self.rows = [dict(_dataset=name) for name in sets] or [{}] * len(next(iter(parts.values())))
        self.errors: Sequence[dict] = ()

    def complete_held_out(self, step, held_out):
        assert step == 7
        count = next(iter(self.parts.values())).shape[1]
        return [
            [dataclasses.replace(completion(3), row=row) for _ in range(count)] for row in held_out
        ]

    def wait(self, groups, meter: Meter):
        meter.mean("reward/error_fraction", 0, 3)
        for group, errors in zip(groups, self.errors, strict=False):  # of its last completion
            group[-1].reward_errors = errors
            group[-1].row["_source"] = "a:1"
        return sum(self.parts.values()), self.parts, self.numbers

    def first(self, parts):
        return next(iter(parts.values()))

    def evaluated(self, errors: Sequence[dict] = ()) -> dict:
        self.errors = errors
        return evaluate_prompts(
            SimpleNamespace(complete_held_out=self.complete_held_out), 7, self.rows, self
        )


def test_solved_uses_the_first_reward_and_ignores_a_missing_one():
    """The sum of the rewards is logged too, and each number of each data set alone."""
    parts = dict(first=[[1.0], [0.5], [NAN]], second=[[2.0], [2.0], [2.0]])
    words = {"first/words": [[1.0], [3.0], [5.0]]}
    got = Scored(parts, words).evaluated()
    expected = {"solved": 1 / 2, "reward": 2.75, "rewards/first/mean": 0.75,
                "rewards/second/mean": 2, "rewards/first/words": 3}  # fmt: skip
    assert {f"eval/{name}": pytest.approx(x) for name, x in expected.items()}.items() <= got.items()
    assert not any("error" in name for name in got)
    of_sets = Scored(parts, words, "xyy").evaluated()
    assert {name: x for name, x in of_sets.items() if not name.endswith(("/x", "/y"))} == got
    expected = {"solved/x": 1, "solved/y": 0, "reward/x": 3, "reward/y": 2.5,
                "rewards/first/mean/y": 0.5, "rewards/first/words/y": 4}  # fmt: skip
    assert {f"eval/{name}": x for name, x in expected.items()}.items() <= of_sets.items()
    assert len(of_sets) == 3 * len(got)


def test_failed_reward_is_not_solved_and_a_missing_one_is_counted(capsys):
    """Of three completions of each prompt one has no reward, in which its reward failed or not."""
    almost = sum([0.1] * 10)
    scored = Scored(dict(x=[[1.0, almost, NAN], [0.0, 0.9, NAN]]), sets="ab")
    errors = [{"x": "KeyError: 'y'"}, {}]
    got = scored.evaluated(errors)
    assert got["eval/solved"] == pytest.approx(2 / 5) and got["eval/solved/a"] == 2 / 3
    assert got["eval/pass_at_2"] == pytest.approx((1 + 0) / 2)
    assert (got["eval/failed"], got["eval/unscored"]) == (1, 1)
    assert (got["eval/failed/a"], got["eval/unscored/a"]) == (1, 0)
    said = "evaluation after step 7: 1 of 6 completions have a reward that failed and count as"
    assert f"{said} not solved; the first: x on a:1: KeyError: 'y'" in capsys.readouterr().out


def test_sampled_evaluation_has_pass_at_k_and_an_error_over_prompts():
    """8 samples of each of four prompts, of which 8, 4, 1 and 0 are right; two sets."""
    right_P = [8, 4, 1, 0]
    got = Scored(dict(x=[[1.0] * c + [0.0] * (8 - c) for c in right_P]), sets="aabb").evaluated()
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
    rows = ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611))
    for hits, count, low, high in rows:
        assert wilson_interval(hits / count, count) == pytest.approx((low, high), abs=5e-5)
