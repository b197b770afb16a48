"""The mesh of ranks that hold a model: how many copies, and on how many ranks each."""

import functools
import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.parallel import distributed


@functools.cache  # one set of communicators for all models
def shard_mesh(device: torch.device, shard_ranks: int | None) -> DeviceMesh:
    """Return the mesh (shards,) of all ranks, or (copies, shards) if `shard_ranks` neighbours share
    a copy of each model; by default they are those of a machine. The first call is collective.

    On the second mesh FSDP gathers weights within a copy and averages gradients over both (hybrid
    sharding, arXiv:2304.11277, 3.2.2)."""
    ranks = distributed.world_size()
    per_copy = shard_ranks or int(distributed.all_max(int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    if per_copy == ranks or ranks % per_copy:
        return init_device_mesh(device.type, (ranks,))
    copies = ranks // per_copy
    distributed.say(
        f"hybrid sharding: {copies} copies of each model, each on {per_copy} of the {ranks} ranks"
    )
    mesh = init_device_mesh(device.type, (copies, per_copy), mesh_dim_names=("copies", "shards"))
    timeout = distributed.NCCL_TIMEOUT if device.type == "cuda" else distributed.DAY
    for group in mesh.get_all_groups():  # they do not inherit the timeout of the default group
        distributed.set_timeout(group, device, timeout)
    return mesh
