"""Forward passes without gradient: log-probs and values that stay fixed while a rollout is trained
on, scores of a reward model, and log-probs of completions."""

from itertools import chain

import torch
from torch import nn

from common.data.packing import (
    Minibatches,
    pack_minibatches,
    positions_of_share,
    sent_values,
)
from common.data.sample import Sample, at_end
from common.model.policy import PackedModel, Policy, ScalarModel


@torch.no_grad()
def with_logprobs(
    minibatches: Minibatches,
    temperature: float,
    *,
    old: nn.Module | None = None,
    ref: nn.Module | None = None,
) -> Minibatches:
    """Return the micro-batches with log-probs that stay fixed during the update: `old_logprobs_T`
    of the policy `old`, `ref_logprobs_T` of the frozen model `ref`; None adds nothing.
    Collective."""
    for model, name in ((old, "old_logprobs_T"), (ref, "ref_logprobs_T")):
        if model is not None:
            minibatches = [
                [mb.with_streams(**{name: model(mb, temperature=temperature)[0]}) for mb in mbs]
                for mbs in minibatches
            ]
            model.reshard()  # after a forward without backward the root is still whole
    return minibatches


@torch.no_grad()
def with_values(minibatches: Minibatches, value_model: nn.Module) -> Minibatches:
    """Return the micro-batches with `values_T` of the value model before the update. Collective."""
    minibatches = [[mb.with_streams(values_T=value_model(mb)) for mb in mbs] for mbs in minibatches]
    value_model.reshard()
    return minibatches


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
