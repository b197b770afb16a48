"""Streams of a rollout that stay fixed during its updates: log-probs and values, from forward
passes without gradient."""

import torch
from torch import nn

from common.data.packing import Minibatches


@torch.no_grad()
def with_logprobs(
    minibatches: Minibatches,
    temperature: float,
    *,
    old: nn.Module | None = None,
    ref: nn.Module | None = None,
) -> Minibatches:
    """Return the micro-batches with log-probs that stay fixed during the update: `old_logprobs_T`,
    `old_entropy_T` of the policy `old`, `ref_logprobs_T` of the frozen model `ref`; None adds
    nothing. Collective."""
    for model, names in ((old, ("old_logprobs_T", "old_entropy_T")), (ref, ("ref_logprobs_T",))):
        if model is not None:
            minibatches = [
                [
                    mb.with_streams(
                        **dict(zip(names, model(mb, temperature=temperature), strict=False))
                    )
                    for mb in mbs
                ]
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
