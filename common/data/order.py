"""Order of the training rows. It does not depend on the number of ranks: each rank takes its share
of a batch."""

import math
import random
from collections.abc import Sequence

from common.config.groups import TrainArgs
from common.data.rows import sources_of
from common.parallel import distributed


class RowOrder:
    """Infinite sequence of row numbers, with a new permutation each epoch. Every rank has the same
    state."""

    def __init__(self, num_rows: int, seed: int):
        self.num_rows = num_rows
        self.seed = seed
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
                self.epoch += 1
                self.index = 0
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
            problem = f"{self.num_rows} training rows, but {state['num_rows']} in the checkpoint"
            raise ValueError(f"--dataset: {problem}; use the data and flags of that run")
        self.epoch = state["epoch"]
        self.index = state["index"]
        self._shuffle()


class WeightedOrder:
    """Infinite sequence of row numbers from several sources with weights. Every rank has the same
    state.

    The next row is from the source that is furthest behind its weight, so that every interval
    follows the weights up to one or two rows. The order within a source does not depend on the
    other sources."""

    def __init__(self, rows: Sequence[dict], weights: dict[str, float], seed: int):
        """Divide the rows by `_dataset`, the keys of `weights`. Raises `ValueError` for a source
        without rows."""
        self.rows: dict[str, list[int]] = {name: [] for name in weights}
        for i, row in enumerate(rows):
            self.rows[row["_dataset"]].append(i)
        for name, numbers in self.rows.items():
            if not numbers:
                raise ValueError(f"--dataset: no rows of {name} are left")
        total = math.fsum(weights.values())
        self.shares = {name: weight / total for name, weight in weights.items()}
        self.orders = {name: RowOrder(len(rows), seed) for name, rows in self.rows.items()}

    def draw(self, count: int) -> list[int]:
        """Return the next `count` rows."""
        drawn = {name: rows_drawn(order.state_dict()) for name, order in self.orders.items()}
        rows: list[int] = []
        for _ in range(count):
            number = sum(drawn.values()) + 1
            behind = {name: share * number - drawn[name] for name, share in self.shares.items()}
            name = max(behind, key=behind.get)
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


def rows_drawn(state: dict) -> int:
    """Return the number of rows drawn, from the state of a `RowOrder`."""
    return state["epoch"] * state["num_rows"] + state["index"]


def epochs_of(cursor: dict) -> dict[str, float]:
    """Return the passes over the data, from an order's state: the metrics `epoch` and, per source,
    `epoch/<name>`."""
    if "sources" not in cursor:
        return dict(epoch=cursor["epoch"] + cursor["index"] / cursor["num_rows"])
    sources = cursor["sources"]
    drawn = sum(map(rows_drawn, sources.values()))
    epochs = {f"epoch/{name}": epochs_of(state)["epoch"] for name, state in sources.items()}
    return dict(epoch=drawn / sum(state["num_rows"] for state in sources.values())) | epochs
