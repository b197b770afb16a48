"""Moving average of a policy's weights, in a frozen model."""

import torch
from torch import nn


@torch.no_grad()
def move_towards(frozen: nn.Module, policy: nn.Module, rate: float) -> None:
    """Move the weights of `frozen` towards the trained ones of `policy`, shard by shard: frozen <-
    (1 - rate) frozen + rate policy. `frozen` has the trained weights under the same names. Keep it
    in float32: a small rate is rounded away in bfloat16."""
    averages = dict(frozen.named_parameters())
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            averages[name].lerp_(weight.to(averages[name].dtype), rate)
