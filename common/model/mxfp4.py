"""Experts in MXFP4 (gpt-oss): 4-bit floats in blocks of 32 with a common power of two, the scale
(OCP Microscaling Formats, version 1.0). They are read as bfloat16, which has all their values."""

from pathlib import Path

import torch
from torch import Tensor

from common.model.experts import local_rows

BLOCKS = "_blocks"
SCALES = "_scales"
BLOCK = 32  # numbers with a common scale


def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the two tensors in a file, on meta, of a weight [experts, inputs, outputs]."""
    experts, inputs, outputs = weight.shape
    scales = torch.empty(experts, outputs, inputs // BLOCK, device="meta")
    return {name + BLOCKS: scales[..., None].expand(-1, -1, -1, BLOCK // 2), name + SCALES: scales}


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the matrices [experts, inputs, outputs] of blocks [experts, outputs, inputs / 32, 16],
    uint8 with two numbers each, and scales [experts, outputs, inputs / 32]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


@torch.no_grad()
def fill(parameters: dict[str, Tensor], files: dict[str, Path]) -> None:
    """Fill sharded parameters [experts, ...] with their weights in the `files`. Each rank reads its
    own experts."""
    from safetensors import safe_open

    for name, parameter in parameters.items():
        first, local = local_rows(parameter)
        slices = []
        for ending in (BLOCKS, SCALES):
            with safe_open(files[name + ending], "pt") as tensors:
                slices.append(tensors.get_slice(name + ending)[first : first + len(local)])
        if len(local):
            local.copy_(unpack(*slices))
