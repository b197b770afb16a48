"""Experts in MXFP4 (gpt-oss): 4-bit floats in blocks of 32 with a common power of two, the scale
(OCP Microscaling Formats, version 1.0). They are read as bfloat16, which has all their values."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCKS, SCALES = "_blocks", "_scales"


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the matrices [experts, inputs, outputs] of blocks [experts, outputs, inputs / 32, 16],
    uint8 with two numbers each, and scales [experts, outputs, inputs / 32]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


@torch.no_grad()
def fill_packed(parameters: Mapping[str, DTensor], slices: Mapping) -> str | None:
    """Fill sharded parameters [experts, ...] from `slices` of the files, by name. Each rank reads
    its own experts. Return what is wrong with the first that has other shapes, if any."""
    for name, weight in parameters.items():
        mesh, placements = weight.device_mesh, weight.placements
        _, (first, *_) = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
        local = weight.to_local()
        experts, inputs, outputs = weight.shape
        shape = [experts, outputs, inputs // 32]
        for part, wanted in ((name + BLOCKS, [*shape, 16]), (name + SCALES, shape)):
            if part not in slices or slices[part].get_shape() != wanted:
                return f"{part}: the model needs it with the shape {wanted}"
        own = slice(first, first + len(local))
        if len(local):
            local.copy_(unpack(slices[name + BLOCKS][own], slices[name + SCALES][own]))
    return None
