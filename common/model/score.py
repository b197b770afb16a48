"""Scores of sequences by a reward model, in one forward pass each."""

from itertools import chain

import torch

from common.data.packing import pack_minibatches, positions_of_share, sent_values
from common.data.sample import at_end
from common.model.policy import PackedModel, ScalarModel


@torch.no_grad()
def score(
    model: ScalarModel,
    groups: list[list[list[int]]],
    pack_tokens: int,
    share_prefix: int,
    device: torch.device,
) -> list[float]:
    """Return the reward of each of this rank's sequences of token ids (prompt and completion),
    given in groups that may share prefixes. Collective.

    Raises `ValueError` for a sequence that is longer than the model's context.
    """
    require_context(model, max(map(len, chain(*groups)), default=0))
    samples = [[at_end(ids) for ids in group] for group in groups]
    positions = positions_of_share(len(groups))
    (micro_batches,) = pack_minibatches(samples, positions, 1, pack_tokens, device, share_prefix)
    rewards = (mb.sequence_sums(model(mb)) for mb in micro_batches)
    return sent_values(micro_batches, rewards)


def require_context(model: PackedModel, longest: int) -> None:
    """Raise `ValueError` if the longest sequence is longer than the model's context."""
    context = getattr(model.hf.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        problem = f"a sequence of {longest} tokens is longer than its context of {context}"
        raise ValueError(f"{model.path}: {problem}")
