"""Value model of a policy with adapters: further adapters on the policy's layers, and a scalar head. The two share the
frozen weights, which are in memory once.

FSDP shards the parameters of a module with its block or root, and still does so after they leave the module. The
parameters of the value model are part of the policy only while it is sharded. Afterwards the optimizer, engine,
checkpoints and exports of the policy exclude them.
"""

import torch
from torch import Tensor, nn

from common.config.groups import TrainArgs
from common.data.packing import PackedBatch
from common.model import lora
from common.model.loading import draw_head
from common.model.policy import Policy, ScalarModel, load_policy, load_scalar_model


def load_with_value_model(
    path: str, value_path: str, args: TrainArgs, device: torch.device
) -> tuple[Policy, "ScalarModel | ValueModel"]:
    """Load the policy, and the value model that `--value_model` names. With adapters, a value model that starts from
    the same path shares the policy's layers. Raises `ValueError` like `load_policy` and `load_scalar_model`."""
    if lora.has_adapters(args) and value_path == path:
        values = ValueModel()
        return load_policy(path, args, device, values=values), values
    return load_policy(path, args, device), load_scalar_model(value_path, args, device, flag="--value_model")


class ValueModel(nn.Module):
    """Value model on a policy's layers, equal to a `ScalarModel` with the same adapters and head. The policy counts its
    operations."""

    flops = whole_flops = 0.0

    def attach(self, policy: Policy) -> None:
        """Add adapters and head to a policy on meta, before sharding."""
        self.policy = (policy,)  # not a submodule
        layers = lora.layers_of(policy.hf)
        for layer in layers.values():
            layer.lora_second = lora.Adapter(layer, len(layer.lora_A))
        self.adapters = nn.ModuleDict({name.replace(".", "/"): m.lora_second for name, m in layers.items()})
        width = policy.hf.get_input_embeddings().weight.shape[1]
        self.score = policy.score = nn.Linear(width, 1, bias=False, device="meta")

    def detach(self, seed: int, home: torch.device) -> None:
        """Remove adapters and head from the sharded policy, and fill them like those of a `ScalarModel`."""
        (policy,) = self.policy
        del policy.score
        for layer in lora.layers_of(policy.hf).values():
            layer.second_adapter = (layer.lora_second,)
            del layer.lora_second
        self.to_empty(device=home)
        lora.fill_adapters(self, {}, seed)
        draw_head(self.score.weight.detach(), seed)
        self.copies, policy.value_head = policy.copies, (self.score,)

    def forward(self, mb: PackedBatch) -> Tensor:
        """Return scalars [T], float32, like a `ScalarModel`."""
        return self.policy[0].values(mb)

    def reshard(self) -> None:
        self.policy[0].reshard()
