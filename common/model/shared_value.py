"""Value model of a policy with adapters: further adapters on the policy's layers, and a scalar
head. The two share the frozen weights, which are in memory once.

FSDP shards the parameters of a module with its block or root, and still does so after they leave
the module. The parameters of the value model are part of the policy only while it is sharded.
Afterwards the optimizer, engine, checkpoints and exports of the policy exclude them."""

import torch
from torch import Tensor, nn

from common.config.groups import TrainArgs
from common.data.packing import PackedBatch
from common.model import lora
from common.model.loading import draw_head
from common.model.packable import language_model_on_meta
from common.model.policy import (
    Policy,
    complete,
    home_of,
    master_dtype,
    prepare,
    scalars,
    shard_and_read,
)


def load_shared(
    path: str, args: TrainArgs, device: torch.device
) -> tuple["SharedPolicy", "ValueModel"]:
    """Load a policy as `load` does, and a value model on its layers."""
    label = f"--model {path}"
    policy = SharedPolicy(
        language_model_on_meta(path, label, master_dtype(args, device, True)), path
    )
    adapter = prepare(policy, label, args, device, trainable=True)
    values = ValueModel(policy)
    if device.type != "meta":
        shard_and_read(policy, label, args, device, trainable=True)
        values.detach(args.seed, home_of(args, device))
        complete(policy, label, args, adapter)
    return policy, values


class SharedPolicy(Policy):
    """Policy whose layers have the adapters of a value model too."""

    forward_methods = ("values",)
    value_head: tuple[nn.Linear]  # no submodule

    def hidden_states(self, mb: PackedBatch, value_adapters: bool = False) -> Tensor:
        """Return the last hidden states [t, D], with the policy's adapters or the value model's."""
        use_adapters(self.hf, value_adapters)
        hidden_tD = super().hidden_states(mb)
        if hidden_tD.requires_grad:  # the backward may compute blocks again
            hidden_tD.register_hook(lambda _: use_adapters(self.hf, value_adapters))
        return hidden_tD

    def values(self, mb: PackedBatch) -> Tensor:
        """Return scalars [T], float32, of the value model."""
        hidden_tD = self.hidden_states(mb, value_adapters=True)
        return self._watched(mb, scalars(hidden_tD, self.value_head[0], mb))


def use_adapters(hf: nn.Module, value_adapters: bool) -> None:
    """Compute with the value model's adapters from now on, or with the policy's."""
    for layer in lora.layers_of(hf).values():
        layer.borrowed = layer.value_adapter if value_adapters else ()


class ValueModel(nn.Module):
    """Value model on a policy's layers, equal to a `ScalarModel` with the same adapters and head.
    The policy counts its operations."""

    flops = whole_flops = 0.0

    def __init__(self, policy: SharedPolicy):
        """Add adapters and head to a policy on meta, before sharding."""
        super().__init__()
        self.policy = (policy,)  # not a submodule
        self.adapters = nn.ModuleDict()
        for name, layer in lora.layers_of(policy.hf).items():
            layer.lora_second = nn.Module()
            lora.add_matrices(layer.lora_second, layer, len(layer.lora_A))
            self.adapters[name.replace(".", "/")] = layer.lora_second
        width = policy.hf.get_input_embeddings().weight.shape[1]
        policy.score = nn.Linear(width, 1, bias=False, device="meta")
        self.score = policy.score

    def detach(self, seed: int, home: torch.device) -> None:
        """Remove adapters and head from the sharded policy, and fill them like those of a
        `ScalarModel`. Collective."""
        (policy,) = self.policy
        del policy.score
        for layer in lora.layers_of(policy.hf).values():
            layer.value_adapter = (layer.lora_second,)  # no submodule
            del layer.lora_second
        self.to_empty(device=home)
        lora.fill_adapters(self, {}, seed)
        draw_head(self.score.weight.detach(), seed)
        self.copies = policy.copies
        policy.value_head = (self.score,)

    def forward(self, mb: PackedBatch) -> Tensor:
        """Return scalars [T], float32, like a `ScalarModel`."""
        return self.policy[0].values(mb)

    def reshard(self) -> None:
        self.policy[0].reshard()
