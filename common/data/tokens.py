"""Tokens that a model runs on."""

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Tokens:
    """Tokens that a model runs on.

    A plain class: FSDP rebuilds every dataclass and tuple that a block is given, with all that it
    contains."""

    context_group: dist.ProcessGroup | None = None  # ranks that hold one part each of these tokens
    keys: Any = None  # compact.Keys of shared prefixes; None: each sequence has all its tokens
    with_images: Any = None  # the `Placed` samples of these tokens, if any of them has images
    images: Any = None  # PackedImages (extras/images/packed.py), made from these when needed
    next: "Tokens | None" = None  # with images: tokens that the model runs on after these
    stored_at_T: Tensor | None = None  # int64: places of targets in stored log-probs (teacher.py)

    def __init__(
        self, ids_T: Tensor, targets_T: Tensor, position_ids_T: Tensor, lengths: list[int]
    ):
        self.input_ids_T = ids_T  # int64
        self.targets_T = targets_T  # int64
        self.position_ids_T = position_ids_T  # int64, of a token in its sequence
        self.lengths = lengths
        self.offsets = [0, *accumulate(lengths)]  # sequence n is [offsets[n], offsets[n + 1])
        self.cu_seqlens_N1 = torch.tensor(self.offsets, dtype=torch.int32).to(ids_T.device)
        self.max_seqlen = max(lengths)  # on the host, like `offsets`: no launch waits for the GPU
