"""Sums and means over the trained tokens of each packed sequence.

Shapes: T packed tokens. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): the sequence of
each token."""

import torch
from torch import Tensor


def sequence_sum(x_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Sum `x_T` over the trained tokens of each sequence, and repeat the sum on each of its tokens.
    Values on other tokens are ignored. [T], float64."""
    trained_T = torch.where(mask_T, x_T, 0).double()
    # N <= T: room for every sequence, without a copy of N from the device
    sums_T = torch.zeros_like(trained_T)
    return sums_T.index_add(0, sequence_ids_T, trained_T)[sequence_ids_T]


def sequence_mean(x_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor) -> Tensor:
    """Average `x_T` over the trained tokens of each sequence, and repeat the mean on each of its
    tokens; 0 for a sequence without trained tokens. [T], float64."""
    lengths_T = sequence_sum(mask_T, mask_T, sequence_ids_T)
    return sequence_sum(x_T, mask_T, sequence_ids_T) / lengths_T.clamp(min=1)
