"""How many blocks can keep their activations on the GPUs of a run. `Run` asks it on CUDA, and the
plan does (launch.py, which adds what lies on a GPU already). Bytes are those on each rank.

README.md explains the arithmetic; `bench/memory_plan.py` compares it with the allocations of a
training step on fake tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from common.config.groups import TrainArgs
from common.config.online import USABLE
from common.model.flops import attention_shape, used_memory
from common.model.loading import towers_of
from common.model.logprobs import chunk_size
from common.parallel import distributed

GIB = 2**30
UNPACKING = 6  # bytes per weight, while a packed matrix is unpacked

Bytes = dict[str, float]  # bytes by use


def keep_activations_that_fit(trained: Sequence[nn.Module], args: TrainArgs) -> str:
    """Turn activation checkpointing off for as many blocks as fit beside everything that is on the
    GPU already, unless the flag is given. Return a line about memory. Call it when models and
    optimizers are loaded and a colocated engine sleeps. Collective."""
    ranks = next(trained[0].parameters()).device_mesh.size(-1)  # (shards,) or (copies, shards)
    used, capacity = used_memory(trained[0].device)
    if args.offload != "all":
        used += 4 / ranks * sum(num_weights(model, trained=True) for model in trained)  # gradients
    room = USABLE * capacity - used
    recomputed = [num_blocks(model) - blocks_to_keep(model, room, ranks, args) for model in trained]
    recomputed = distributed.all_max(torch.tensor(recomputed)).tolist()
    kept = [num_blocks(model) - n for model, n in zip(trained, recomputed, strict=True)]
    for model, count in zip(trained, kept, strict=True):
        keep_activations(model, count)
    peaks = map(training_peak, trained, repeat(ranks), repeat(args.pack_tokens), kept)
    size = used + max(map(total, peaks))  # models are updated one after the other
    blocks = f"{sum(kept)} of {sum(map(num_blocks, trained))} blocks"
    memory = f"{size / GIB:.1f} GiB of {capacity / GIB:.1f}"
    return f"memory per GPU, activations of {blocks} kept: {memory}"


def blocks_to_keep(model: nn.Module, room: float, ranks: int, args: TrainArgs) -> int:
    """Return how many blocks keep their activations instead of recomputing them: all or none if the
    flag says so, else as many as fit in `room` bytes."""
    count = num_blocks(model)
    if args.activation_checkpointing is not None:
        return 0 if args.activation_checkpointing else count
    config = model.hf.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return 0  # attention needs all scores at once, whose memory is not predicted
    has_switches = isinstance(model.hf.get_decoder().layers[0], GradientCheckpointingLayer)
    choices = range(count + 1) if has_switches else (0, count)
    peaks = {kept: total(training_peak(model, ranks, args.pack_tokens, kept)) for kept in choices}
    return max((kept for kept, peak in peaks.items() if peak <= room), default=0)


def keep_activations(model: nn.Module, count: int) -> None:
    """Turn activation checkpointing off for the last `count` blocks. The last blocks run their
    backward first, so their activations are gone when an earlier block is recomputed."""
    if count == num_blocks(model):
        model.hf.gradient_checkpointing_disable()
    for block in model.hf.get_decoder().layers[num_blocks(model) - count :]:
        block.gradient_checkpointing = False


def training_peak(model: nn.Module, ranks: int, pack_tokens: int, kept: int) -> Bytes:
    """Return the memory of one micro-batch beside weights, gradients and Adam's moments, by use.
    The model is sharded over `ranks` and keeps the activations of its last `kept` blocks.

    The peak is at one of three times: in the backward of the head, of a block, or of the root,
    which FSDP holds to the end. A student also has a copy of its teacher's head, which counts like
    its own."""
    size = model.compute_dtype.itemsize
    config = model.hf.config.get_text_config()
    block, root = block_and_root(model, partial(gathered_size, size=size))
    block_trained, root_trained = block_and_root(model, partial(num_weights, trained=True))
    of_blocks = kept_by_blocks(model)
    recomputed = len(of_blocks) - kept
    inputs = recomputed * size * config.hidden_size
    saved = inputs + sum(of_blocks[recomputed:])
    again = inputs + max(of_blocks[:recomputed], default=0)  # later blocks are done by then
    last = (4 + 2 * size) * config.hidden_size  # the last norm and the head
    of_tower = 0 if model.images is None else size * model.images.kept_numbers()
    head = model.hf.get_output_embeddings()
    num_head = 0 if head is None else head.weight.numel()  # 0: a scalar head
    head_trained = num_head if root_trained else 0

    # The forward has two chunks of logits; the backward has the gradient of the head, and as many
    # numbers per logit as the loss needs.
    chunk = chunk_size(config.vocab_size * (1 + model.distils), on_cuda=True)
    logits = 4 * min(pack_tokens, chunk) * config.vocab_size if num_head else 0
    copies = 6 if model.distils else 2 if chunk < pack_tokens else 1.5
    of_head = max(2 * logits, 4 * head_trained + copies * logits)
    at_head: dict = {
        "gathered weights": root + block,
        "activations": (saved + last + of_tower) * pack_tokens,
        "logits and head": of_head + size * num_head * model.distils,
    }
    at_block: dict = {
        "gathered weights": root + 2 * block,
        "unpacked matrix": UNPACKING * max(map(num_packed, model.modules())),
        "activations": (max(saved, again) + last + of_tower) * pack_tokens,
        "gradients in reduction": size * head_trained + (size + 4) * block_trained,
    }
    # Gradients go from the compute dtype to float32, and from there to shards.
    reduced = max(size + 4, 4 + 4 / ranks) * root_trained
    at_root: dict = {"gradients in reduction": reduced + 4 * block_trained}
    return max(at_head, at_block, at_root, key=total)


def kept_by_blocks(model: nn.Module) -> list[float]:
    """Return how many bytes per token each block keeps for its backward: the inputs of norms (in
    float32 too) and of matrix products; queries, keys, values and outputs of attention; and four
    activations as wide as the MLP."""
    size, config = model.compute_dtype.itemsize, model.hf.config.get_text_config()
    heads, width = attention_shape(config)
    queries = heads * width
    keys = (getattr(config, "num_key_value_heads", None) or heads) * width
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    copies = 1
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if experts:  # tokens are copied to experts and back
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        copies = 3 * experts
    blocks = model.hf.get_decoder().layers
    has_norms = any("q_norm" in name for name, _ in blocks.named_parameters())
    normed = 2 * config.hidden_size + (queries + keys) * has_norms
    attention = size * (2 * queries + 2 * keys)
    others = size * (config.hidden_size * (1 + copies) + 4 * inner) + (4 + size) * normed
    delta_net = 4 * getattr(model.hf, "kept_by_delta_net", 0)  # in place of attention
    kinds = getattr(config, "layer_types", None) or [""] * len(blocks)
    return [others + (delta_net if kind == "linear_attention" else attention) for kind in kinds]


def block_and_root(model: nn.Module, measure: Callable[[nn.Module], int]) -> tuple[int, int]:
    """Return `measure` of the largest block, and of all that FSDP gathers outside of blocks. Towers
    are left out unless they read images."""
    blocks = [measure(block) for block in model.hf.get_decoder().layers]
    towers = towers_of(model.hf) if model.images is None else []
    apart = sum(blocks) + sum(measure(tower) for tower in towers)
    return max(blocks), measure(model) - apart


def num_blocks(model: nn.Module) -> int:
    return len(model.hf.get_decoder().layers)


def num_weights(module: nn.Module, trained: bool = False) -> int:
    """Return the number of weights on all ranks together, or only of those that are trained."""
    parameters = [p for p in module.parameters() if p.requires_grad or not trained]
    packed = 0 if trained else sum(map(num_packed, module.modules()))
    return packed + sum(p.numel() for p in parameters if p.is_floating_point())


def num_packed(module: nn.Module) -> int:
    """Return how many weights a module itself holds as packed bytes (`--quantize`)."""
    is_packed = isinstance(module, nn.Linear) and not module.weight.is_floating_point()
    return module.in_features * module.out_features if is_packed else 0


def gathered_size(module: nn.Module, size: int) -> int:
    """Return the bytes of weights that FSDP has gathered, `size` each; packed ones stay as they
    are."""
    return sum(p.numel() * (size if p.is_floating_point() else 1) for p in module.parameters())


def total(uses: Bytes) -> float:
    return sum(uses.values())
