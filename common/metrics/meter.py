"""Numbers collected over the micro-batches and ranks of one step."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from common.data.packing import PackedBatch
from common.parallel import distributed

Keep = Callable[[PackedBatch, dict[str, Tensor], dict[str, Tensor]], None]


class Meter:
    """Accumulator of metrics over the micro-batches and ranks of one step. The split of the batch
    does not change the global value, because sums and weights are added up before the division."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[str, list]] = {}
        self.started: dict[str, float] = {}
        self.keep: Keep | None = None  # gets values of tokens, samples or pairs for a trace

    def _entry(self, kind: str, name: str) -> list:
        entry = self.values.setdefault(name, (kind, []))
        assert entry[0] == kind, f"{name} is both {entry[0]} and {kind}"
        return entry[1]

    def mean(self, name: str, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add to a mean: sum of `total` / sum of `weight`."""
        self._entry("mean", name).append((total, weight))

    def masked_mean(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Add to the mean over the tokens in the mask."""
        self.mean(name, (values_T.detach() * mask_T).sum(), mask_T.sum())

    def tokens(
        self, mb: PackedBatch, values_T: dict[str, Tensor], share_T: Tensor | None = None
    ) -> None:
        """Add to the mean of each stream over the trained tokens of a micro-batch. `share_T`: the
        part of the loss that each token adds, for the trace."""
        for name, x_T in values_T.items():
            self.masked_mean(name, x_T, mb.loss_mask_T)
        if self.keep is not None:
            self.keep(mb, values_T | ({} if share_T is None else dict(share=share_T)), {})

    def rows(
        self, mb: PackedBatch, values_N: dict[str, Tensor], share_N: Tensor | None = None, prefix=""
    ) -> None:
        """Add to the mean of each value over the samples of a micro-batch, or over its pairs: [N]
        or [N / 2]. The name of the metric has the `prefix`. `share_N`: the part of the loss that
        each adds, for the trace."""
        for name, x_N in values_N.items():
            self.mean(prefix + name, x_N.detach().sum(), len(x_N))
        if self.keep is not None:
            self.keep(mb, {}, values_N | ({} if share_N is None else dict(share=share_N)))

    def sum(self, name: str, value: float) -> None:
        self._entry("sum", name).append((value, 0.0))

    def std(self, name: str, values: Tensor) -> None:
        """Add to the standard deviation (division by n) of all values."""
        self._entry("std", name).append((values.sum(), len(values), values.square().sum()))

    def standard_error(self, name: str, value: Tensor) -> None:
        """Add a value to the standard error of the mean of all values."""
        self._entry("stderr", name).append((value, 1.0, value.square()))

    def effective_fraction(self, name: str, weights: Tensor, mask: Tensor) -> None:
        """Add to the effective sample size of importance weights, as a fraction: (mean w)^2 / mean
        w^2."""
        weights = torch.where(mask, weights, 0.0)
        self._entry("ess", name).append((weights.sum(), mask.sum(), weights.square().sum()))

    def max(self, name: str, value: Tensor | float) -> None:
        self._entry("max", name).append((value, 0.0))

    def min(self, name: str, value: Tensor | float) -> None:
        self._entry("min", name).append((value, 0.0))

    def start(self, name: str) -> None:
        """Start the clock of `name`; `stop` adds the seconds to `time/name`."""
        self.started[name] = _now()

    def stop(self, name: str) -> None:
        """Add the seconds since `start` to `time/name`: the sum over a step, on the slowest
        rank."""
        seconds = _now() - self.started.pop(name)
        self._entry("time", f"time/{name}").append((seconds, 0.0))

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Measure the seconds spent inside as `time/name`."""
        self.start(name)
        yield
        self.stop(name)

    def add(self, other: "Meter", end: str = "") -> None:
        """Add the values of another meter, with `end` appended to their names."""
        for name, (kind, rows) in other.values.items():
            self._entry(kind, name + end).extend(rows)

    def reduce(self) -> dict[str, float]:
        """Return the global values of everything added since the last call, by name. Collective.

        Means with a total weight of 0 are omitted.
        """
        rows = chain(*(rows for _, rows in self.values.values()))
        numbers = iter(_on_the_host([*chain(*rows)]))
        totals = {}  # of this rank, by name
        for name, (kind, rows) in self.values.items():
            first, *others = zip(*([next(numbers) for _ in row] for row in rows), strict=True)
            combine = dict(max=max, min=min).get(kind, math.fsum)
            totals[name] = (kind, combine(first), *map(math.fsum, others))
        self.values = {}
        totals_of_ranks = defaultdict(list)
        for rank_totals in distributed.gather_objects(totals):
            for name, total in rank_totals.items():
                totals_of_ranks[name].append(total)
        values = {}
        for name, total_of_each in totals_of_ranks.items():
            kinds, *columns = zip(*total_of_each, strict=True)
            value = _combined(kinds[0], *columns)
            if value is not None:
                values[name] = value
        return values


def evaluate_sets(samples: Sequence, evaluate: Callable[[list[int]], Meter]) -> dict[str, float]:
    """Return the metrics of held-out samples, or groups of them, of all ranks. `evaluate` measures
    this rank's share of the samples with the given indices. If rows name their data set,
    `metric/name` is the metric of that set alone. Collective."""
    meter = Meter()
    sets = defaultdict(list)
    for i, row in enumerate(samples.rows):
        sets[row.get("_dataset")].append(i)
    for name, indices in sets.items():
        set_meter = evaluate(indices)
        meter.add(set_meter)
        if name is not None:
            meter.add(set_meter, f"/{name}")
    return meter.reduce()


def _combined(kind: str, first: Sequence[float], *others: Sequence[float]) -> float | None:
    """Return the global value of the numbers of all ranks; None if there is none."""
    if kind == "sum":
        return math.fsum(first)
    if kind in ("max", "time", "min"):
        extreme = min(first) if kind == "min" else max(first)
        nothing = math.inf if kind == "min" else -math.inf
        return None if extreme == nothing else extreme
    weight = math.fsum(others[0])
    if not weight:
        return None
    mean = math.fsum(first) / weight
    if kind == "mean":
        return mean
    square = math.fsum(others[1]) / weight
    if kind == "ess":
        return mean**2 / square
    std = math.sqrt(max(0.0, square - mean**2))
    return std if kind == "std" else std / math.sqrt(weight)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _on_the_host(values: list[Tensor | float]) -> list[float]:
    """Convert tensors to numbers, with one synchronisation per device."""
    numbers = list(values)
    indices_by_device = defaultdict(list)
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            indices_by_device[value.device].append(i)
    for indices in indices_by_device.values():
        stacked = torch.stack([values[i].detach().double() for i in indices])
        for i, number in zip(indices, stacked.tolist(), strict=True):
            numbers[i] = number
    return [float(number) for number in numbers]
