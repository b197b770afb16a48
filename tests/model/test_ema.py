"""A frozen model that follows the policy: values by a naive formula, float32 shards."""

import pytest
import torch

from common.config.groups import TrainArgs
from common.model.policy import load_policy, move_towards
from common.model.tiny import tiny_model


def weights(model) -> torch.Tensor:
    return torch.cat([p.full_tensor().flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("rate", [0.001, 1.0])
def test_move_equals_naive_code(rate, device):
    """A rate of 0.001 would be lost in bfloat16. A rate of 1 copies, bit for bit."""
    args = TrainArgs(dtype="bfloat16")
    policy = load_policy(tiny_model(), args, device)
    frozen = load_policy(tiny_model(), args, device, trainable=False, moves=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02).add_(1e-3)
    start, goal = weights(frozen), weights(policy)
    move_towards(frozen, policy, rate)
    moved = weights(frozen)
    torch.testing.assert_close(moved, (1 - rate) * start + rate * goal, rtol=1e-6, atol=1e-8)
    assert torch.equal(weights(policy), goal) and (moved != start).any()
    assert torch.equal(moved, goal) == (rate == 1)
    assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
