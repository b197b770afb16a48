"""Whether a run fits on its GPUs, and whether its activations do, by arithmetic.

docs/memory.md explains the arithmetic; `bench/memory_plan.py` compares it with the allocations of
a training step on fake tensors. Bytes, on each of R ranks."""

import gc
import importlib.util
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from common.config.groups import TrainArgs
from common.config.online import OnlineArgs
from common.model.flops import attention_shape, capacity_of, num_delta_nets
from common.model.loading import towers_of
from common.model.logprobs import chunk_size

GIB = 2**30
# Of a GPU's memory: NCCL's buffers, CUDA graphs and the allocator's pools are not predicted.
USABLE = 0.92

Bytes = dict[str, float]  # bytes by use

_loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of this process


@dataclass(frozen=True)
class Plan:
    """Settings of a run that its memory depends on."""

    ranks: int  # ranks that a model is sharded over
    pack_tokens: int
    recompute: bool
    offload: str = "none"
    engine: float = 0.0  # bytes of a transformers engine, which stays while the trainer works


def require_memory(model: nn.Module, label: str, args: TrainArgs) -> None:
    """Raise `ValueError` if a model does not fit on a GPU beside the loaded ones. Call it before
    the weights are read."""
    _loaded.add(model)
    capacity = capacity_of(model.device)
    needs = total(predict(loaded_models(), plan_of(model, args)))
    if needs > USABLE * capacity:
        problem = f"needs {needs / GIB:.1f} GiB of {capacity / GIB:.1f} on each GPU"
        usable = f"of which {USABLE:.0%} are usable; --dry_run shows what would fit"
        raise ValueError(f"{label}: {problem}, {usable}")


def keep_activations_that_fit(trained: Sequence[nn.Module], args: TrainArgs) -> str:
    """Turn activation checkpointing off if a run whose models are all loaded fits without it,
    unless the flag is given. Return a line about memory."""
    plan = plan_of(trained[0], args)
    if not plan.recompute:
        for model in trained:
            model.hf.gradient_checkpointing_disable()
    kept = "recomputed" if plan.recompute else "kept"
    needs, capacity = total(predict(loaded_models(), plan)), capacity_of(trained[0].device)
    return f"memory per GPU, activations {kept}: {needs / GIB:.1f} GiB of {capacity / GIB:.1f}"


def loaded_models() -> list[nn.Module]:
    gc.collect()  # a dropped model may be part of a reference cycle
    return list(_loaded)


def plan_of(model: nn.Module, args: TrainArgs) -> Plan:
    """Return the plan for the loaded models, of which `model` is one, and the flags."""
    ranks = next(model.parameters()).device_mesh.size(-1)  # (shards,) or (copies, shards)
    return make_plan(loaded_models(), args, ranks, capacity_of(model.device))


def make_plan(models: Sequence[nn.Module], args: TrainArgs, ranks: int, capacity: float) -> Plan:
    """Return the plan for models that are sharded over `ranks` GPUs of this `capacity`; 0: a CPU.
    Without `--activation_checkpointing`, activations that do not fit are recomputed."""
    engine = 0.0
    if isinstance(args, OnlineArgs) and not args.rollout_ranks and not uses_vllm(args):
        policies = [m for m in models if head_weights(m) and num_weights(m, trained=True)]
        engine = max((m.compute_dtype.itemsize * num_weights(m) for m in policies), default=0)
    plan = Plan(ranks, args.pack_tokens, bool(args.activation_checkpointing), args.offload, engine)
    if args.activation_checkpointing is None and capacity:
        configs = (model.hf.config.get_text_config() for model in models)
        # A softcap needs all scores at once, which are not predicted.
        is_capped = any(getattr(x, "attn_logit_softcapping", None) is not None for x in configs)
        too_large = total(predict(models, plan)) > USABLE * capacity
        plan = replace(plan, recompute=is_capped or too_large)
    return plan


def uses_vllm(args: TrainArgs) -> bool:
    """Return whether vLLM samples in this launch, or in one that is planned."""
    is_there = args.dry_run or importlib.util.find_spec("vllm") is not None
    return args.engine != "transformers" and bool(is_there)


# ---- the arithmetic; models are on meta or sharded ----


def predict(models: Sequence[nn.Module], plan: Plan) -> Bytes:
    """Return the bytes on each GPU at the peak of an update, by use. Trained models are updated one
    after the other, so that only one has activations."""
    trained = [model for model in models if num_weights(model, trained=True)]
    frozen = [model for model in models if model not in trained]
    on_gpu = 0 if plan.offload == "all" else 1 / plan.ranks
    numbers = sum(num_weights(model, trained=True) for model in trained)
    teacher_head = max(map(head_weights, frozen or trained), default=0)  # perhaps of the policy
    return {
        "weights": sum(map(size_of, trained)) * on_gpu,
        "frozen models": sum(map(size_of, frozen)) * on_gpu,
        # Offloaded moments of one parameter in its update take less than its backward.
        "Adam": 8 * numbers / plan.ranks if plan.offload == "none" else 0,
        "gradients": 4 * numbers * on_gpu,
        "engine": plan.engine,
    } | max((training_peak(model, plan, teacher_head) for model in trained), key=total, default={})


def training_peak(model: nn.Module, plan: Plan, teacher_head: int) -> Bytes:
    """Return the memory of one micro-batch beside weights, gradients and Adam's moments, at the
    largest of three times: the backward of the head, of a block, and of the root, which FSDP holds
    until the end. A student has a copy of the `teacher_head` beside it."""
    size = model.compute_dtype.itemsize
    config = model.hf.config.get_text_config()
    blocks = model.hf.get_decoder().layers
    block, root = block_and_root(model)
    block_trained, root_trained = block_and_root(model, trained=True)
    kept = kept_by_blocks(model)
    inputs = len(blocks) * size * config.hidden_size if plan.recompute else sum(kept)
    last = (4 + 2 * size) * config.hidden_size  # the last norm and the head
    of_tower = 0 if model.images is None else size * model.images.kept_numbers()
    saved = (inputs + last + of_tower) * plan.pack_tokens
    head_trained = head_weights(model) if root_trained else 0

    # In the forward two chunks of logits, in the backward the gradient of the head and as many
    # numbers per logit as the loss needs.
    chunk = chunk_size(config.vocab_size * (1 + model.distils), on_cuda=True)
    logits = 4 * min(plan.pack_tokens, chunk) * config.vocab_size if head_weights(model) else 0
    copies = 7 if model.distils else 2 if chunk < plan.pack_tokens else 1.5
    of_head = max(2 * logits, 4 * head_trained + copies * logits)
    at_head = {
        "gathered weights": size * (root + block),
        "activations": saved,
        "logits and head": of_head + size * teacher_head * model.distils,
    }
    at_block = {
        "gathered weights": size * (root + 2 * block),
        "activations": saved + max(kept) * plan.pack_tokens * plan.recompute,
        "gradients in reduction": size * head_trained + (size + 4) * block_trained,
    }
    # From the compute dtype to float32, and from there to shards.
    reduced = max(size + 4, 4 + 4 / plan.ranks) * root_trained
    at_root = {"gradients in reduction": reduced + 4 * block_trained}
    return max(at_head, at_block, at_root, key=total)


def kept_by_blocks(model: nn.Module) -> list[float]:
    """Return the bytes per token that each block keeps for its backward: the inputs of norms (in
    float32 too) and of matrix products, queries, keys, values and outputs of attention, and four
    activations of the MLP's width."""
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
    delta_nets = num_delta_nets(config)  # in place of attention
    kept = [attention + others] * (config.num_hidden_layers - delta_nets)
    return kept + [4 * getattr(model.hf, "kept_by_delta_net", 0) + others] * delta_nets


def block_and_root(model: nn.Module, trained: bool = False) -> tuple[int, int]:
    """Return the number of weights of the largest block, and of those outside of blocks that FSDP
    gathers: towers only if they read images."""
    blocks = [num_weights(block, trained) for block in model.hf.get_decoder().layers]
    towers = towers_of(model.hf) if model.images is None else []
    apart = sum(blocks) + sum(num_weights(tower, trained) for tower in towers)
    return max(blocks), num_weights(model, trained) - apart


def num_weights(module: nn.Module, trained: bool = False) -> int:
    """Return the number of weights of all ranks together, or of those with a gradient."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


def head_weights(model: nn.Module) -> int:
    """Return the weights of a head over the vocabulary; 0: a scalar head."""
    head = model.hf.get_output_embeddings()
    return 0 if head is None else head.weight.numel()


def size_of(model: nn.Module) -> int:
    """Return the bytes of all weights: float32 masters, or frozen ones in the compute dtype."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def total(uses: Bytes) -> float:
    return sum(uses.values())
