"""Order of the training rows. It does not depend on the number of ranks: each rank takes its share of a batch."""

import math
import random
from collections.abc import Sequence

from common.config.groups import TrainArgs
from common.data.rows import sources_of
from common.parallel import distributed


class RowOrder:
    """Infinite sequence of row numbers, with a new permutation each epoch. Every rank has the same state."""

    def __init__(self, num_rows: int, seed: int):
        self.num_rows, self.seed = num_rows, seed
        self.epoch = self.index = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self._order = list(range(self.num_rows))
        random.Random(distributed.fold_seed(self.seed, self.epoch)).shuffle(self._order)

    def draw(self, count: int) -> list[int]:
        """Return the next `count` rows, across the end of an epoch."""
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
        """Restore the position. Raises `ValueError` if the number of rows has changed."""
        if state["num_rows"] != self.num_rows:
            found = f"{self.num_rows} training rows, but {state['num_rows']} in the checkpoint"
            raise ValueError(f"--dataset: {found}; use the data and flags of that run")
        self.epoch, self.index = state["epoch"], state["index"]
        self._shuffle()


class WeightedOrder:
    """Infinite sequence of row numbers from several sources with weights. Every rank has the same state.

    The next row is from the source that is furthest behind its weight, so that every interval follows the weights up to
    one or two rows. The order within a source does not depend on the other sources.
    """

    def __init__(self, rows: Sequence[dict], weights: dict[str, float], seed: int):
        """Divide the rows by `_dataset`, the keys of `weights`. Raises `ValueError` for a source without rows."""
        self.rows: dict[str, list[int]] = {name: [] for name in weights}
        for i, row in enumerate(rows):
            self.rows[row["_dataset"]].append(i)
        if empty := [name for name, found in self.rows.items() if not found]:
            raise ValueError(f"--dataset: no rows of {empty[0]} are left")
        self.parts = {name: weight / math.fsum(weights.values()) for name, weight in weights.items()}
        self.orders = {name: RowOrder(len(found), seed) for name, found in self.rows.items()}

    def draw(self, count: int) -> list[int]:
        """Return the next `count` rows."""
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
        """Restore the positions. Raises `ValueError` if a source's number of rows has changed."""
        for name, order in self.orders.items():
            order.load_state_dict(state["sources"][name])


Order = RowOrder | WeightedOrder


def make_order(rows: Sequence[dict], args: TrainArgs) -> Order:
    """Return the order in which a run draws `rows`, by the weights of `--dataset`."""
    sources = sources_of(args.dataset)
    if len(sources) == 1:
        return RowOrder(len(rows), args.seed)
    return WeightedOrder(rows, {name: weight for name, (_, weight) in sources.items()}, args.seed)


def epochs_of(cursor: dict) -> dict[str, float]:
    """Return the passes over the data, from an order's state: the metrics `epoch` and, per source, `epoch/<name>`."""
    sources = cursor.get("sources", {"": cursor})
    drawn = {name: state["epoch"] * state["num_rows"] + state["index"] for name, state in sources.items()}
    passes = {name: state["epoch"] + state["index"] / state["num_rows"] for name, state in sources.items()}
    if len(sources) == 1:
        return dict(epoch=passes[""])
    total = sum(state["num_rows"] for state in sources.values())
    return dict(epoch=sum(drawn.values()) / total) | {f"epoch/{name}": done for name, done in passes.items()}
