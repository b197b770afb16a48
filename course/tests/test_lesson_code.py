"""Rewards, rows and sums of course/lessons equal their definitions."""

import math
import runpy
import string
from collections import Counter
from itertools import combinations
from statistics import mean

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

from common.rewards.functions import gsm8k_flexible

COUNTS = runpy.run_path(str(ROOT / "course/lessons/counts.py"))
ROWS = runpy.run_path(str(ROOT / "course/lessons/rows.py"))
SPLITS, CHAINS, split = ROWS["splits"](), ROWS["chains"](), COUNTS["split"]
BEST = runpy.run_path(str(ROOT / "course/lessons/best_of_n.py"))


def test_counts_of_a_group():
    scored = COUNTS["splits"](["40+7", "40+7", "1+46", "40+8"], dict(target=47))
    assert scored == [(reward, dict(distinct=2, any_right=1)) for reward in (1, 1, 1, 0)]
    assert COUNTS["splits"](["47"], dict(target=47)) == [(0, dict(distinct=0, any_right=0))]


pair = st.tuples(st.floats(-5, 5), st.floats(0, 1))


@given(st.lists(pair, min_size=1, max_size=7, unique_by=lambda pair: pair[0]))
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


@pytest.mark.parametrize(("rows", "reward"), [(SPLITS, split), (CHAINS, gsm8k_flexible)])
def test_demonstrations_are_partly_right_and_pairs_always(rows, reward):
    train, test = rows["train"], rows["test"]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert len({row["prompt"] for row in test}) == len(test)
    for row in train + test:
        assert (reward(row["chosen"], row), reward(row["rejected"], row)) == (1, 0)
        text = row["prompt"] + row["completion"] + row["chosen"] + row["rejected"]
        assert set(text) <= set(string.printable)
    assert 0.3 < mean(reward(row["completion"], row) for row in train) < 0.7


def test_a_number_has_many_right_splits():
    rows = [row for row in SPLITS["train"] if split(row["completion"], row)]
    right = {(row["prompt"], row["completion"]) for row in rows}
    for prompt, completion in right:
        assert int(prompt[:-1]) == sum(map(int, completion.split("+")))
    assert min(Counter(prompt for prompt, _ in right).values()) >= 10


def test_chains_have_many_lengths_and_lose_only_carries():
    """Right demonstrations have more checks on average, but right and wrong ones have every number
    of them."""
    rows = CHAINS["train"]
    checks: dict[float, list[int]] = {0: [], 1: []}  # by reward
    for row in rows:
        checks[gsm8k_flexible(row["completion"], row)].append(row["completion"].count("?"))
    lengths = {len(row["completion"]) for row in rows}  # without EOS
    assert lengths == set(range(9, 39, 2)) - {11, 35}
    assert mean(checks[1]) > 1.5 * mean(checks[0])
    assert all(checks[worth].count(n) > 10 for worth in checks for n in range(5))
    for row in rows:
        assert str(eval(row["prompt"].rstrip("="))) == row["answer"]
        chain, *repeated = row["completion"].split("?")
        first, *steps = chain.replace("=", "+").split("+")
        terms, sums = steps[::2], [first, *steps[1::2]]
        assert "+".join([first, *terms]) + "=" == row["prompt"]
        assert {*repeated} <= {sums[-1]}  # a check repeats the sum
        columns = (map(int, texts) for texts in (sums[:-1], terms, sums[1:]))
        for before, term, after in zip(*columns, strict=True):
            right = before + term
            assert after in (right, right - 10 * (before // 10 != right // 10))


@pytest.mark.parametrize(("completion", "reward"), [
    ("40+7", 1), ("7+40", 1), ("1+46", 1), (" 46+1\n", 1), ("40+8", 0), ("0+47", 0), ("47+0", 0),
    ("007+40", 0), ("48+-1", 0), ("40+7+0", 0), ("40 + 7", 0), ("47", 0), ("", 0), ("40+7=47", 0),
    ("٤٠+7", 0), ("50-3", 0),
])  # fmt: skip
def test_split_accepts_every_pair_with_the_sum_in_one_form(completion, reward):
    assert split(completion, dict(target=47)) == reward


@given(st.integers(2, 10**6), st.data())
def test_split_accepts_all_pairs(n, data):
    a = data.draw(st.integers(1, n - 1))
    assert split(f"{a}+{n - a}", dict(target=n)) == 1
    assert split(f"{a}+{n - a + 1}", dict(target=n)) == split(f"0{a}+{n - a}", dict(target=n)) == 0
