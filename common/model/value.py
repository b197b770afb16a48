"""The policy and the value model of a run, as `--value_model` and `--lora_rank` say."""

import torch
from torch import nn

from common.config.groups import TrainArgs
from common.model.policy import Policy, load_policy, load_scalar_model


def load_with_value_model(
    path: str, value_path: str, args: TrainArgs, device: torch.device
) -> tuple[Policy, nn.Module]:
    """Load the policy, and the value model that `--value_model` names. With adapters, a value model
    that starts from the same path shares the policy's layers. Raises `ValueError` like
    `load_policy` and `load_scalar_model`."""
    if args.lora_rank and value_path == path:
        from common.model.shared_value import load_shared

        return load_shared(path, args, device)
    policy = load_policy(path, args, device)
    return policy, load_scalar_model(value_path, args, device, flag="--value_model")
