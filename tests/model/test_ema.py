"""A frozen model that follows the policy: values by a naive formula, float32 shards."""

import pytest
import torch

from common.config.groups import TrainArgs
from common.model.policy import load_policy, move_towards
from common.model.tiny import tiny_model


def weights(model) -> torch.Tensor:
    return torch.cat([p.full_tensor().flatten().double() for p in model.parameters()])


@pytest.fixture
def models(device):
    """The policy and a frozen model with other weights, which is to move."""
    args = TrainArgs(dtype="bfloat16")
    policy = load_policy(tiny_model(), args, device)
    frozen = load_policy(tiny_model(), args, device, trainable=False, moves=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.02).add_(1e-3)
    return frozen, policy


@pytest.mark.parametrize("rate", [0.001, 0.25, 0.6, 1.0])
def test_move_equals_naive_code(models, rate):
    """A rate of 0.001 would be lost in bfloat16. A rate of 1 copies, bit for bit."""
    frozen, policy = models
    start, goal = weights(frozen), weights(policy)
    move_towards(frozen, policy, rate)
    torch.testing.assert_close(
        weights(frozen), (1 - rate) * start + rate * goal, rtol=1e-6, atol=1e-8
    )
    assert torch.equal(weights(policy), goal) and (weights(frozen) != start).any()
    assert torch.equal(weights(frozen), goal) == (rate == 1)
    assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
