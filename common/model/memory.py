"""Prediction of a run's GPU memory from the shapes of its models, to print at start and to reject runs that do not fit.

docs/memory.md explains the arithmetic; `bench/memory_plan.py` compares it with the allocations of a training step on
fake tensors, and writes the tables. Shapes: T packed tokens, D hidden size, V vocabulary. Bytes, on each of R ranks.
"""

import gc
import importlib.util
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from common.config.groups import BaseArgs, OnlineArgs, SamplingArgs, TrainArgs
from common.model.flops import attention_shape
from common.model.head import chunk_size

GIB = 2**30
USABLE = 0.92  # of a GPU's memory: NCCL's buffers, CUDA graphs and the allocator's pools are not predicted


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model that its memory depends on. Weights are those of all ranks together."""

    weights: int
    trained: int  # weights with a gradient
    block: int  # weights of the largest transformer block
    block_trained: int
    root: int  # weights outside of blocks: embedding, last norm, head
    root_trained: int
    head: int  # weights of a head over the vocabulary; 0: a scalar head
    layers: int
    hidden: int
    queries: int  # width of all heads' queries
    keys: int  # width of all heads' keys
    key_heads: int
    normed: bool  # whether queries and keys have norms
    inner: int  # width of the MLP, or of all experts of a token together
    experts: int  # experts of a token; 0: the model has none
    vocabulary: int
    capped: bool = False  # whether scores of attention have a softcap, which needs all of them at once, uncounted


@dataclass(frozen=True)
class Plan:
    """Settings of a run that its memory depends on."""

    ranks: int  # ranks that a model is sharded over
    pack_tokens: int
    recompute: bool
    offload: str = "none"
    bytes: int = 2  # size of a number in the compute dtype
    engine: float = 0.0  # bytes of an engine beside the trainer while it samples
    engine_ranks: int = 1  # ranks that share the engine
    engine_stays: bool = False  # whether the engine keeps its memory while the trainer works
    context_ranks: int = 1
    distils: bool = False  # whether every token is compared with a teacher's distribution
    teacher_head: int = 0  # weights of a live teacher's head
    on_cuda: bool = True


def shapes_of(hf: nn.Module) -> Shapes:
    """Return the shapes of a Hugging Face model, on meta or sharded."""
    config, blocks = hf.config.get_text_config(), hf.base_model.layers
    head = getattr(hf.get_output_embeddings(), "weight", None)
    in_blocks, trained_in_blocks = zip(*map(_count, blocks), strict=True)
    weights, trained = _count(hf)
    heads, width = attention_shape(config)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = getattr(config, "num_experts_per_tok", None) or 0
    inner = getattr(config, "moe_intermediate_size", None) if experts else None
    return Shapes(
        weights=weights,
        trained=trained,
        block=max(in_blocks),
        block_trained=max(trained_in_blocks),
        root=weights - sum(in_blocks),
        root_trained=trained - sum(trained_in_blocks),
        head=0 if head is None else head.numel(),
        layers=len(blocks),
        hidden=config.hidden_size,
        queries=heads * width,
        keys=key_heads * width,
        key_heads=key_heads,
        normed=any("q_norm" in name for name, _ in blocks[0].named_parameters()),
        inner=(inner or getattr(config, "intermediate_size", 4 * config.hidden_size)) * max(1, experts),
        experts=experts,
        vocabulary=config.vocab_size,
        capped=getattr(config, "attn_logit_softcapping", None) is not None,
    )


def _count(module: nn.Module) -> tuple[int, int]:
    """Return the number of weights, and of those with a gradient."""
    counts = [(p.numel(), p.numel() * p.requires_grad) for p in module.parameters()]
    return tuple(map(sum, zip(*counts, strict=True)))


def _norm(plan: Plan) -> int:
    """Return the bytes that a norm keeps per number: its input in float32, its output in the compute dtype."""
    return 4 + plan.bytes


def kept_by_block(m: Shapes, plan: Plan) -> int:
    """Return the bytes that a block keeps for its backward, per token: the inputs of norms and matrix products,
    queries, keys, values and outputs of attention, and four activations of the MLP's width."""
    c, width = plan.bytes, m.hidden * (1 + max(1, 3 * m.experts))  # tokens are copied to experts and back
    keys = m.keys * math.lcm(m.key_heads, plan.context_ranks) // m.key_heads  # `context.exchange` copies key heads
    attention = c * (2 * m.queries + 2 * keys) + (m.queries + m.keys) * _norm(plan) * m.normed
    return 2 * m.hidden * _norm(plan) + c * width + attention + 4 * c * m.inner


def training_peak(m: Shapes, plan: Plan) -> dict[str, float]:
    """Return the memory of one micro-batch beside weights, gradients and Adam's moments, at the largest of three
    times: the backward of the head, of a block, and of the root, which FSDP holds until the end."""
    c, tokens = plan.bytes, plan.pack_tokens
    chunk = min(tokens, chunk_size(m.vocabulary * (2 if plan.distils else 1), plan.on_cuda))
    kept, chunks = kept_by_block(m, plan) * tokens, 7 if plan.distils else 2 if chunk < tokens else 1.5
    saved = m.layers * (c * m.hidden * tokens if plan.recompute else kept) + (_norm(plan) + c) * m.hidden * tokens
    head_trained, logits = m.head if m.root_trained else 0, 4 * chunk * m.vocabulary * bool(m.head)
    at_head = {
        "gathered weights": c * (m.root + m.block),
        "activations": saved,
        "logits and head": max(2 * logits, 4 * head_trained + chunks * logits) + c * plan.teacher_head,
    }
    in_block = {
        "gathered weights": c * (m.root + 2 * m.block),
        "activations": saved + (kept if plan.recompute else 0),
        "gradients in reduction": c * head_trained + (c + 4) * m.block_trained,
    }
    reduced = max(c + 4, 4 + 4 / plan.ranks) * m.root_trained  # from the compute dtype to float32, from there to shards
    at_root = {"gradients in reduction": reduced + 4 * m.block_trained}
    return max((at_head, in_block, at_root), key=lambda parts: sum(parts.values()))


def predict(models: Sequence[Shapes], plan: Plan) -> dict[str, float]:
    """Return the bytes on each GPU at the peak of a step, by use: the larger peak of the update and, with a colocated
    engine, of sampling. Trained models are updated one after the other, so that only one has activations."""
    trained = sum(m.trained for m in models)
    resident = {
        "weights": sum(4 * m.trained + plan.bytes * (m.weights - m.trained) for m in models) / plan.ranks,
        "Adam": 8 * trained / plan.ranks,
    }
    if plan.offload == "optimizer":  # the moments of one parameter in its update take less than its backward
        resident["Adam"] = 0
    if plan.offload == "all":
        resident = dict.fromkeys(resident, 0)
    peaks = [training_peak(m, plan) for m in models if m.trained]
    largest = max(peaks, key=lambda parts: sum(parts.values()), default={})
    gradients = 0 if plan.offload == "all" else 4 * trained / plan.ranks
    update = resident | dict(gradients=gradients) | largest
    if plan.engine_stays:
        update |= dict(engine=plan.engine)
    gathered = plan.bytes * max(m.root + 2 * m.block for m in models)
    sampling = resident | {"gathered weights": gathered, "engine": plan.engine} if plan.engine else {}
    return max(update, sampling, key=lambda parts: sum(parts.values()))


def on_the_host(models: Sequence[Shapes], plan: Plan) -> float:
    """Return the bytes of host memory that each rank takes for `--offload`."""
    trained, weights = sum(m.trained for m in models), sum(m.weights for m in models)
    everything = 12 * trained + 4 * trained + plan.bytes * (weights - trained)
    return {"none": 0, "optimizer": 8 * trained, "all": everything}[plan.offload] / plan.ranks


def describe(models: Sequence[Shapes], plan: Plan, capacity: float) -> str:
    """Return the predicted memory in GiB, in one line."""
    parts = predict(models, plan)
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size >= 0.05 * GIB)
    host = f"; on the host {on_the_host(models, plan) / GIB:.1f}" if plan.offload != "none" else ""
    of = f" of {capacity / GIB:.1f}" if capacity else ""
    return f"{sum(parts.values()) / GIB:.1f} GiB{of} ({listed}{host})"


def fits(models: Sequence[Shapes], plan: Plan, capacity: float) -> bool:
    return sum(predict(models, plan).values()) <= USABLE * capacity


def remedies(models: Sequence[Shapes], plan: Plan, capacity: float) -> Iterator[str]:
    """Yield changes of flags, each of which alone is sufficient."""

    def helps(**changes) -> bool:
        return fits(models, replace(plan, **changes), capacity)

    if not plan.recompute and helps(recompute=True):
        yield "--activation_checkpointing true"
    if sizes := [2**n for n in range(15, 9, -1) if 2**n < plan.pack_tokens]:
        yield from [f"--pack_tokens {size}" for size in sizes if helps(pack_tokens=size)][:1]
    further = {"none": ["optimizer", "all"], "optimizer": ["all"], "all": []}[plan.offload]
    yield from [f"--offload {state}" for state in further if helps(offload=state)][:1]
    if all(m.trained in (0, m.weights) for m in models):  # adapters are about a hundredth of the weights
        sizes = [dict(trained=m.trained // 100, block_trained=m.block_trained // 100, root_trained=0) for m in models]
        if fits([replace(m, **size) for m, size in zip(models, sizes, strict=True)], plan, capacity):
            yield "--lora_rank 16"
    if plan.engine and helps(engine=0.0):
        yield "--rollout_ranks above 0 or a lower --gpu_memory_utilization"
    more = [plan.ranks * 2**n for n in range(1, 11)]
    yield from [f"{ranks} GPUs" for ranks in more if helps(ranks=ranks)][:1]


def refusal(models: Sequence[Shapes], plan: Plan, capacity: float) -> str | None:
    """Return the reason why a run cannot fit in the `USABLE` part of a GPU, with remedies; None if it may fit."""
    if not fits(models, plan, capacity):
        helps = " or ".join(remedies(models, plan, capacity)) or "no single flag"
        needs = f"{describe(models, plan, capacity)} on each GPU, of which {USABLE:.0%} are usable"
        return f"needs {needs}; {helps} would do"
    copies = [plan.bytes * m.weights / plan.engine_ranks for m in models if m.head and m.trained]
    if plan.engine and max(copies, default=0) > plan.engine:
        size = f"{max(copies) / GIB:.1f} GiB of weights do not fit in the engine's {plan.engine / GIB:.1f} GiB per GPU"
        return f"{size}; raise --gpu_memory_utilization, --tensor_parallel_size or --rollout_ranks"
    return None


# ---- models of this process ----

_models: weakref.WeakKeyDictionary[nn.Module, Shapes] = weakref.WeakKeyDictionary()  # loaded models


def may_recompute(args: TrainArgs, device: torch.device) -> bool:
    """Return whether blocks are recomputed in the backward, until `settle` decides."""
    return device.type == "cuda" if args.activation_checkpointing is None else args.activation_checkpointing


def plan_of(model: nn.Module, args: TrainArgs, capacity: float) -> Plan:
    """Return the plan for a sharded model and the flags."""
    parameter = next(model.parameters())
    mesh, placements = parameter.device_mesh, parameter.placements
    ranks = next(mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard())
    return make_plan(loaded(), args, ranks, model.device, model.compute_dtype, capacity)


def make_plan(
    models: Sequence[Shapes], args: TrainArgs, ranks: int, device: torch.device, dtype: torch.dtype, capacity: float
) -> Plan:
    """Return the plan for models with the compute `dtype` that are sharded over `ranks` devices of this type."""
    engine, stays, engine_ranks = 0.0, False, 1
    if isinstance(args, SamplingArgs) and not (isinstance(args, OnlineArgs) and args.rollout_ranks):
        stays = args.engine == "transformers" or (not args.planned and importlib.util.find_spec("vllm") is None)
        engine, engine_ranks = capacity * (args.gpu_memory_utilization or 0.4), args.tensor_parallel_size
        if stays:  # a second copy of the policy, which `model` need not be
            engine = dtype.itemsize * max((m.weights for m in models if m.head and m.trained), default=0)
    live = getattr(args, "teacher_logprobs", "stored") == "live"
    plan = Plan(
        ranks=ranks,
        pack_tokens=args.pack_tokens,
        context_ranks=args.context_ranks,
        recompute=may_recompute(args, device),
        offload=args.offload,
        bytes=dtype.itemsize,
        engine=engine,
        engine_ranks=engine_ranks,
        engine_stays=stays,
        distils=hasattr(args, "teacher_logprobs"),
        teacher_head=max((m.head for m in models if live and not m.trained), default=0),
        on_cuda=device.type == "cuda",
    )
    kept = replace(plan, recompute=False)
    undecided = args.activation_checkpointing is None and not any(m.capped for m in models)
    return kept if undecided and fits(models, kept, capacity) else plan


def capacity_of(device: torch.device) -> int | None:
    """Return the bytes of a GPU; None for a CPU, whose memory other programs share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def loaded() -> list[Shapes]:
    """Return the shapes of the models of this process."""
    gc.collect()  # a dropped model may be part of a reference cycle
    return list(_models.values())


def require_memory(model: nn.Module, label: str, args: BaseArgs) -> None:
    """Raise `ValueError` if a model does not fit on a GPU beside the loaded ones. Training scripts only; call it before
    the weights are read."""
    capacity = capacity_of(model.device)
    if capacity is None or not isinstance(args, TrainArgs):
        return
    _models[model] = shapes_of(model.hf)  # includes adapters of a value model
    if problem := refusal(loaded(), plan_of(model, args, capacity), capacity):
        raise ValueError(f"{label}: {problem}")


def settle(trained: Sequence[nn.Module], args: TrainArgs) -> str | None:
    """Turn activation checkpointing off where a run whose models are all loaded fits without it, unless the flag is
    given. Return the line about memory; None on a CPU."""
    capacity = capacity_of(trained[0].device)
    if capacity is None:
        return None
    plan = plan_of(trained[0], args, capacity)
    for model in trained if not plan.recompute else ():
        model.hf.gradient_checkpointing_disable()
    what = "recomputed" if plan.recompute else "kept"
    return f"memory per GPU, activations {what}: {describe(loaded(), plan, capacity)}"
