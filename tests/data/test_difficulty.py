"""Estimates of difficulty equal a naive posterior, draws are exactly proportional to them, and both
continue after a resume."""

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.difficulty import DifficultyOrder, systematic
from common.data.order import epochs_of

SIZE, COMPLETIONS = 6, 4
results = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, COMPLETIONS)), max_size=5)
rollouts = st.lists(results.filter(len), max_size=6)


def order(floor: float = 0.1, half_life: float = 0.5, rows: int = SIZE) -> DifficultyOrder:
    return DifficultyOrder([{} for _ in range(rows)], 7, floor, half_life)


def learn(order: DifficultyOrder, step: int, results: list[tuple[int, int]]) -> None:
    rows = [row for row, _ in results]
    order.learn(step, rows, torch.tensor([[n, COMPLETIONS - n] for _, n in results]))


def naive_probabilities(rollouts: list, floor: float, half_life: float) -> list[float]:
    """Return the probabilities by Bayes' rule on a grid of p, with each result raised to the power
    of its weight."""
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    ages = [sum(map(len, rollouts[i + 1 :])) for i in range(len(rollouts))]
    variances = []
    for row in range(SIZE):
        log_posterior = torch.zeros_like(grid)  # uniform
        for age, results in zip(ages, rollouts, strict=True):
            for drawn, solved in results:
                if drawn == row:
                    log_likelihood = solved * grid.log() + (COMPLETIONS - solved) * (1 - grid).log()
                    log_posterior += 2 ** -(age / SIZE / half_life) * log_likelihood
        variances.append(float((log_posterior.softmax(0) * grid * (1 - grid)).sum()))
    return [(1 - floor) * v / sum(variances) + floor / SIZE for v in variances]


@settings(max_examples=20)
@given(rollouts, st.floats(0, 1), st.floats(0.1, 10))
def test_probabilities_equal_a_naive_posterior(rollouts, floor, half_life):
    learned = order(floor, half_life)
    for step, results in enumerate(rollouts):
        learn(learned, step, results)
    assert learned.probabilities().tolist() == pytest.approx(
        naive_probabilities(rollouts, floor, half_life), rel=1e-4
    )


@settings(max_examples=40)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.integers(1, 12))
def test_draws_are_exactly_proportional(weights, count):
    """The rows that are drawn change at finitely many offsets: sum over the intervals between."""
    weights_N = torch.tensor(weights, dtype=torch.float64)
    expected = count * weights_N / weights_N.sum()
    ends = sorted({0.0, 1.0, *(expected.cumsum(0) % 1).tolist()})
    drawn = torch.zeros_like(weights_N)
    for low, high in pairwise(ends):
        counts = systematic(weights_N, count, (low + high) / 2).bincount(minlength=len(weights))
        drawn += (high - low) * counts.double()
        if high - low > 1e-9:
            assert ((counts - expected).abs() < 1).all(), "rounded down or up"
    assert drawn.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def test_draws_cover_all_rows_and_prefer_those_that_are_sometimes_solved():
    learned = order(floor=0.1)
    learn(learned, 0, [(0, 2), (1, 4), (2, 0)] * 5)
    counts = Counter(row for _ in range(300) for row in learned.draw(2))
    assert counts.keys() == set(range(SIZE)) and max(counts, key=counts.get) == 0
    expected = (600 * learned.probabilities()).tolist()
    chi_square = sum((counts[row] - x) ** 2 / x for row, x in enumerate(expected))
    assert chi_square < 11.07, "95% quantile with 5 degrees of freedom; less, as draws are spread"
    assert epochs_of(learned.cursor) == dict(epoch=100)


def test_order_of_a_draw_is_random_and_equal_rows_are_drawn_once():
    drawn = order(rows=40).draw(40)
    assert sorted(drawn) == list(range(40)) and drawn != sorted(drawn)
    assert order(rows=40).draw(40) == drawn != DifficultyOrder([{}] * 40, 8, 0.1, 1.0).draw(40)


def test_solved_row_comes_back():
    """Even if all others are learnable: its old results fade."""
    learned = order()
    learn(learned, 0, [(0, COMPLETIONS)] * 4)
    probabilities = [float(learned.probabilities()[0])]
    for step in range(1, 7):
        learn(learned, step, [(row, 2) for row in range(1, SIZE)])
        probabilities.append(float(learned.probabilities()[0]))
    assert probabilities[0] < 0.5 / SIZE < 0.7 / SIZE < probabilities[-1]


@settings(max_examples=20)
@given(rollouts)
def test_undone_step_leaves_no_trace(rollouts):
    """A step may have several rollouts."""
    learned = order()
    learn(learned, 0, [(1, 3)])
    before = json.dumps(learned.state_dict())
    learned.undo_step(1)
    assert json.dumps(learned.state_dict()) == before, "its first rollout was stopped"
    for results in rollouts:
        learn(learned, 1, results)
    learned.undo_step(1)
    assert json.dumps(learned.state_dict()) == before


@settings(max_examples=20)
@given(rollouts, st.integers(0, 9), st.integers(1, 9))
def test_order_resumes_exactly(rollouts, before, after):
    learned, resumed = order(), order()
    learned.draw(before)
    for step, results in enumerate(rollouts):
        learn(learned, step, results)
    resumed.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    assert resumed.draw(after) == learned.draw(after)
    learn(learned, 9, [(0, 1), (0, 2)])
    learn(resumed, 9, [(0, 1), (0, 2)])
    assert resumed.state_dict() == learned.state_dict()


def test_earlier_results_are_where_estimates_start():
    started = DifficultyOrder([{"_pass_counts": (3, 1)}, {}], 7, 0.1, 1.0)
    learned = order(rows=2)
    learn(learned, 0, [(0, 3)])
    assert started.probabilities().equal(learned.probabilities())


def test_metrics():
    learned = order(floor=0.0, half_life=1e9, rows=4)
    assert learned.metrics() == {
        "draw/success": 0.5,
        "draw/effective_prompts": pytest.approx(4),
        "draw/solved_fraction": 0.0,
    }
    learn(learned, 0, [(0, 4), (0, 4), (0, 4), (1, 0)])
    found = learned.metrics()
    assert found["draw/success"] == pytest.approx((13 / 14 + 1 / 6 + 1 / 2 + 1 / 2) / 4)
    assert found["draw/solved_fraction"] == 0.5
    assert found["draw/effective_prompts"] == pytest.approx(
        1 / sum(q * q for q in naive_metrics([13 / 14 / 15, 5 / 6 / 7, 1 / 6, 1 / 6]))
    )


def naive_metrics(variances: list[float]) -> list[float]:
    return [variance / sum(variances) for variance in variances]
