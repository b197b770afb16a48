"""The order of rows does not depend on the number of ranks, resumes exactly, and follows the
weights."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.groups import TrainArgs
from common.packs.order import Order, make_order

# the rows of one to four sources, with weights
SOURCES = st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20)), min_size=1, max_size=4)


def order_of(sources: list[tuple[int, float]], seed: int = 3) -> Order:
    starts = [sum(size for size, _ in sources[:i]) for i in range(len(sources))]
    rows = {
        f"d{i}": range(start, start + size)
        for i, (start, (size, _)) in enumerate(zip(starts, sources, strict=True))
    }
    return Order(rows, seed, {f"d{i}": weight for i, (_, weight) in enumerate(sources)})


@given(SOURCES, st.integers(0, 60), st.integers(1, 60))
def test_every_window_follows_the_weights(sources, before, count):
    order, total = order_of(sources), sum(weight for _, weight in sources)
    order.draw(before)
    drawn = order.draw(count)
    for rows, (_, weight) in zip(order.numbers.values(), sources, strict=True):
        of_source = sum(row in rows for row in drawn)
        assert abs(of_source - count * weight / total) < max(len(sources), 1 + 1e-6)


@given(SOURCES, st.integers(0, 3))
def test_every_pass_is_a_permutation_that_no_other_source_changes(sources, seed):
    order = order_of(sources, seed)
    drawn = order.draw(100)
    epochs = order.epochs()
    assert epochs["epoch"] == pytest.approx(100 / sum(size for size, _ in sources))
    for name, rows in order.numbers.items():
        own = [row for row in drawn if row in rows]
        assert own == Order({name: rows}, seed).draw(len(own))
        assert epochs[f"epoch/{name}"] == pytest.approx(len(own) / len(rows))
        for start in range(0, len(own) - len(rows) + 1, len(rows)):
            assert sorted(own[start : start + len(rows)]) == list(rows)


@given(SOURCES, st.lists(st.integers(0, 20), max_size=5), st.integers(1, 30))
def test_order_resumes_exactly(sources, counts, last):
    """Nor does it depend on how many rows are drawn together."""
    order, whole = order_of(sources), order_of(sources).draw(sum(counts) + last)
    assert [row for count in counts for row in order.draw(count)] == whole[: sum(counts)]
    resumed = order_of(sources)
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert resumed.draw(last) == order.draw(last) == whole[sum(counts) :]
    assert resumed.state_dict() == order.state_dict() and resumed.epochs() == order.epochs()


def test_passes_seeds_and_sources_have_permutations_of_their_own():
    """Parallel files, such as translations, are not drawn in step."""
    draws = [Order({"": range(12)}, seed).draw(24) for seed in (0, 1)]
    of_two = Order({"x": range(12), "y": range(12, 24)}, 0).draw(24)
    draws += [[row for row in of_two if row < 12], [row - 12 for row in of_two if row >= 12]]
    assert len({tuple(pass_) for rows in draws for pass_ in (rows[:12], rows[12:]) if pass_}) == 6


def test_flags_determine_the_order():
    rows = [dict(_dataset=name) for name in "aaabb"]
    for dataset in (("a",), ("a:0.3",), ("a", "b")):  # one, or several as one
        order = make_order(rows, TrainArgs(dataset=dataset, seed=4))
        assert order.draw(30) == Order({"": range(5)}, 4).draw(30)
        assert order.epochs() == dict(epoch=6)
    order = make_order(rows, TrainArgs(dataset=("x/a.jsonl:3", "b:1")))
    assert sum(row >= 3 for row in order.draw(16)) == 4
    with pytest.raises(ValueError, match="--dataset: no rows of c are left"):
        make_order(rows, TrainArgs(dataset=("a:3", "c:1", "b:1")))
    with pytest.raises(
        ValueError, match=r"--dataset: 3\+2 training rows, but 4\+2 in the checkpoint; use the data"
    ):
        order.load_state_dict(dict(sources=dict(a=[7, 4], b=[2, 2])))
