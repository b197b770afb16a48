"""Meshes of ranks: which ranks share one copy of each model, and the average of gradients over
several copies.

Hybrid sharding (arXiv:2304.11277, 3.2.2): FSDP works within a copy, whose ranks are neighbours, and
weights never travel between copies. Gradients of copies are averaged once per optimizer step,
whatever the number of micro-batches."""

import functools
import socket
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.parallel import distributed


@functools.cache  # one set of communicators for all models
def shard_mesh(
    device: torch.device, shard_ranks: int | None
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of the ranks that share a copy of each model with this one, and the mesh of
    the ranks that hold the same shards in other copies; None if there is one copy. Without
    `shard_ranks` a copy takes one machine. The first call is collective."""
    ranks = distributed.world_size()
    per_copy = shard_ranks or _ranks_of_a_machine()
    if per_copy == ranks:
        return init_device_mesh(device.type, (ranks,)), None
    copies = ranks // per_copy
    distributed.say(
        f"hybrid sharding: {copies} copies of each model, each on {per_copy} of the {ranks} ranks"
    )
    mesh = init_device_mesh(device.type, (copies, per_copy), mesh_dim_names=("copies", "shards"))
    timeout = distributed.NCCL_TIMEOUT if device.type == "cuda" else distributed.DAY
    for group in mesh.get_all_groups():  # they do not inherit the timeout of the default group
        distributed.set_timeout(group, device, timeout)
    return mesh["shards"], mesh["copies"]


def _ranks_of_a_machine() -> int:
    """Return the number of ranks on each machine, or of all ranks if it differs or they are not
    neighbours."""
    hosts = distributed.gather_objects(socket.gethostname())
    counts = list(Counter(hosts).values())
    size = counts[0]
    neighbours = [set(hosts[i : i + size]) for i in range(0, len(hosts), size)]
    if set(counts) == {size} and all(len(machines) == 1 for machines in neighbours):
        return size
    ranks = ", ".join(map(str, counts))
    distributed.say(
        f"machines with unequal or scattered ranks ({ranks}): every model is sharded over all"
        f" {len(hosts)}"
    )
    return len(hosts)


def average_over_copies(model: nn.Module) -> None:
    """Average the gradients of the copies. FSDP has averaged over the ranks of each copy, so that
    the result is the average over all ranks. Collective."""
    if model.copies is None:
        return
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    group = model.copies.get_group()
    pending = [
        dist.all_reduce(g, dist.ReduceOp.AVG, group, async_op=True) for g in gradients if g.numel()
    ]
    for reduction in pending:
        reduction.wait()
