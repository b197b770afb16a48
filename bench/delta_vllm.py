"""Makes vLLM's class of Qwen3.5 run on a CPU in float32, so that bench/models.py can compare with
it.

vLLM 0.32 imports torchvision for this class, and there is no build of it for a CPU torch; and its
CPU kernel of gated delta nets takes only bfloat16. `prepare` puts an empty torchvision on the path
and torch code in the kernel's place. Everything around it, with the cache of states, is vLLM's."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# What transformers and vLLM import; nothing calls it for text.
MODES = "NEAREST NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS"
EMPTY = {
    "torchvision/__init__.py": "from . import io, transforms",
    "torchvision/io.py": "ImageReadMode = decode_image = None",
    "torchvision/transforms/__init__.py": "import enum\n"
    f"InterpolationMode = enum.Enum('InterpolationMode', '{MODES}')",
    "torchvision/transforms/functional.py": "pil_to_tensor = None",
    "torchvision/transforms/v2/__init__.py": "from . import functional",
    "torchvision/transforms/v2/functional.py": "from .. import InterpolationMode",
    "torchvision-0.28.0.dist-info/METADATA": "Name: torchvision\nVersion: 0.28.0",
}


def prepare() -> None:
    """Make vLLM able to run gated delta nets here. Call this before vLLM is imported."""
    folder = Path(tempfile.mkdtemp())
    for name, text in EMPTY.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sys.path.append(str(folder))
    # vLLM looks at a model's class in a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])
    torch.cpu._is_avx512_bf16_supported = lambda: False  # else it packs the convolution's weights
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as kernel

    core.__annotations__["layer_name"] = kernel.LayerNameType  # torch registers it as an operation
    kernel.cpu_gdn_attention_core = core


def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name) -> None:
    """Takes the place of vLLM's operation: the convolution and the recurrence of all requests,
    which read and write their states."""
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as kernel

    context = kernel.get_forward_context()
    layer = context.no_compile_layers[kernel._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata = context.attn_metadata[layer.prefix]
    starts = metadata.non_spec_query_start_loc.tolist()
    requests = metadata.num_decodes + metadata.num_prefills
    continues = [True] * metadata.num_decodes
    if metadata.num_prefills:
        continues = metadata.has_initial_state[:requests].tolist()
    slots = metadata.non_spec_state_indices_tensor.tolist()[:requests]
    for slot, continued, start, end in zip(slots, continues, starts, starts[1:], strict=False):
        tokens = slice(start, end)
        states = kernel._conv_buffer_view(layer)[slot], kernel._ssm_state_view(layer)[slot]
        if not continued:
            for state in states:
                state.zero_()
        core_attn_out[tokens] = advance(layer, states, mixed_qkv[tokens], b[tokens], a[tokens])


def advance(layer, states: tuple[Tensor, Tensor], x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Return the outputs of a request's next tokens, and update its states."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    window, memory = states
    row = torch.cat([window.to(x.dtype), x.T], dim=1)[None]
    window.copy_(row[0, :, -window.shape[1] :])
    convolved = F.silu(F.conv1d(row, layer.conv1d.weight.to(x.dtype), groups=row.shape[1]))
    query, key, value = layer.rearrange_mixed_qkv(convolved[0].T)
    copies = value.shape[2] // key.shape[2]
    out, after = torch_recurrent_gated_delta_rule(
        query.repeat_interleave(copies, 2),
        key.repeat_interleave(copies, 2),
        value,
        g=(-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias))[None],
        beta=b.sigmoid()[None],
        initial_state=memory[None].float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    memory.copy_(after[0])
    return out[0]
