"""Sequences on their way to the ranks that train on them, and the tokens that a model runs on."""

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.data.sample import ImageSpan, Sample


class TokenSequence(NamedTuple):
    """What the rank that trains on a sequence needs of its sample. Arrays, because they pickle in
    fewer bytes than lists: 5 a token, and 4 for each stream."""

    index: int  # of the sample among those of all ranks
    ids: np.ndarray  # int32
    loss_mask: np.ndarray  # bool
    streams: dict[str, np.ndarray]  # float32; `stored_at` is int64
    dataset: str | None = None
    images: list[ImageSpan] = []  # those of a shared prefix too
    shared: int = 0  # first targets that are those of the sequence before it

    @property
    def num_targets(self) -> int:
        return len(self.ids) - 1


def sequence_of(index: int, sample: Sample) -> TokenSequence:
    """Return a sample as it travels. Streams have the names of their lists."""
    names = ("rollout_logprobs", "versions", "weights")
    lists = {name: getattr(sample, name, None) for name in names} | sample.streams
    streams = {name: np.array(x, np.float32) for name, x in lists.items() if x is not None}
    if sample.stored_at is not None:  # each token's place follows those of the trained ones before
        places = accumulate(sample.loss_mask[1:-1], initial=sample.stored_at)
        streams["stored_at"] = np.array([0, *places], np.int64)
    ids, loss_mask = np.array(sample.ids, np.int32), np.array(sample.loss_mask, bool)
    dataset = sample.row.get("_dataset")
    return TokenSequence(index, ids, loss_mask, streams, dataset, sample.images)


def padding(num_targets: int, streams: list[str]) -> TokenSequence:
    """Return a sequence of zeros, of which nothing is trained."""
    zeros = np.zeros(num_targets + 1, np.int32)
    types = {name: np.int64 if name == "stored_at" else np.float32 for name in streams}
    streams_of_zeros = {name: zeros.astype(dtype) for name, dtype in types.items()}
    return TokenSequence(-1, zeros, zeros.astype(bool), streams_of_zeros)


def joined(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)


class ModelTokens:
    """Tokens that a model runs on.

    A plain class: FSDP rebuilds every dataclass and tuple that a block is given, with all that it
    contains."""

    context_group: dist.ProcessGroup | None = None  # ranks that hold one part each of these tokens
    keys: Any = None  # compact.Keys of shared prefixes; None: each sequence has all its tokens
    with_images: list[TokenSequence] | None = None  # of these tokens, if any of them has images
    images: Any = None  # PackedImages (extras/images/packed.py), made from these when needed
    next: "ModelTokens | None" = None  # with images: tokens that the model runs on after these
    stored_at_T: Tensor | None = None  # int64: places of targets in the teacher's stored log-probs

    def __init__(
        self, ids_T: Tensor, targets_T: Tensor, position_ids_T: Tensor, lengths: list[int]
    ):
        self.input_ids_T = ids_T.long()
        self.targets_T = targets_T.long()
        self.position_ids_T = position_ids_T  # int64, of a token in its sequence
        self.lengths = lengths
        self.offsets = [0, *accumulate(lengths)]  # sequence n is [offsets[n], offsets[n + 1])
        self.cu_seqlens_N1 = torch.tensor(self.offsets, dtype=torch.int32).to(ids_T.device)
        self.max_seqlen = max(lengths)  # on the host, like `offsets`: no launch waits for the GPU
