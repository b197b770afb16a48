"""The order of rows does not depend on the number of ranks, resumes exactly, and follows the
weights."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.groups import TrainArgs
from common.data.order import RowOrder, WeightedOrder, epochs_of, make_order


@given(st.integers(1, 30), st.integers(0, 3))
def test_every_epoch_is_a_permutation(num_rows, seed):
    order = RowOrder(num_rows, seed)
    epochs = [order.draw(num_rows) for _ in range(3)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert epochs_of(order.cursor) == dict(epoch=3)
    if num_rows > 10:
        assert epochs[0] != epochs[1] and epochs[0] != RowOrder(num_rows, seed + 1).draw(num_rows)


@given(st.integers(1, 12), st.lists(st.integers(1, 30), max_size=8))
def test_draws_do_not_depend_on_chunking(num_rows, counts):
    chunked, order = RowOrder(num_rows, 5), RowOrder(num_rows, 5)
    assert [i for count in counts for i in chunked.draw(count)] == order.draw(sum(counts))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 40))
def test_order_resumes_exactly(num_rows, before, after):
    order = RowOrder(num_rows, 5)
    order.draw(before)
    state = json.loads(json.dumps(order.state_dict()))
    expected, resumed = order.draw(after), RowOrder(num_rows, 5)
    resumed.load_state_dict(state)
    assert resumed.draw(after) == expected and resumed.cursor == order.cursor


def test_resume_with_other_rows_is_refused():
    with pytest.raises(
        ValueError, match="5 training rows, but 4 in the checkpoint; use the data and flags"
    ):
        RowOrder(5, 0).load_state_dict(RowOrder(4, 0).state_dict())


# ---- several weighted datasets ----

weights = st.lists(st.floats(0.05, 20), min_size=2, max_size=4).map(
    lambda ws: {f"d{i}": w for i, w in enumerate(ws)}
)


def mixed(sizes: list[int]) -> list[dict]:
    return [
        dict(_dataset=f"d{i}", _source=f"d{i}:{n}")
        for i, size in enumerate(sizes)
        for n in range(size)
    ]


@given(
    weights,
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_every_window_follows_the_weights(weights, sizes, before, count):
    rows, total = mixed(sizes[: len(weights)]), sum(weights.values())
    order = WeightedOrder(rows, weights, seed=3)
    order.draw(before)
    drawn = [rows[i]["_dataset"] for i in order.draw(count)]
    for name, weight in weights.items():
        assert abs(drawn.count(name) - count * weight / total) < len(weights)


@given(weights, st.lists(st.integers(0, 20), max_size=5), st.integers(1, 30))
def test_mixing_preserves_the_order_of_each_source(weights, counts, last):
    sizes = [5, 3, 7, 4][: len(weights)]
    rows = mixed(sizes)
    order, chunked = (WeightedOrder(rows, weights, seed=3) for _ in range(2))
    drawn = order.draw(sum(counts) + last)
    assert [i for count in counts for i in chunked.draw(count)] == drawn[: sum(counts)]
    resumed = WeightedOrder(rows, weights, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(chunked.state_dict())))
    assert resumed.draw(last) == drawn[sum(counts) :] and resumed.cursor == order.cursor
    epochs = epochs_of(order.cursor)
    assert epochs["epoch"] == pytest.approx(len(drawn) / len(rows))
    for i, size in enumerate(sizes):
        own = [row - sum(sizes[:i]) for row in drawn if rows[row]["_dataset"] == f"d{i}"]
        assert own == RowOrder(size, 3).draw(len(own)) and epochs[f"epoch/d{i}"] == pytest.approx(
            len(own) / size
        )


def test_flags_determine_the_order():
    rows = [dict(_source=f"a:{n}") for n in range(9)]
    for dataset in (("a",), ("a:0.3",), ("a", "b")):  # one, or several as one
        assert make_order(rows, TrainArgs(dataset=dataset, seed=4)).draw(30) == RowOrder(9, 4).draw(
            30
        )
    rows = [dict(_dataset=name) for name in "aaabb"]
    drawn = make_order(rows, TrainArgs(dataset=("x/a.jsonl:3", "b:1"))).draw(16)
    assert sum(i >= 3 for i in drawn) == 4
    with pytest.raises(ValueError, match="--dataset: no rows of c are left"):
        make_order(rows, TrainArgs(dataset=("a:3", "c:1", "b:1")))
    order = make_order(rows, TrainArgs(dataset=("a:3", "b:1")))
    with pytest.raises(ValueError, match="--dataset: 3 training rows, but 4 in the checkpoint"):
        order.load_state_dict(
            dict(sources=dict(a=RowOrder(4, 0).state_dict(), b=RowOrder(2, 0).state_dict()))
        )
