"""Attention from the scores of all pairs, for what no kernel computes: a softcap (Gemma 2) or sinks
(gpt-oss)."""

import math

import torch
from torch import Tensor


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute causal attention from the scores of all pairs, for sequences of one length: query
    [count, heads, queries, head_dim], mask [queries, keys] or None. A softcap makes scores
    `softcap * tanh(scores / softcap)`. A sink is the score of one more key of each head, whose
    value is 0. Memory: count * heads * queries * keys; long sequences need
    `--activation_checkpointing`."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks_H is not None:
        sinks = sinks_H[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value
