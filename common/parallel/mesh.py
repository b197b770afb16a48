"""Which ranks hold a copy of each model together, and how several copies stay one model.

Hybrid sharding (arXiv:2304.11277, 3.2.2): FSDP works within a copy, whose ranks are neighbours, and no weight ever
travels between copies. Their gradients are averaged once per optimizer step, whatever the number of micro-batches.
"""

import functools
import socket
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.config.flags import BaseArgs
from common.parallel import distributed


def shard_mesh(args: BaseArgs, device: torch.device) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The ranks that hold a copy of each model together with this one, and those that hold what this one holds in the
    other copies; None if there is one copy. Collective when first called."""
    return _meshes(device.type, args.shard_ranks, args.nccl_timeout)


@functools.cache  # one set of communicators for all models
def _meshes(device_type: str, shard_ranks: int | None, nccl_timeout: float) -> tuple[DeviceMesh, DeviceMesh | None]:
    ranks = distributed.world_size()
    per_copy = shard_ranks or _ranks_of_a_machine()
    if per_copy == ranks:
        return init_device_mesh(device_type, (ranks,)), None
    if distributed.is_main():
        print(f"hybrid sharding: {ranks // per_copy} copies of each model, each on {per_copy} of the {ranks} ranks")
    mesh = init_device_mesh(device_type, (ranks // per_copy, per_copy), mesh_dim_names=("copies", "shards"))
    waits = timedelta(minutes=nccl_timeout) if device_type == "cuda" else timedelta(days=1)
    for group in mesh.get_all_groups():  # they do not inherit what distributed.setup gave the group of all
        group._get_backend(torch.device(device_type))._set_default_timeout(waits)
    return mesh["shards"], mesh["copies"]


def _ranks_of_a_machine() -> int:
    """How many ranks of this role each machine has; if that differs, or they are no neighbours, all ranks."""
    hosts = distributed.gather_objects(socket.gethostname())
    size, *others = Counter(hosts).values()
    if all(len(set(hosts[i : i + size])) == 1 for i in range(0, len(hosts), size)) and {size, *others} == {size}:
        return size
    if distributed.is_main():
        of_each = ", ".join(map(str, [size, *others]))
        print(
            f"machines have {of_each} ranks, not as many neighbours each: every model is sharded over all {len(hosts)}"
        )
    return len(hosts)


def average_over_copies(model: nn.Module) -> None:
    """Average the gradients of the copies: FSDP has averaged those of a copy's ranks, so this makes it the average over
    all. Collective."""
    if model.copies is None:
        return
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    group = model.copies.get_group()
    begun = [dist.all_reduce(g, dist.ReduceOp.AVG, group, async_op=True) for g in gradients if g.numel()]
    for work in begun:
        work.wait()
