"""Memory of a run on GPUs, predicted from the shapes of its models, and whether it fits.

docs/memory.md explains the arithmetic; `bench/memory_plan.py` compares it with the allocations of
a training step on fake tensors. Bytes, on each of R ranks."""

import gc
import importlib.util
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from common.config.groups import TrainArgs
from common.config.online import OnlineArgs
from common.config.sampling import BESIDE_TRAINER
from common.model.flops import attention_shape, capacity_of, kept_numbers, num_delta_nets
from common.model.head import chunk_size

GIB = 2**30
# Of a GPU's memory: NCCL's buffers, CUDA graphs and the allocator's pools are not predicted.
USABLE = 0.92

Bytes = dict[str, float]  # bytes by use


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model that its memory depends on. Weights are those of all ranks together."""

    weights: int
    trained: int  # weights with a gradient
    size: int  # bytes of all weights: float32 masters, or frozen ones in the compute dtype
    block: int  # weights of the largest transformer block
    block_trained: int
    root: int  # weights outside of blocks: embedding, last norm, head
    root_trained: int
    head: int  # weights of a head over the vocabulary; 0: a scalar head
    vocabulary: int
    layers: int
    hidden: int
    kept: float  # bytes per token that all blocks keep for their backward
    kept_by_block: float  # the most that one of them keeps
    kept_by_tower: float  # bytes per placeholder of an image
    bytes: int  # of a number in the compute dtype
    distils: bool  # whether every token is compared with a teacher's distribution
    capped: bool  # whether attention has a softcap, which needs all scores at once, uncounted


@dataclass(frozen=True)
class Plan:
    """Settings of a run that its memory depends on."""

    ranks: int  # ranks that a model is sharded over
    pack_tokens: int
    recompute: bool
    offload: str = "none"
    engine: float = 0.0  # bytes of an engine beside the trainer while it samples
    engine_ranks: int = 1  # ranks that share the engine
    engine_stays: bool = False  # whether the engine keeps its memory while the trainer works


def shapes_of(model: nn.Module, dtype: torch.dtype) -> Shapes:
    """Return the shapes of a `PackedModel` with this compute dtype, on meta or sharded."""
    hf = model.hf
    config = hf.config.get_text_config()
    head = hf.get_output_embeddings()
    parts = [hf] if model.tower is None else [hf, model.tower]
    weights = [parameter for part in parts for parameter in part.parameters()]
    in_blocks = [list(block.parameters()) for block in hf.get_decoder().layers]
    of_blocks = [_count(block) for block in in_blocks]
    trained_of_blocks = [_count(block, trained=True) for block in in_blocks]
    kept = _kept_by_layers(hf, config, dtype.itemsize)
    return Shapes(
        weights=_count(weights),
        trained=_count(weights, trained=True),
        size=sum(p.numel() * p.element_size() for p in weights),
        block=max(of_blocks),
        block_trained=max(trained_of_blocks),
        root=_count(weights) - sum(of_blocks),
        root_trained=_count(weights, trained=True) - sum(trained_of_blocks),
        head=0 if head is None else head.weight.numel(),
        vocabulary=config.vocab_size,
        layers=len(in_blocks),
        hidden=config.hidden_size,
        kept=sum(kept),
        kept_by_block=max(kept),
        kept_by_tower=0 if model.tower is None else dtype.itemsize * model.tower.kept_numbers(),
        bytes=dtype.itemsize,
        distils=model.distils,
        capped=getattr(config, "attn_logit_softcapping", None) is not None,
    )


def _count(parameters: Sequence[nn.Parameter], trained: bool = False) -> int:
    """Return the number of weights, or of those with a gradient."""
    return sum(p.numel() for p in parameters if p.requires_grad or not trained)


def _kept_by_layers(hf: nn.Module, config, size: int) -> list[float]:
    """Return the bytes per token that each block keeps for its backward, with numbers of `size`
    bytes: the inputs of norms (in float32 too) and of matrix products, queries, keys, values and
    outputs of attention, and four activations of the MLP's width."""
    heads, width = attention_shape(config)
    queries = heads * width
    keys = (getattr(config, "num_key_value_heads", None) or heads) * width
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    copies = 1
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if experts:  # tokens are copied to experts and back
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
        copies = 3 * experts
    has_norms = any("q_norm" in name for name, _ in hf.get_decoder().layers.named_parameters())
    normed = 2 * config.hidden_size + (queries + keys) * has_norms
    attention = size * (2 * queries + 2 * keys)
    others = size * (config.hidden_size * (1 + copies) + 4 * inner) + (4 + size) * normed
    delta_nets = num_delta_nets(config)
    kept = [attention + others] * (config.num_hidden_layers - delta_nets)
    if delta_nets:  # in place of attention
        kept += [4 * kept_numbers(config) + others] * delta_nets
    return kept


# ---- a step ----


def training_peak(m: Shapes, plan: Plan, teacher_head: int) -> Bytes:
    """Return the memory of one micro-batch beside weights, gradients and Adam's moments, at the
    largest of three times: the backward of the head, of a block, and of the root, which FSDP holds
    until the end. A student has a copy of the `teacher_head` beside it."""
    blocks = m.layers * m.bytes * m.hidden if plan.recompute else m.kept
    last = (4 + 2 * m.bytes) * m.hidden  # the last norm and the head
    saved = (blocks + last + m.kept_by_tower) * plan.pack_tokens
    head_trained = m.head if m.root_trained else 0
    at_head = {
        "gathered weights": m.bytes * (m.root + m.block),
        "activations": saved,
        "logits and head": _logits(m, plan, head_trained) + m.bytes * teacher_head * m.distils,
    }
    at_block = {
        "gathered weights": m.bytes * (m.root + 2 * m.block),
        "activations": saved + m.kept_by_block * plan.pack_tokens * plan.recompute,
        "gradients in reduction": m.bytes * head_trained + (m.bytes + 4) * m.block_trained,
    }
    # From the compute dtype to float32, and from there to shards.
    reduced = max(m.bytes + 4, 4 + 4 / plan.ranks) * m.root_trained
    at_root = {"gradients in reduction": reduced + 4 * m.block_trained}
    return _largest(at_head, at_block, at_root)


def _logits(m: Shapes, plan: Plan, head_trained: int) -> float:
    """Return the bytes of logits and of the head's gradient: in the forward two chunks of logits,
    in the backward the gradient and as many numbers per logit as the loss needs."""
    if not m.head:
        return 0
    chunk = min(plan.pack_tokens, chunk_size(m.vocabulary * (1 + m.distils), on_cuda=True))
    logits = 4 * chunk * m.vocabulary
    copies = 7 if m.distils else 2 if chunk < plan.pack_tokens else 1.5
    return max(2 * logits, 4 * head_trained + copies * logits)


def _largest(*times: Bytes) -> Bytes:
    """Return the memory at the time with the most bytes."""
    return max(times, key=lambda uses: sum(uses.values()))


def predict(models: Sequence[Shapes], plan: Plan) -> Bytes:
    """Return the bytes on each GPU at the peak of a step, by use: the larger peak of the update
    and, with a colocated engine, of sampling. Trained models are updated one after the other, so
    that only one has activations."""
    trained = [m for m in models if m.trained]
    frozen = [m for m in models if not m.trained]
    on_gpu = 0 if plan.offload == "all" else 1 / plan.ranks
    numbers = sum(m.trained for m in trained)
    resident = {
        "weights": sum(m.size for m in trained) * on_gpu,
        "frozen models": sum(m.size for m in frozen) * on_gpu,
        # Offloaded moments of one parameter in its update take less than its backward.
        "Adam": 8 * numbers / plan.ranks if plan.offload == "none" else 0,
    }
    teacher_head = max((m.head for m in frozen or trained), default=0)  # perhaps of the policy
    peaks = (training_peak(m, plan, teacher_head) for m in trained)
    update = resident | {"gradients": 4 * numbers * on_gpu} | _largest({}, *peaks)
    if plan.engine_stays:
        update["engine"] = plan.engine
    if not plan.engine:
        return update
    gathered = max(m.bytes * (m.root + 2 * m.block) for m in models)
    sampling = resident | {"gathered weights": gathered, "engine": plan.engine}
    return _largest(update, sampling)


def on_the_host(models: Sequence[Shapes], plan: Plan) -> float:
    """Return the bytes of host memory that each rank takes for `--offload`."""
    numbers = sum(m.trained for m in models)
    everything = sum(m.size for m in models) + 12 * numbers  # with gradients and moments
    return {"none": 0, "optimizer": 8 * numbers, "all": everything}[plan.offload] / plan.ranks


# ---- whether it fits ----


def describe(models: Sequence[Shapes], plan: Plan, capacity: float) -> str:
    """Return the predicted memory in GiB, in one line, the largest use first."""
    uses = sorted(predict(models, plan).items(), key=lambda use: -use[1])
    listed = [f"{use} {size / GIB:.1f}" for use, size in uses if size >= 0.05 * GIB]
    available = f" of {capacity / GIB:.1f}" if capacity else ""
    line = f"{sum(size for _, size in uses) / GIB:.1f} GiB{available} ({', '.join(listed)}"
    if plan.offload != "none":
        line += f"; on the host {on_the_host(models, plan) / GIB:.1f}"
    return line + ")"


def fits(models: Sequence[Shapes], plan: Plan, capacity: float) -> bool:
    return sum(predict(models, plan).values()) <= USABLE * capacity


def refusal(models: Sequence[Shapes], plan: Plan, capacity: float) -> str | None:
    """Return the reason why a run cannot fit in the `USABLE` part of a GPU; None if it may fit."""
    if not fits(models, plan, capacity):
        needs = describe(models, plan, capacity)
        return f"needs {needs} on each GPU, of which {USABLE:.0%} are usable"
    copy = _policy_bytes(models) / plan.engine_ranks
    if plan.engine and copy > plan.engine:
        sizes = f"{copy / GIB:.1f} GiB of weights do not fit in the engine's"
        return f"{sizes} {plan.engine / GIB:.1f} GiB per GPU; raise --tensor_parallel_size"
    return None


def make_plan(models: Sequence[Shapes], args: TrainArgs, ranks: int, capacity: float) -> Plan:
    """Return the plan for models that are sharded over `ranks` GPUs of this `capacity`; 0: a CPU.
    Without `--activation_checkpointing`, activations that do not fit are recomputed."""
    recompute = bool(args.activation_checkpointing)
    plan = Plan(ranks, args.pack_tokens, recompute, args.offload)
    if isinstance(args, OnlineArgs) and not args.rollout_ranks:
        is_vllm = uses_vllm(args)
        engine = capacity * (args.gpu_memory_utilization or BESIDE_TRAINER)
        plan = replace(
            plan,
            engine=engine if is_vllm else _policy_bytes(models),  # a second copy, which stays
            engine_ranks=args.tensor_parallel_size,
            engine_stays=not is_vllm,
        )
    if args.activation_checkpointing is None and capacity:
        is_unpredicted = any(m.capped for m in models)
        plan = replace(plan, recompute=is_unpredicted or not fits(models, plan, capacity))
    return plan


def uses_vllm(args: TrainArgs) -> bool:
    """Return whether vLLM samples in this launch, or in one that is planned."""
    is_there = args.dry_run or importlib.util.find_spec("vllm") is not None
    return args.engine != "transformers" and bool(is_there)


def _policy_bytes(models: Sequence[Shapes]) -> int:
    """Return the bytes of an engine's copy of the policy."""
    return max((m.bytes * m.weights for m in models if m.head and m.trained), default=0)


# ---- models of this process ----

_loaded: weakref.WeakKeyDictionary[nn.Module, Shapes] = weakref.WeakKeyDictionary()


def loaded_shapes() -> list[Shapes]:
    """Return the shapes of the models of this process."""
    gc.collect()  # a dropped model may be part of a reference cycle
    return list(_loaded.values())


def plan_of(model: nn.Module, args: TrainArgs) -> Plan:
    """Return the plan for the loaded models, of which `model` is one, and the flags."""
    parameter = next(model.parameters())
    sharded = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    ranks = parameter.device_mesh.size(sharded[0])
    return make_plan(loaded_shapes(), args, ranks, capacity_of(model.device))


def require_memory(model: nn.Module, label: str, args: TrainArgs) -> None:
    """Raise `ValueError` if a model does not fit on a GPU beside the loaded ones. Call it before
    the weights are read."""
    _loaded[model] = shapes_of(model, model.compute_dtype)  # includes adapters of a value model
    problem = refusal(loaded_shapes(), plan_of(model, args), capacity_of(model.device))
    if problem:
        raise ValueError(f"{label}: {problem}; --dry_run shows what would fit")


def keep_activations_that_fit(trained: Sequence[nn.Module], args: TrainArgs) -> str:
    """Turn activation checkpointing off if a run whose models are all loaded fits without it,
    unless the flag is given. Return a line about memory."""
    plan = plan_of(trained[0], args)
    if not plan.recompute:
        for model in trained:
            model.hf.gradient_checkpointing_disable()
    kept = "recomputed" if plan.recompute else "kept"
    memory = describe(loaded_shapes(), plan, capacity_of(trained[0].device))
    return f"memory per GPU, activations {kept}: {memory}"
