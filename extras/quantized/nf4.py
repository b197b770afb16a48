"""Frozen weights under adapters in 4.25 bits each: QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

A row is cut into blocks of 64 numbers. A block has a scale, its largest magnitude in bfloat16, and
for each number a code of 4 bits: which of 16 quantiles of a normal distribution (NF4) is nearest to
number / scale. The codes are bitsandbytes' own. A packed row is bytes: two codes in each, the first
in the high half, and then the row's scales. FSDP2 shards it by rows like any matrix.

Unpacking looks numbers up in a table and rounds them to the compute dtype. It gives the same
numbers on every device, so forward, backward, engine and exported files agree.

Shapes: I inputs and O outputs of a layer; a packed matrix has O rows of 17 I / 32 bytes."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model.loading import hub_weights
from common.model.lora import LoRALinear
from common.parallel import distributed

BLOCK = 64
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip
MIDPOINTS = (NF4[1:] + NF4[:-1]) / 2
PAIRS = torch.cartesian_prod(NF4, NF4)  # [256, 2], the two numbers of each byte


def width(inputs: int) -> int:
    """Return the bytes of a packed row: half a byte for each code, two bytes for each scale."""
    return inputs // 2 + 2 * inputs // BLOCK


def pack(weight_OI: Tensor) -> Tensor:
    """Return the packed matrix, uint8 [O, 17 I / 32]."""
    blocks = weight_OI.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).bfloat16()
    least = torch.finfo(torch.float32).tiny  # the divisor for a block of zeros
    shares = blocks / scales.float().clamp_min(least)[..., None]
    codes = torch.bucketize(shares, MIDPOINTS.to(shares.device), out_int32=True).flatten(1)
    pairs = codes[:, ::2] * 16 + codes[:, 1::2]
    return torch.cat([pairs.to(torch.uint8), scales.view(torch.uint8)], 1)


def unpack(pairs: Tensor, packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [O, I] in `dtype`. `pairs`: the table `PAIRS`, on the device."""
    half = packed.shape[1] * 16 // 17
    codes = packed[:, :half].unflatten(1, (-1, BLOCK // 2))
    scales = packed[:, half:].contiguous().view(torch.bfloat16).float()
    return F.embedding(codes.int(), pairs).mul_(scales[..., None, None]).flatten(1).to(dtype)


def pack_layers(hf: nn.Module, device: torch.device) -> Callable[[dict], dict]:
    """Give the layers with adapters of a model on meta packed weights. Return the function that
    changes a folder's slices into what fills them, packing on `device`. A layer keeps its weight if
    its inputs do not divide into blocks. Raises `ValueError` if most weights of the blocks would
    stay."""
    in_blocks = hf.get_decoder().layers.named_parameters()
    total = sum(p.numel() for name, p in in_blocks if p.ndim > 1 and ".lora_" not in name)
    dense = partial(unpack, PAIRS.to(device))
    packed = {}
    for name, layer in hf.named_modules():
        if isinstance(layer, LoRALinear) and layer.in_features % BLOCK == 0:
            packed[f"{name}.weight"] = layer.weight
            rows = torch.empty(
                layer.out_features, width(layer.in_features), dtype=torch.uint8, device="meta"
            )
            layer.weight, layer.dense = nn.Parameter(rows, requires_grad=False), dense
    count = sum(weight.numel() for weight in packed.values())
    share = f"{count / 1e6:.4g} M of {total / 1e6:.4g} M weights of the blocks are packed"
    if 2 * count < total:
        kind = f"linear layers with an adapter and a multiple of {BLOCK} inputs"
        raise ValueError(f"--quantize nf4: {share}: {kind}, no stacked experts; leave it out")
    distributed.say(f"--quantize nf4: {share}")
    return partial(packed_slices, hub_weights(hf, packed), device)


class Packed:
    """A matrix in a file, as a slice that packs the rows that are read."""

    def __init__(self, matrix, device: torch.device):
        self.matrix = matrix
        self.device = device

    def get_shape(self) -> list[int]:
        outputs, inputs = self.matrix.get_shape()
        return [outputs, width(inputs)]

    def __getitem__(self, index) -> Tensor:
        rows, *_ = index if isinstance(index, tuple) else (index,)  # FSDP2 shards by rows only
        return pack(self.matrix[rows].to(self.device))


def packed_slices(weights: dict[str, Tensor], device: torch.device, slices: dict) -> dict:
    """Return a folder's slices, with the matrices named in `weights` packed."""
    for name, weight in weights.items():
        if name not in slices or slices[name].get_shape() != list(weight.shape):
            raise ValueError(f"--quantize nf4: no matrix {name} {list(weight.shape)} in the files")
    return slices | {name: Packed(slices[name], device) for name in weights}
