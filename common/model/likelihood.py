"""Log-probs of completions by a frozen language model, in one forward pass each."""

from itertools import chain

import torch

from common.data.packing import pack_minibatches, positions_of_share, sent_values
from common.data.sample import Sample
from common.model.policy import Policy
from common.model.score import require_context


@torch.no_grad()
def log_likelihoods(
    model: Policy,
    groups: list[list[Sample]],
    pack_tokens: int,
    share_prefix: int,
    device: torch.device,
) -> list[tuple[float, int]]:
    """Return the model's log-prob of each completion, in nats, and its number of tokens.
    Collective.

    Raises `ValueError` for a sequence that is longer than the model's context."""
    samples = list(chain(*groups))
    require_context(model, max((len(sample.ids) for sample in samples), default=0))
    positions = positions_of_share(len(groups))
    (packs,) = pack_minibatches(groups, positions, 1, pack_tokens, device, share_prefix)
    logps = sent_values(packs, (mb.sequence_sums(model(mb, temperature=1.0)[0]) for mb in packs))
    return [(logp, sum(s.loss_mask)) for logp, s in zip(logps, samples, strict=True)]
