"""Which rows each step draws. The order is the same on any number of ranks: each rank takes its
part of a batch."""

import math
import random
from collections.abc import Sequence

from common.config.flags import sources_of
from common.config.groups import TrainArgs
from common.parallel import distributed


class Order:
    """Infinite sequence of row numbers from one source, or from several with weights. Every rank
    has the same state.

    The next row is from the source that has had too few rows so far, by its weight. So any stretch
    of rows follows the weights to within one or two rows. Each pass over a source is a new
    permutation, which does not depend on the other sources."""

    def __init__(
        self, numbers: dict[str, Sequence[int]], seed: int, weights: dict[str, float] | None = None
    ):
        """`numbers`: row numbers of each source. Raises `ValueError` for a source without rows."""
        for name in numbers:
            if not numbers[name]:
                raise ValueError(f"--dataset: no rows of {name} are left")
        weights = weights or dict.fromkeys(numbers, 1.0)
        total = math.fsum(weights.values())
        self.weights = {name: weights[name] / total for name in numbers}
        self.numbers = numbers
        self.seed = seed
        self.drawn = dict.fromkeys(numbers, 0)
        self.passes: dict[str, list[int]] = {}  # each source in the order of this pass

    def draw(self, count: int) -> list[int]:
        """Return the numbers of the next `count` rows, across the end of a pass."""
        numbers = []
        first = sum(self.drawn.values()) + 1
        for nth in range(first, first + count):
            lack = {x: self.weights[x] * nth - self.drawn[x] for x in self.numbers}
            name = max(lack, key=lack.__getitem__)
            epoch, place = divmod(self.drawn[name], len(self.numbers[name]))
            self.drawn[name] += 1
            if place == 0 or name not in self.passes:
                seed = distributed.fold_seed(self.seed, epoch, *name.encode())
                self.passes[name] = list(self.numbers[name])
                random.Random(seed).shuffle(self.passes[name])
            numbers.append(self.passes[name][place])
        return numbers

    def state_dict(self) -> dict:
        """Return how many rows of each source were drawn, and how many it has."""
        return dict(sources={x: [self.drawn[x], len(self.numbers[x])] for x in self.numbers})

    def epochs(self) -> dict[str, float]:
        """Return the passes over the data so far: the metrics `epoch` and, with several sources,
        `epoch/<name>`."""
        total = sum(self.drawn.values()) / sum(map(len, self.numbers.values()))
        named = {f"epoch/{x}": self.drawn[x] / len(self.numbers[x]) for x in self.numbers if x}
        return dict(epoch=total) | named

    def load_state_dict(self, state: dict) -> None:
        """Restore the position. Raises `ValueError` if the data has changed."""
        then = {name: size for name, (_, size) in state["sources"].items()}
        now = {name: len(numbers) for name, numbers in self.numbers.items()}
        if then != now:
            then, now = ("+".join(map(str, sizes.values())) for sizes in (then, now))
            problem = f"{now} training rows, but {then} in the checkpoint"
            raise ValueError(f"--dataset: {problem}; use the data and flags of that run")
        self.drawn = {name: drawn for name, (drawn, _) in state["sources"].items()}
        self.passes = {}


def make_order(rows: Sequence[dict], args: TrainArgs) -> Order:
    """Return the order in which a run draws `rows`, by the weights of `--dataset`."""
    sources = sources_of(args.dataset)
    if len(sources) == 1:
        return Order({"": range(len(rows))}, args.seed)
    numbers: dict[str, list[int]] = {name: [] for name in sources}
    for number, row in enumerate(rows):
        numbers[row["_dataset"]].append(number)
    return Order(numbers, args.seed, {name: weight for name, (_, weight) in sources.items()})
