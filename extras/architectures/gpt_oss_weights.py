"""Copies new weights of gpt-oss into vLLM 0.32, whose reload forgets the experts and sinks: vLLM's
class copies them without the loaders that the reload relies on. Delete this once vLLM does it."""

import torch
from torch import Tensor

# Names in transformers' model -> in vLLM's, whose matrices are transposed.
EXPERTS = dict(gate_up_proj="w13_weight", gate_up_proj_bias="w13_bias",
               down_proj="w2_weight", down_proj_bias="w2_bias")  # fmt: skip


@torch.no_grad()
def copy_weights(worker, weights: dict[str, Tensor]) -> None:
    """Copy experts and sinks into vLLM's model, and let it make the experts' kernels again."""
    model = worker.get_model()
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "sinks":
            parameters[name.replace(".self_attn.", ".attn.")].copy_(weight)
        else:
            target = parameters[f"{layer}.routed_experts.{EXPERTS[kind]}"]
            target.copy_(weight if weight.ndim == 2 else weight.transpose(1, 2))
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None
            method.process_weights_after_loading(module)
