"""Reads experts in MXFP4 (gpt-oss): 4-bit floats in blocks of 32 that share a power of two, the
scale (OCP Microscaling Formats, version 1.0). They become bfloat16, which has all their values."""

from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"


class Unpacked:
    """A slice of a file that returns floats [experts, inputs, outputs]. The file has blocks
    [experts, outputs, inputs / 32, 16], uint8 with two numbers each, and scales [experts, outputs,
    inputs / 32]. Only the experts that are asked for are read."""

    def __init__(self, blocks, scales):
        self.blocks = blocks
        self.scales = scales

    def get_shape(self) -> list[int]:
        experts, outputs, inputs, _ = self.blocks.get_shape()
        return [experts, inputs * 32, outputs]

    def __getitem__(self, index) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        experts, *rest = index if isinstance(index, tuple) else (index,)
        if experts is Ellipsis:
            experts = slice(None)
        whole = convert_moe_packed_tensors(self.blocks[experts], self.scales[experts])
        return whole[(slice(None), *rest)]


def unpacked(slices: dict) -> dict:
    """Return the slices of a folder's files, with floats in place of blocks and their scales."""
    floats = {}
    for name in [each.removesuffix(BLOCKS) for each in slices if each.endswith(BLOCKS)]:
        blocks, scales = slices.pop(name + BLOCKS), slices.pop(name + SCALES, None)
        if scales is not None and blocks.get_shape()[:-1] == scales.get_shape():
            floats[name] = Unpacked(blocks, scales)
    return slices | floats
