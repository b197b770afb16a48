"""Mean and standard deviation of a number per token, over the trained tokens of all ranks."""

import math
from collections.abc import Callable
from itertools import chain

from torch import Tensor

from common.packs.packing import Minibatches, PackedBatch
from common.parallel import distributed


def moments(
    minibatches: Minibatches, stream_of: Callable[[PackedBatch], Tensor]
) -> tuple[float, float]:
    """Return the mean and the standard deviation (n - 1) over the trained tokens of all ranks.
    `stream_of` picks the numbers of a micro-batch, one per token. Collective."""
    xs = [stream_of(mb)[mb.loss_mask_T].double() for mb in chain(*minibatches)]
    count = max(1, int(distributed.all_sum(sum(x.numel() for x in xs))))
    mean = float(distributed.all_sum(sum(x.sum() for x in xs))) / count
    squares = float(distributed.all_sum(sum((x - mean).square().sum() for x in xs)))
    return mean, math.sqrt(squares / max(1, count - 1))


def explained_variance(minibatches: Minibatches) -> float:
    """Return 1 - Var(R - V) / Var(R) over the trained tokens of all ranks: how much of the returns
    R the values V predict. 0 if all returns are equal. Collective."""
    _, error = moments(minibatches, lambda mb: mb.returns_T - mb.values_T)
    _, spread = moments(minibatches, lambda mb: mb.returns_T)
    return 1 - (error / spread) ** 2 if spread else 0.0
