"""The statistics of eval.py equal brute-force enumeration."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from common.evaluate import estimators


def test_pass_at_k_is_the_mean_over_all_subsets():
    for n in range(1, 8):
        for c in range(n + 1):
            right = [i < c for i in range(n)]
            for k in range(1, n + 1):
                chosen = [any(subset) for subset in itertools.combinations(right, k)]
                expected = pytest.approx(sum(chosen) / len(chosen), abs=1e-12)
                assert estimators.pass_at_k(n, c, k) == expected
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"pass@{k} of 4 samples: k must be between 1 and 4"):
            estimators.pass_at_k(4, 1, k)


# Exercise 24 shows these three first: each finds one mistake.


def test_pass_at_1_is_the_fraction_of_right_samples():
    fractions = [estimators.pass_at_k(4, c, 1) for c in range(5)]
    assert fractions == pytest.approx([0, 0.25, 0.5, 0.75, 1])


def test_pass_at_k_does_not_fall_with_k():
    values = [estimators.pass_at_k(8, 3, k) for k in range(1, 9)]
    assert values == sorted(values)


def test_pass_at_n_is_1_with_a_right_sample():
    assert [estimators.pass_at_k(8, c, 8) for c in (0, 1, 8)] == [0, 1, 1]


def vote(answers: list, right: dict) -> bool:
    """Return the most frequent answer; among equally frequent ones, the first to reach the
    count."""
    counts, leader = Counter(), None
    for answer in answers:
        if answer is not None:
            counts[answer] += 1
            leader = answer if leader is None or counts[answer] > counts[leader] else leader
    return right.get(leader, False)


@pytest.mark.parametrize("answers", ["aab", "abc", "abbcc", "a-b-", "----", "b", "aabbb", ""])
def test_majority_vote_is_the_mean_over_all_orders(answers, monkeypatch):
    monkeypatch.setattr(estimators, "PERMUTATIONS", 20_000)
    answers = [None if a == "-" else a for a in answers]
    got = estimators.majority_at_k(answers, [a == "b" for a in answers], np.random.default_rng(0))
    for k in range(1, len(answers) + 1):
        orders = [vote(order, {"b": True}) for order in itertools.permutations(answers, k)]
        assert got[k - 1] == pytest.approx(sum(orders) / len(orders), abs=0.015), k


@pytest.mark.parametrize(("text", "answer"), [
    (r"so \boxed{1,000.0}", "1000"), (r"\boxed{x + 1} ", "x+1"), ("6*3=18\n#### 18", "18"),
    (" 0.50 ", "1/2"), ("118", "118"), ("", None), (" \n", None), (r"#### 7 no \boxed{8}", "8"),
    ("So the answer is **B**.", "B"), ("答案是B。", "B"), ("7\nAnswer: 1/2", "1/2"),
    ("Answer：0.5", "1/2"), (r"\boxed{3,5}", "3,5"), (r"\boxed{1 2}", "1 2"),
    (r"\boxed{12}", "12"), ("#### 18 or 20", "18or20"),
    ("Options:\nA: 12 km\nB: 15 km\nThe answer is B.", "B"), ("A: 12\nB: 15\nA: 12", "12"),
    ("Options: A: 12 km, B: 15 km. Answer: B", "B"), ("Option A: 12\nOption B: 15\n#### 15", "15"),
])  # fmt: skip
def test_final_answer_is_extracted_from_the_text(text, answer):
    assert estimators.final_answer(text) == answer


def test_intervals_contain_the_mean_and_narrow_with_more_prompts():
    rng = random.Random(0)
    widths = []
    for count in (50, 5000):
        xs = [float(rng.random() < 0.3) for _ in range(count)]
        found = estimators.mean_and_interval(xs, [1.0] * count, draws=1000, seed=0)
        assert found == estimators.mean_and_interval(xs, [1.0] * count, draws=1000, seed=0)
        normal = 1.96 * math.sqrt(found["mean"] * (1 - found["mean"]) / count)
        assert found["mean"] == pytest.approx(sum(xs) / count)
        assert found["high"] - found["mean"] == pytest.approx(normal, rel=0.25)
        assert found["mean"] - found["low"] == pytest.approx(normal, rel=0.25)
        widths.append(found["high"] - found["low"])
    assert widths[1] < widths[0] / 5
    weighted = estimators.mean_and_interval([1.0, 6.0], [1, 2], draws=10, seed=0)
    assert weighted["mean"] == pytest.approx(7 / 3)
    assert estimators.mean_and_interval([0.0], [0], draws=10, seed=0) == {}


def test_sample_whose_reward_failed_votes():
    rng = np.random.default_rng(0)
    assert estimators.majority_at_k(["b", "b", "c"], [None, True, False], rng)[2] == 1
    assert estimators.majority_at_k(["b", "b", "c"], [None, None, True], rng)[2] == 0
    assert estimators.wins([[0.1 + 0.2]], [[0.3]]) == ([0.5], [1])


def test_win_rate_counts_ties_as_halves_and_ignores_missing_rewards():
    ours, theirs = [[1.0, 2.0], [None, 0.5], [None]], [[0.0, 2.0], [1.0, 0.7], [3.0]]
    assert estimators.wins(ours, theirs) == ([1.5, 0, 0], [2, 1, 0])
