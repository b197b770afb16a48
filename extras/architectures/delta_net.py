"""Gated delta nets (arXiv:2412.06464; Qwen3-Next, Qwen3.5) on packed sequences.

Such a layer has a causal convolution over the last few tokens, and a recurrence whose state has
read all tokens before. Both must begin anew at every sequence of a pack. transformers calls both as
functions of its module, with the model's keyword arguments. The functions here replace them; if
these arguments have no `pack`, they call the originals.

Shapes: T tokens of a pack, C channels of the convolution, H heads."""

import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from common.parallel import distributed

CHUNK = 64  # tokens that transformers' delta rule computes at a time; it pads to a multiple
CONVOLUTION = "causal_conv1d_fn"
RECURRENCE = "torch_chunk_gated_delta_rule"
ONE_TOKEN = ("causal_conv1d_update", "torch_recurrent_gated_delta_rule")  # in generation


def keep_sequences_apart(hf: nn.Module) -> None:
    """Replace the functions in transformers' module through which tokens mix in delta nets. Raises
    `AttributeError` if the module has other ones."""
    hf.kept_by_delta_net = kept_numbers(hf.config.get_text_config())  # memory.py reads it
    # It would warn of missing kernels on every rank; `say` below does it once.
    logging.get_logger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    module = sys.modules[type(hf).__module__]
    if hasattr(getattr(module, RECURRENCE), "of_transformers"):
        return  # an earlier model has replaced them
    if not torch.cuda.is_available():  # it would call installed kernels, which need CUDA
        for name in (CONVOLUTION, RECURRENCE, *ONE_TOKEN):
            setattr(module, name, inspect.unwrap(getattr(module, name)))
    elif not has_kernels():
        distributed.say("gated delta nets: torch code, which is slow; pip install '.[delta]'")
    setattr(module, CONVOLUTION, packed_convolution(getattr(module, CONVOLUTION)))
    setattr(module, RECURRENCE, packed_recurrence(getattr(module, RECURRENCE)))


def packed_convolution(convolution: Callable) -> Callable:
    """Return transformers' convolution, [1, C, T] -> [1, C, T], made to work on packs."""

    # Sizes differ from pack to pack, and torch.compile would compile it again for each.
    @torch._disable_dynamo
    def of_pack(x_1CT: Tensor, weight: Tensor, *args, pack=None, **kwargs) -> Tensor:
        if pack is None:
            return convolution(x_1CT, weight, *args, **kwargs)
        # With zeros between them, sequences do not see each other.
        before = weight.shape[-1] - 1
        spaced = [F.pad(x, (0, before)) for x in x_1CT.split(pack.lengths, dim=-1)]
        out = convolution(torch.cat(spaced, dim=-1), weight, *args, **kwargs)
        outputs = out.split([length + before for length in pack.lengths], dim=-1)
        return torch.cat([x[..., :-before] for x in outputs], dim=-1)

    of_pack.of_transformers = convolution
    return of_pack


def packed_recurrence(recurrence: Callable) -> Callable:
    """Return transformers' gated delta rule, made to work on packs. Query, key and value are [1, T,
    H, width], g and beta [1, T, H].

    flash-linear-attention, if it is installed, takes the offsets of sequences (`cu_seqlens`).
    transformers' own code gets sequences of the same number of chunks as a batch. They are padded
    at their ends, where no token reads the padding."""
    knows_offsets = torch.cuda.is_available() and has_kernels()

    @torch._disable_dynamo
    def of_pack(*streams: Tensor, g: Tensor, beta: Tensor, pack=None, **kwargs):
        if pack is None or knows_offsets:
            return recurrence(*streams, g=g, beta=beta, **kwargs)
        sequences = [x[0].split(pack.lengths) for x in (*streams, g, beta)]
        by_chunks = defaultdict(list)
        for number, length in enumerate(pack.lengths):
            by_chunks[-(-length // CHUNK)].append(number)
        outputs = [streams[-1]] * len(pack.lengths)
        for numbers in by_chunks.values():
            *batch, g_NL, beta_NL = (
                pad_sequence([x[n] for n in numbers], batch_first=True) for x in sequences
            )
            out, _ = recurrence(*batch, g=g_NL, beta=beta_NL, **kwargs)
            for n, x in zip(numbers, out, strict=True):
                outputs[n] = x[: pack.lengths[n]]
        return torch.cat(outputs)[None], None

    of_pack.of_transformers = recurrence
    return of_pack


def kept_numbers(config) -> int:
    """Return how many float32 numbers per token a layer keeps for its backward. With
    flash-linear-attention these are its inputs and output; transformers' torch code also keeps
    every step of a chunk, as counted there."""
    key = config.linear_key_head_dim
    value = config.linear_value_head_dim
    numbers = 2 * key + 2 * value
    if not has_kernels():
        numbers = 12 * key + 8 * value + 8 * CHUNK + 4 * key * value // CHUNK
    return config.linear_num_value_heads * numbers


def has_kernels() -> bool:
    """Return whether flash-linear-attention is installed, whose kernels transformers uses."""
    return importlib.util.find_spec("fla") is not None
