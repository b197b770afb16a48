"""Context groups: with `--context_ranks` R, R neighbouring ranks run each pack together. A sequence
may then be R times as long as `--pack_tokens`.

Every rank of a group holds one of R equal parts of the pack's tokens. Only attention mixes tokens.
For it, the ranks exchange tokens for heads: each gets some of the heads for the tokens of all, and
gives them back afterwards (DeepSpeed-Ulysses, arXiv:2309.14509).

Shapes: t tokens of this rank's part, H heads, d head width."""

import math

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from common.parallel import distributed

all_gather = getattr(collectives, "all_gather_single_autograd", None) or (
    collectives.all_gather_tensor_autograd
)


def setup_context_groups(context_ranks: int) -> None:
    """Put every `context_ranks` neighbouring ranks into a group. The first call is collective."""
    if distributed.context_group is None:
        group, _ = dist.new_subgroups(context_ranks, timeout=distributed.NCCL_TIMEOUT)
        distributed.context_group = ContextGroup(group)


class ContextGroup:
    """Ranks that run each pack together."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def divide_heads(
        self, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Before attention: trade tokens for heads. In: query, key and value of all heads for this
        rank's tokens, [1, H, t, d]. Out: some heads for the tokens of all ranks of the group,
        [1, H / R, all tokens, d]. The sinks of gpt-oss, one per head, are divided likewise."""
        # If there are fewer key heads than ranks, each head goes to several ranks.
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
        query, key, value = (self.exchange(x[0])[None] for x in (query, key, value))
        if sinks_H is not None:
            sinks_H = sinks_H.chunk(self.size)[self.rank]
        return query, key, value, sinks_H

    def exchange(self, x: Tensor) -> Tensor:
        """Divide the first dimension among the ranks, and gather the second from them. For heads
        and tokens: [H, t, d] -> [H / R, all tokens, d]."""
        parts = x.unflatten(0, (self.size, -1)).contiguous()
        parts = collectives.all_to_all_single_autograd(parts, None, None, self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, with gradients."""
        return all_gather(x, 0, self.group)
