"""How many operations a forward takes, what a GPU can do, and how much memory is used: for the
metrics mfu and memory/* and for extras/plan."""

import gc
import resource
import sys

import torch
from torch import nn

from common.packs.tokens import ModelTokens

# FLOP/s of one device in dense bfloat16, as its manufacturer states. The key is a part of its name.
BFLOAT16_PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def attention_shape(config) -> tuple[int, int]:
    """Return the number of attention heads and the width of each, in the widest layer."""
    heads = getattr(config, "num_attention_heads", 1)
    if "head_dim" in (getattr(config, "per_layer_attributes", None) or ()):  # as in Gemma 4
        return heads, max(layer.head_dim for layer in config.per_layer_config)
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def num_delta_nets(config) -> int:
    """Return the number of layers that are gated delta nets (extras/architectures)."""
    return (getattr(config, "layer_types", None) or []).count("linear_attention")


def matrix_weights(hf: nn.Module) -> int:
    """Return the number of weights that each token is multiplied by: those of all matrices of the
    language model and its head. Of experts, only those that a token is routed to count."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings() or hf.score
    weights = head.weight.numel()
    for name, parameter in hf.get_decoder().named_parameters():
        if ".experts." in name:  # [experts, ...]
            weights += parameter[0].numel() * hf.config.get_text_config().num_experts_per_tok
        elif parameter.ndim > 1 and parameter is not embedding.weight:
            weights += parameter.numel()
    return weights


def forward_flops(config, weights: int, tokens: ModelTokens) -> float:
    """Return the floating-point operations of one forward over a pack: two for each token and
    weight and, in every layer with attention, 4 x heads x width for each pair of a query and a key
    that it sees. Ignores sliding windows and the states of gated delta nets."""
    config = config.get_text_config()
    pairs = 0
    for queries, keys in zip(tokens.lengths, (tokens.keys or tokens).lengths, strict=True):
        pairs += queries * (keys - queries) + queries * (queries + 1) / 2
    # The ranks of a context group share the heads.
    pairs *= len(tokens.targets_T) / tokens.offsets[-1]
    heads, width = attention_shape(config)
    layers = config.num_hidden_layers - num_delta_nets(config)
    attention = 4 * heads * width * pairs * layers
    return 2.0 * weights * len(tokens.targets_T) + attention


def peak_memory() -> dict[str, float]:
    """Return the peaks of memory in GB: on the host, of this process since its start; on CUDA, of
    the trainer's tensors since the last call."""
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    peaks = {"memory/host_peak_gb": used / 1e9}
    if torch.cuda.is_available():
        peaks["memory/device_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return peaks


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's peak FLOP/s in this dtype; None if unknown."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BFLOAT16_PEAK.items() if part in name), None)


def used_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes in use on a GPU, without torch's cache, and its capacity."""
    gc.collect()  # a dropped model still holds its memory: it contains reference cycles
    torch.cuda.empty_cache()
    free, capacity = torch.cuda.mem_get_info(device)
    return capacity - free, capacity
