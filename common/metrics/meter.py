"""Numbers collected over the micro-batches and ranks of one step."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.packs.packing import PackedBatch
from common.parallel import distributed


class Meter:
    """Accumulator of metrics over the micro-batches and ranks of one step. The split of the batch
    does not change the global value, because sums and weights are added up before the division."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], list[tuple]] = defaultdict(list)  # by name and kind
        self.started: dict[str, float | torch.cuda.Event] = {}
        # The trace takes every micro-batch, with values of its tokens and of its samples or pairs.
        self.keep: Callable[[PackedBatch, dict, dict], None] | None = None

    def mean(self, name: str, total: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add to a mean: sum of `total` / sum of `weight`."""
        self.entries[name, "mean"].append((total, weight))

    def sum_over_ranks(self, name: str, share: Tensor) -> None:
        """Add a number, such as a loss, that is the sum of the `share` of each rank. Several are
        averaged."""
        self.mean(name, share, 1 / distributed.world_size())

    def total(self, name: str) -> tuple[float, float]:
        """Return the sum and the weight that this rank has added to a mean since the last
        `reduce`."""
        total, weight = _total(self.entries[name, "mean"], "mean")
        return total, weight

    def masked_mean(self, name: str, values_T: Tensor, mask_T: Tensor) -> None:
        """Add to the mean over the tokens in the mask."""
        self.mean(name, (values_T.detach() * mask_T).sum(), mask_T.sum())

    def tokens(
        self, mb: PackedBatch, values_T: dict[str, Tensor], share_T: Tensor | None = None
    ) -> None:
        """Add to the mean of each stream over the trained tokens of a micro-batch. The trace also
        gets `share_T`, each token's summand of the loss."""
        all_T = values_T | ({} if share_T is None else dict(share=share_T))
        _require_one_each(all_T, len(mb.loss_mask_T))
        for name, x_T in values_T.items():
            self.masked_mean(name, x_T, mb.loss_mask_T)
        if self.keep is not None:
            self.keep(mb, all_T, {})

    def samples(
        self, mb: PackedBatch, values_N: dict[str, Tensor], share_N: Tensor | None = None, prefix=""
    ) -> None:
        """Add to the mean of each value over the trained samples of a micro-batch, or over its
        pairs: [N] or [N / 2]. The name of the metric has the `prefix`. The trace also gets
        `share_N`, the summand of the loss of each."""
        trained_N = mb.is_trained_N
        all_N = values_N | ({} if share_N is None else dict(share=share_N))
        _require_one_each(all_N, len(trained_N), len(trained_N) // 2)
        for name, x_N in values_N.items():
            of_pairs = len(x_N) < len(trained_N)
            self.masked_mean(prefix + name, x_N, trained_N[::2] if of_pairs else trained_N)
        if self.keep is not None:
            self.keep(mb, {}, all_N)

    def sum(self, name: str, value: float) -> None:
        self.entries[name, "sum"].append((value,))

    def std(self, name: str, values: Tensor) -> None:
        """Add to the standard deviation (division by n) of all values."""
        self.entries[name, "std"].append((values.sum(), len(values), values.square().sum()))

    def standard_error(self, name: str, value: Tensor) -> None:
        """Add a value to the standard error of the mean of all values."""
        self.entries[name, "stderr"].append((value, 1.0, value.square()))

    def effective_fraction(self, name: str, weights: Tensor, mask: Tensor) -> None:
        """Add weights to the effective sample size of importance sampling, as a fraction: (mean
        w)^2 / mean w^2."""
        weights = torch.where(mask, weights, 0.0)
        self.entries[name, "ess"].append((weights.sum(), mask.sum(), weights.square().sum()))

    def max(self, name: str, value: Tensor | float) -> None:
        self.entries[name, "max"].append((value,))

    def min(self, name: str, value: Tensor | float) -> None:
        self.entries[name, "min"].append((value,))

    def start(self, name: str) -> None:
        """Start the clock of `name`; `stop` adds the seconds to `time/name`."""
        self.started[name] = _now()

    def stop(self, name: str) -> None:
        """Add the seconds since `start` to `time/name`: the sum over a step, on the slowest
        rank. `reduce` reads the clock."""
        self.entries[f"time/{name}", "time"].append(((self.started.pop(name), _now()),))

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Measure the seconds spent inside as `time/name`."""
        self.start(name)
        yield
        self.stop(name)

    def add(self, other: "Meter", end: str = "") -> None:
        """Add the values of another meter, with `end` appended to their names."""
        for (name, kind), entries in other.entries.items():
            self.entries[name + end, kind] += entries

    def reduce(self) -> dict[str, float]:
        """Return the global values of everything added since the last call, by name. Means with a
        total weight of 0 are omitted. Collective."""
        added = [x for entries in self.entries.values() for entry in entries for x in entry]
        numbers = iter(_on_the_host(added))
        totals = {
            (name, kind): _total([[next(numbers) for _ in entry] for entry in entries], kind)
            for (name, kind), entries in self.entries.items()
        }
        self.entries.clear()
        of_ranks = defaultdict(list)
        for of_rank in distributed.gather_objects(totals):
            for key, total in of_rank.items():
                of_ranks[key].append(total)
        values = {}
        for (name, kind), entries in of_ranks.items():
            assert name not in values, f"{name} is {kind} and another kind"
            value = _value(kind, *_total(entries, "max" if kind == "time" else kind))
            if value is not None:
                values[name] = value
        return values


def evaluate_sets(samples: Sequence, evaluate: Callable[[list[int]], Meter]) -> dict[str, float]:
    """Return the metrics of all held-out samples, or groups of them. `evaluate` measures this
    rank's part of the samples with the given indices. If rows name their data set, `metric/name`
    is the metric of this data set alone. Collective."""
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


def _require_one_each(values: dict[str, Tensor], *lengths: int) -> None:
    """Raise `ValueError` for values that are not one number for each token, sample or pair."""
    for name, x in values.items():
        if x.dim() != 1 or len(x) not in lengths:
            value = "loss()" if name == "share" else f"loss(), {name}"
            advice = "return one number for each token, sample or pair"
            raise ValueError(f"{value}: shape {[*x.shape]} in place of [{lengths[0]}]; {advice}")


def _total(entries: Sequence[Sequence[float]], kind: str) -> list[float]:
    """Return the sum, or the extreme, of each column."""
    combine = dict(max=max, min=min).get(kind, math.fsum)
    return [combine(column) for column in zip(*entries, strict=True)]


def _value(kind: str, total: float, weight: float = 1.0, squares: float = 0.0) -> float | None:
    """Return the global value from the totals of all ranks; None if there is none."""
    if not weight or total == dict(max=-math.inf, min=math.inf).get(kind):
        return None
    mean = total / weight
    if kind == "ess":
        return mean**2 / (squares / weight)
    if kind in ("std", "stderr"):
        std = math.sqrt(max(0.0, squares / weight - mean**2))
        return std if kind == "std" else std / math.sqrt(weight)
    return mean


def _now() -> float | torch.Event:
    if not torch.cuda.is_available():
        return time.perf_counter()
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))


def _on_the_host(values: list[Tensor | float | tuple]) -> list[float]:
    """Convert tensors, and start and end of clocks, to numbers. The GPU is waited for once."""
    values = [_seconds(*x) if isinstance(x, tuple) else x for x in values]
    on_gpu = [x.detach().double() for x in values if isinstance(x, Tensor) and x.is_cuda]
    arrived = iter(torch.stack(on_gpu).tolist() if on_gpu else ())
    return [next(arrived) if isinstance(x, Tensor) and x.is_cuda else float(x) for x in values]


def _seconds(start, end) -> float:
    """Return the time between two results of `_now`."""
    if isinstance(start, float):
        return end - start
    end.synchronize()  # the GPU reaches an event after the work before it
    return start.elapsed_time(end) / 1000  # milliseconds
