"""Sums and means over the trained tokens of each packed sequence, and the weight of each token in
the loss.

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


def token_weights(
    reduction: str, mask_T: Tensor, sequence_ids_T: Tensor, num_tokens: Tensor,
    num_sequences: Tensor, max_new_tokens: int,
) -> Tensor:  # fmt: skip
    """Return the weight of each token in the loss, 0 where it is not trained. The global minibatch
    has `num_tokens` trained tokens in `num_sequences` completions. [T]."""
    match reduction:
        case "token":  # mean over tokens (DAPO, arXiv:2503.14476)
            return mask_T / num_tokens
        case "sequence":  # mean over completions of their token means (GRPO)
            lengths_T = sequence_sum(mask_T, mask_T, sequence_ids_T)
            return mask_T / lengths_T.clamp(min=1) / num_sequences
        case "sequence_sum":  # mean over completions of their token sums (REINFORCE)
            return mask_T / num_sequences
        case "constant":  # the same, over a constant length (Dr. GRPO, arXiv:2503.20783)
            return mask_T / num_sequences / max_new_tokens
    raise ValueError(reduction)
