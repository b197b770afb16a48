"""Context groups: with `--context_ranks` R, R neighbouring ranks run each pack together.

Every rank of a group holds one of R equal parts of the stream. Only attention mixes tokens; around
it, tokens are exchanged for heads (DeepSpeed-Ulysses, arXiv:2309.14509). A sequence may then be R
times as long as `--pack_tokens`.

Shapes: t tokens of this rank's part, H heads, d head width."""

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from common.parallel.distributed import NCCL_TIMEOUT

group: dist.ProcessGroup | None = None  # None if every rank runs its packs alone


def setup_context_groups(context_ranks: int) -> None:
    """Make a context group of every `context_ranks` neighbours. The first call is collective."""
    global group
    if context_ranks > 1 and group is None:
        group, _ = dist.new_subgroups(context_ranks, timeout=NCCL_TIMEOUT)


def context_group_size() -> int:
    return 1 if group is None else dist.get_world_size(group)


def divide_heads(
    query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the inputs of attention, [1, H, t, d], for all tokens of the `group`'s ranks and this
    rank's share of the heads: [1, H / R, all tokens, d]. Each head of gpt-oss has a sink."""
    R = dist.get_world_size(group)
    # If there are fewer key heads than ranks, each head goes to several ranks.
    copies = math.lcm(key.shape[1], R) // key.shape[1]
    key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    query, key, value = (exchange(x[0], group)[None] for x in (query, key, value))
    if sinks_H is not None:
        sinks_H = sinks_H.chunk(R)[dist.get_rank(group)]
    return query, key, value, sinks_H


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange the first dimension for all of the second, such as heads for tokens: [H, t, d] ->
    [H / R, all tokens, d]."""
    parts = x.unflatten(0, (dist.get_world_size(group), -1)).contiguous()
    parts = collectives.all_to_all_single_autograd(parts, None, None, group)
    return parts.transpose(0, 1).flatten(1, 2)
