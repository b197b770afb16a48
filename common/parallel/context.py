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

_context_group: dist.ProcessGroup | None = (
    None  # of this rank; None: every rank runs its packs alone
)


def setup_context_groups(context_ranks: int) -> None:
    """Make a context group of every `context_ranks` neighbours. The first call is collective, later
    ones do nothing."""
    global _context_group
    if context_ranks > 1 and _context_group is None:
        for first in range(0, dist.get_world_size(), context_ranks):  # every rank makes all groups
            ranks = range(first, first + context_ranks)
            group = dist.new_group(list(ranks), timeout=NCCL_TIMEOUT)
            _context_group = group if dist.get_rank() in ranks else _context_group


def context_group_size() -> int:
    return 1 if _context_group is None else dist.get_world_size(_context_group)


def context_group() -> dist.ProcessGroup | None:
    return _context_group


def exchange(attention: Callable) -> Callable:
    """Turn an attention function of all tokens and some heads into one of some tokens and all
    heads."""

    @functools.wraps(attention)
    def exchanged(module, query, key, value, *args, **kwargs):
        if "pack" not in kwargs or (group := kwargs["pack"].context_group) is None:
            return attention(module, query, key, value, *args, **kwargs)
        R = dist.get_world_size(group)
        copies = (
            math.lcm(key.shape[1], R) // key.shape[1]
        )  # fewer key heads than ranks: each goes to several
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        out, weights = attention(
            module, *(_to_heads(x, group, R) for x in (query, key, value)), *args, **kwargs
        )
        # [1, all tokens, H / R, d] -> [R tokens, t, H / R, d] -> [R heads, t, H / R, d] -> [1, t,
        # H, d]
        out = collectives.all_to_all_single_autograd(
            out[0].unflatten(0, (R, -1)).contiguous(), None, None, group
        )
        return out.transpose(0, 1).flatten(1, 2)[None], weights

    return exchanged


def _to_heads(x: Tensor, group: dist.ProcessGroup, R: int) -> Tensor:
    """Exchange tokens for heads: [1, H, t, d] -> [1, H / R, all tokens, d]."""
    x = collectives.all_to_all_single_autograd(
        x[0].unflatten(0, (R, -1)).contiguous(), None, None, group
    )
    return x.transpose(0, 1).flatten(1, 2)[None]
