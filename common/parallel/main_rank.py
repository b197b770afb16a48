"""Objects from and to rank 0 alone. `distributed.gather_objects` would fill the memory of every
rank with as many objects, each as long as the longest. All pickle."""

from typing import TypeVar

import torch
import torch.distributed as dist

from common.parallel import distributed

T = TypeVar("T")


def from_main(value: T) -> T:
    """Return the `value` of rank 0 on every rank. Collective."""
    box = [value]
    if distributed.world_size() > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def gather_on_main(value: object) -> list:
    """Return the `value` of every rank, in rank order, on rank 0, and an empty list on the others.
    Collective."""
    values = [value] * distributed.world_size() if distributed.rank() == 0 else None
    if distributed.world_size() > 1:
        dist.gather_object(value, values, 0)
    return values or []
