"""Context groups: with `--context_ranks` R, R neighbouring ranks run each pack together.

Every rank of a group holds one of R equal parts of the stream. Only attention mixes tokens; around
it, tokens are exchanged for heads (DeepSpeed-Ulysses, arXiv:2309.14509). A sequence may then be R
times as long as `--pack_tokens`.

Shapes: t tokens of this rank's part, H heads, d head width.
"""

import functools
import math
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from common.parallel.distributed import NCCL_TIMEOUT

group: dist.ProcessGroup | None = None  # of this rank; None: every rank runs its packs alone


def setup_context_groups(context_ranks: int) -> None:
    """Make a context group of every `context_ranks` neighbours. The first call is collective."""
    global group
    if context_ranks > 1 and group is None:
        group, _ = dist.new_subgroups(context_ranks, timeout=NCCL_TIMEOUT)


def context_group_size() -> int:
    return 1 if group is None else dist.get_world_size(group)


def exchange(attention: Callable) -> Callable:
    """Turn attention of all tokens and some heads into that of some tokens and all heads."""

    @functools.wraps(attention)
    def exchanged(module, query, key, value, *args, **kwargs):
        if "pack" not in kwargs or (group := kwargs["pack"].context_group) is None:
            return attention(module, query, key, value, *args, **kwargs)
        R = dist.get_world_size(group)
        # With fewer key heads than ranks, each head goes to several.
        copies = math.lcm(key.shape[1], R) // key.shape[1]
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        # [1, H, t, d] -> [1, H / R, all tokens, d]
        of_heads = [_exchange(x[0], group, R)[None] for x in (query, key, value)]
        if kwargs.get("s_aux") is not None:  # the sinks of gpt-oss, one for each head
            kwargs["s_aux"] = kwargs["s_aux"].chunk(R)[dist.get_rank(group)]
        out, weights = attention(module, *of_heads, *args, **kwargs)
        return _exchange(out[0], group, R)[None], weights  # [1, all tokens, H / R, d]

    return exchanged


def _exchange(x: Tensor, group: dist.ProcessGroup, R: int) -> Tensor:
    """Exchange heads for tokens, [H, t, d] -> [H / R, all tokens, d], or back."""
    parts = x.unflatten(0, (R, -1)).contiguous()
    parts = collectives.all_to_all_single_autograd(parts, None, None, group)
    return parts.transpose(0, 1).flatten(1, 2)
