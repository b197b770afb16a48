"""Weights of tokens in a loss, by the reduction.

Shapes: T packed tokens. `mask_T` (bool): trained tokens; `sequence_ids_T` (int64): the sequence of
each token."""

from torch import Tensor

from common.objectives.reduction import sequence_sum


def token_weights(
    reduction: str, mask_T: Tensor, sequence_ids_T: Tensor, tokens: Tensor, sequences: Tensor,
    max_new_tokens: int,
) -> Tensor:  # fmt: skip
    """Return the weight of each token in the loss, 0 where it is not trained. The global minibatch
    has `tokens` trained tokens in `sequences` completions. [T]."""
    match reduction:
        case "token":  # mean over tokens (DAPO, arXiv:2503.14476)
            return mask_T / tokens
        case "sequence":  # mean over completions of their token means (GRPO)
            lengths_T = sequence_sum(mask_T, mask_T, sequence_ids_T)
            return mask_T / lengths_T.clamp(min=1) / sequences
        case "sequence_sum":  # mean over completions of their token sums (REINFORCE)
            return mask_T / sequences
        case "constant":  # the same, over a constant length (Dr. GRPO, arXiv:2503.20783)
            return mask_T / sequences / max_new_tokens
    raise ValueError(reduction)
