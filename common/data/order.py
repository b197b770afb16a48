"""The order in which rows are drawn. It never depends on the number of ranks: each takes its share of every batch."""

import math
import random
from collections.abc import Sequence

from common.config.groups import TrainArgs
from common.data.rows import sources_of
from common.parallel import distributed


class RowOrder:
    """An endless stream of row indices, each epoch a new permutation. Its state, (epoch, index), is every rank's."""

    def __init__(self, num_rows: int, seed: int):
        self.num_rows, self.seed = num_rows, seed
        self.epoch = self.index = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self._order = list(range(self.num_rows))
        random.Random(distributed.fold_seed(self.seed, self.epoch)).shuffle(self._order)

    def draw(self, count: int) -> list[int]:
        """The next `count` rows; goes on into the next epoch where this one ends."""
        rows: list[int] = []
        while len(rows) < count:
            if self.index == self.num_rows:
                self.epoch, self.index = self.epoch + 1, 0
                self._shuffle()
            taken = self._order[self.index : self.index + count - len(rows)]
            self.index += len(taken)
            rows += taken
        return rows

    @property
    def cursor(self) -> dict:
        return self.state_dict()

    def state_dict(self) -> dict:
        return dict(epoch=self.epoch, index=self.index, num_rows=self.num_rows)

    def load_state_dict(self, state: dict) -> None:
        """Raises `ValueError` if the order was of another number of rows: the data has changed."""
        if state["num_rows"] != self.num_rows:
            was, now = state["num_rows"], self.num_rows
            raise ValueError(f"the checkpoint is of {was} training rows, now there are {now}: other data or flags")
        self.epoch, self.index = state["epoch"], state["index"]
        self._shuffle()


class WeightedOrder:
    """An endless stream of row indices from several sources, each in the order that it would have alone.

    The next row is always of the source that is furthest behind its weight, so that any stretch of the stream has each
    weight's part of rows, to a row or two. Its state, the sources', is every rank's.
    """

    def __init__(self, rows: Sequence[dict], weights: dict[str, float], seed: int):
        """`weights` by what rows have in `_dataset`. Raises `ValueError` for a source without rows."""
        self.rows: dict[str, list[int]] = {name: [] for name in weights}
        for i, row in enumerate(rows):
            self.rows[row["_dataset"]].append(i)
        if empty := [name for name, found in self.rows.items() if not found]:
            raise ValueError(f"--dataset: no rows of {empty[0]} are left")
        self.parts = {name: weight / math.fsum(weights.values()) for name, weight in weights.items()}
        self.orders = {name: RowOrder(len(found), seed) for name, found in self.rows.items()}

    def draw(self, count: int) -> list[int]:
        """The next `count` rows."""
        drawn = {name: order.epoch * order.num_rows + order.index for name, order in self.orders.items()}
        rows: list[int] = []
        for number in range(sum(drawn.values()) + 1, sum(drawn.values()) + 1 + count):
            name = max(self.parts, key=lambda name: self.parts[name] * number - drawn[name])  # noqa: B023
            drawn[name] += 1
            rows.append(self.rows[name][self.orders[name].draw(1)[0]])
        return rows

    @property
    def cursor(self) -> dict:
        return self.state_dict()

    def state_dict(self) -> dict:
        return dict(sources={name: order.state_dict() for name, order in self.orders.items()})

    def load_state_dict(self, state: dict) -> None:
        """Raises `ValueError` if a source had another number of rows: the data has changed."""
        for name, order in self.orders.items():
            order.load_state_dict(state["sources"][name])


def make_order(rows: Sequence[dict], args: TrainArgs) -> RowOrder | WeightedOrder:
    """The order in which a run draws `rows`, those that samples were made of, as the weights in `--dataset` say."""
    sources = sources_of(args.dataset)
    if len(sources) == 1:
        return RowOrder(len(rows), args.seed)
    return WeightedOrder(rows, {name: weight for name, (_, weight) in sources.items()}, args.seed)


def epochs_of(cursor: dict) -> dict[str, float]:
    """Passes over the data up to the state of an order, as metrics: `epoch`, and where it has sources that of each."""
    sources = cursor.get("sources", {"": cursor})
    drawn = {name: state["epoch"] * state["num_rows"] + state["index"] for name, state in sources.items()}
    passes = {name: state["epoch"] + state["index"] / state["num_rows"] for name, state in sources.items()}
    if len(sources) == 1:
        return dict(epoch=passes[""])
    total = sum(state["num_rows"] for state in sources.values())
    return dict(epoch=sum(drawn.values()) / total) | {f"epoch/{name}": done for name, done in passes.items()}
