"""A frozen model that follows the trained one."""

import torch
from torch import nn


@torch.no_grad()
def move_towards(frozen: nn.Module, policy: nn.Module, rate: float) -> None:
    """Move the weights of a frozen model towards those of the policy, which has the same shards:
    frozen <- (1 - rate) frozen + rate policy. A rate of 1 copies. Small moves need float32 shards
    of the frozen model. Call after an optimizer step, when each rank holds its shards only."""
    for old, new in zip(frozen.parameters(), policy.parameters(), strict=True):
        shard = old.to_local()
        shard.copy_(shard.float().lerp(new.to_local().float(), rate))
