"""Rewards and sums of docs/lessons equal their definitions."""

import math
import runpy
from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

COUNTS = runpy.run_path(str(ROOT / "docs/lessons/counts.py"))
BEST = runpy.run_path(str(ROOT / "docs/lessons/best_of_n.py"))


def test_counts_of_a_group():
    scored = COUNTS["splits"](["40+7", "40+7", "1+46", "40+8"], dict(target=47))
    assert scored == [(reward, dict(distinct=2, any_right=1)) for reward in (1, 1, 1, 0)]
    assert COUNTS["splits"](["47"], dict(target=47)) == [(0, dict(distinct=0, any_right=0))]


def test_lengths_of_right_and_wrong_chains():
    row = dict(answer="264")
    assert COUNTS["chains"]("247+9=256+8=264?264", row, [5] * 20) == (
        1,
        dict(right_length=20, right_checks=1),
    )
    assert COUNTS["chains"]("247+9=256+8=254", row, [5] * 16) == (
        0,
        dict(wrong_length=16, wrong_checks=0),
    )


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.floats(0, 1)),
        min_size=1,
        max_size=7,
        unique_by=lambda pair: pair[0],
    )
)
def test_best_of_n_is_the_mean_over_all_choices(pairs):
    score_S, value_S = np.array(pairs).T
    for n in range(1, len(pairs) + 1):
        expected = mean(max(choice)[1] for choice in combinations(pairs, n))
        assert BEST["best_of"](n, score_S, value_S) == pytest.approx(expected)


def test_slope_of_the_score_is_within_prompts_and_truths():
    length, truth = np.array([1.0, 3.0, 2.0, 6.0]), np.array([0, 0, 1, 1])
    groups = [
        dict(length=length + shift, truth=truth, proxy=0.5 * length + 9 * truth + shift)
        for shift in (0, 5)
    ]
    assert BEST["score_per_token"](groups) == pytest.approx(0.5)
    assert math.isnan(
        BEST["score_per_token"]([dict(length=np.ones(2), truth=np.ones(2), proxy=np.ones(2))])
    )
