"""What a step asks of the machine: arithmetic, and memory. Numbers for metrics.jsonl."""

import resource
import sys
from itertools import pairwise

import torch
from torch import nn

from common.parallel.placement import Stream

# Dense bfloat16 rate of one device, in FLOP/s, as its maker states it; by a part of the name that CUDA gives.
BFLOAT16_PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def matrix_weights(hf: nn.Module) -> int:
    """Weights that every token is multiplied with: those of matrix products, of the head too, and of as many experts as
    a token chooses. An embedding that is no head is none of them."""
    embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings()
    weights = 0
    for name, parameter in hf.named_parameters():
        if ".experts." in name:  # [experts, ...]
            weights += parameter[0].numel() * hf.config.num_experts_per_tok
        elif parameter.ndim > 1:
            weights += parameter.numel()
    return weights if head is not None and head.weight is embedding else weights - embedding.numel()


def forward_flops(config, weights: int, stream: Stream) -> float:
    """Floating-point operations of one forward over a pack: two for each token and each of the `weights`, and 4 heads
    head_dim for each query and each key that it sees, in every layer. Windows are not looked at. A backward is twice
    that; what is computed again is not counted."""
    config = config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = sum((end - begin) * (end - begin + 1) / 2 for begin, end in pairwise(stream.offsets))
    seen *= len(stream.targets_T) / stream.offsets[-1]  # this rank's share of heads, if it shares them
    attention = 4 * config.num_attention_heads * head_dim * seen * config.num_hidden_layers
    return 2.0 * weights * len(stream.targets_T) + attention


def peak_memory() -> dict[str, float]:
    """Most memory in use at a time, in GB: of this process on the host so far and, on CUDA, of the trainer's tensors
    since the last call."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peaks = {"memory/host_peak_gb": used / 1e9}
    if torch.cuda.is_available():
        peaks["memory/device_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return peaks


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device can do in this dtype; None where that is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in BFLOAT16_PEAK.items() if part in name), None)
