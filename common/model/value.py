"""The value model of a policy with adapters: others in the policy's layers, and a scalar head. They share its frozen
weights, which are in memory once.

FSDP shards parameters where they are, and keeps them with their block and root after they have left the modules: these
are part of the policy while it is sharded, and then no more. So what asks the policy for its parameters, the
optimizer, the engine, checkpoints and exports, does not see them.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from common.config.groups import TrainArgs
from common.data.packing import PackedBatch
from common.model import lora
from common.model.loading import draw_head
from common.model.policy import Policy, ScalarModel, load_policy, load_scalar_model, scalars


def load_with_value_model(
    path: str, value_path: str, args: TrainArgs, device: torch.device
) -> tuple[Policy, "ScalarModel | ValueModel"]:
    """The policy, and the value model that `--value_model` names; beside adapters one that starts from the same path
    is part of the policy. Raises `ValueError` as `load_policy` and `load_scalar_model` do."""
    if lora.has_adapters(args) and value_path == path:
        values = ValueModel()
        return load_policy(path, args, device, values=values), values
    return load_policy(path, args, device), load_scalar_model(value_path, args, device, flag="--value_model")


class ValueModel(nn.Module):
    """What a `ScalarModel` with the same adapters and head computes. Its operations are counted by the policy."""

    flops = 0.0

    def join(self, policy: Policy) -> None:
        """Before the policy, on meta and with its adapters, is sharded."""
        self.policy = [policy]  # not as a submodule
        layers = {name: m for name, m in policy.hf.named_modules() if isinstance(m, lora.LoRALinear)}
        for layer in layers.values():
            layer.lora_second = lora.Adapter(layer, len(layer.lora_A))
        self.adapters = nn.ModuleDict({name.replace(".", "/"): m.lora_second for name, m in layers.items()})
        width = policy.hf.get_input_embeddings().weight.shape[1]
        self.score = policy.score = nn.Linear(width, 1, bias=False, device="meta")

    def leave(self, seed: int, home: torch.device) -> None:
        """When it is sharded: fill them as those of a `ScalarModel`."""
        (policy,) = self.policy
        del policy.score
        for layer in policy.hf.modules():
            if isinstance(layer, lora.LoRALinear):
                layer.__dict__["lora_second"] = layer._modules.pop("lora_second")
        self.to_empty(device=home)
        lora.fill_adapters(self, {}, seed)
        draw_head(self.score.weight.detach(), seed)
        self.copies, policy.values = policy.copies, self._values
        register_fsdp_forward_method(policy, "values")  # the head is whole in the root's forward alone

    def _values(self, mb: PackedBatch) -> Tensor:
        return scalars(self.policy[0].hidden_states(mb.computed, second=True), self.score, mb)

    def forward(self, mb: PackedBatch) -> Tensor:
        """Scalars [T], float32, as `ScalarModel`'s."""
        return self.policy[0].values(mb)

    def reshard(self) -> None:
        self.policy[0].reshard()
