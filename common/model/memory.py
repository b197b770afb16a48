"""Prediction of a run's GPU memory from the shapes of its models.

docs/memory.md explains the arithmetic; `bench/memory_plan.py` compares it with the allocations of a
training step on fake tensors, and writes the tables. capacity.py compares it with the GPU of a run.
Shapes: T packed tokens, D hidden size, V vocabulary. Bytes, on each of R ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from common.model.flops import attention_shape, kept_numbers, num_delta_nets
from common.model.head import chunk_size

Bytes = dict[str, float]  # bytes by use


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
    # whether scores of attention have a softcap, which needs all of them at once, uncounted
    capped: bool = False
    delta_nets: int = 0  # layers that are gated delta nets, not attention
    delta_numbers: int = 0  # float32 numbers that one of them keeps per token
    tower_numbers: int = 0  # numbers that a vision tower keeps per placeholder of an image


@dataclass(frozen=True)
class Plan:
    """Settings of a run that its memory depends on."""

    ranks: int  # ranks that a model is sharded over
    pack_tokens: int
    recompute: bool
    offload: str = "none"
    bytes: int = 2  # size of a number in the compute dtype
    frozen: int = 2  # size of a frozen weight
    engine: float = 0.0  # bytes of an engine beside the trainer while it samples
    engine_ranks: int = 1  # ranks that share the engine
    engine_stays: bool = False  # whether the engine keeps its memory while the trainer works
    context_ranks: int = 1
    distils: bool = False  # whether every token is compared with a teacher's distribution
    teacher_head: int = 0  # weights of a live teacher's head
    on_cuda: bool = True


def shapes_of(hf: nn.Module, tower=None) -> Shapes:
    """Return the shapes of a Hugging Face model and its vision tower, on meta or sharded."""
    if tower is not None:
        shapes = shapes_of(hf)
        trained = tower.weights if tower.is_trained else 0
        return replace(
            shapes,
            weights=shapes.weights + tower.weights,
            trained=shapes.trained + trained,
            root=shapes.root + tower.weights,
            root_trained=shapes.root_trained + trained,
            tower_numbers=tower.kept_numbers(),
        )
    config = hf.config.get_text_config()
    blocks = hf.base_model.layers
    weights = _count(hf)
    trained = _count(hf, trained=True)
    in_blocks = [_count(block) for block in blocks]
    trained_in_blocks = [_count(block, trained=True) for block in blocks]
    head = hf.get_output_embeddings()
    heads, width = attention_shape(config)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    if experts:
        inner = experts * (getattr(config, "moe_intermediate_size", None) or inner)
    return Shapes(
        weights=weights,
        trained=trained,
        block=max(in_blocks),
        block_trained=max(trained_in_blocks),
        root=weights - sum(in_blocks),
        root_trained=trained - sum(trained_in_blocks),
        head=0 if head is None else head.weight.numel(),
        layers=len(blocks),
        hidden=config.hidden_size,
        queries=heads * width,
        keys=key_heads * width,
        key_heads=key_heads,
        normed=any("q_norm" in name for name, _ in blocks.named_parameters()),
        inner=inner,
        experts=experts,
        vocabulary=config.vocab_size,
        capped=getattr(config, "attn_logit_softcapping", None) is not None,
        delta_nets=num_delta_nets(config),
        delta_numbers=kept_numbers(config) if num_delta_nets(config) else 0,
    )


def _count(module: nn.Module, trained: bool = False) -> int:
    """Return the number of weights, or of those with a gradient."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad or not trained)


# ---- one micro-batch ----


def _norm(plan: Plan) -> int:
    """Return the bytes that a norm keeps per number: its input in float32, its output in the
    compute dtype."""
    return 4 + plan.bytes


def kept_by_block(m: Shapes, plan: Plan) -> int:
    """Return the bytes that a block keeps for its backward, per token: the inputs of norms and
    matrix products, queries, keys, values and outputs of attention, and four activations of the
    MLP's width."""
    copies = max(1, 3 * m.experts)  # tokens are copied to experts and back
    # `context.exchange` copies key heads, so that each rank has as many.
    keys = m.keys * math.lcm(m.key_heads, plan.context_ranks) // m.key_heads
    in_compute_dtype = m.hidden * (1 + copies) + 2 * m.queries + 2 * keys + 4 * m.inner
    normed = 2 * m.hidden + (m.queries + m.keys) * m.normed
    return plan.bytes * in_compute_dtype + _norm(plan) * normed


def kept_by_delta_net(m: Shapes, plan: Plan) -> int:
    """Return the same for a block with a gated delta net in place of attention."""
    attention = plan.bytes * (2 * m.queries + 2 * m.keys)
    return kept_by_block(m, plan) - attention + 4 * m.delta_numbers


def training_peak(m: Shapes, plan: Plan) -> Bytes:
    """Return the memory of one micro-batch beside weights, gradients and Adam's moments, at the
    largest of three times: the backward of the head, of a block, and of the root, which FSDP holds
    until the end."""
    in_attention = kept_by_block(m, plan) * plan.pack_tokens
    in_delta_net = kept_by_delta_net(m, plan) * plan.pack_tokens
    in_block = max(in_attention, in_delta_net) if m.delta_nets else in_attention
    between_blocks = plan.bytes * m.hidden * plan.pack_tokens
    saved = (m.layers - m.delta_nets) * in_attention + m.delta_nets * in_delta_net
    if plan.recompute:
        saved = m.layers * between_blocks
    saved += (_norm(plan) + plan.bytes) * m.hidden * plan.pack_tokens  # the last norm and the head
    saved += plan.bytes * m.tower_numbers * plan.pack_tokens  # a pack full of placeholders
    head_trained = m.head if m.root_trained else 0
    at_head = {
        "gathered weights": plan.bytes * (m.root + m.block),
        "activations": saved,
        "logits and head": _logits(m, plan, head_trained) + plan.bytes * plan.teacher_head,
    }
    at_block = {
        "gathered weights": plan.bytes * (m.root + 2 * m.block),
        "activations": saved + (in_block if plan.recompute else 0),
        "gradients in reduction": plan.bytes * head_trained + (plan.bytes + 4) * m.block_trained,
    }
    # From the compute dtype to float32, and from there to shards.
    reduced = max(plan.bytes + 4, 4 + 4 / plan.ranks) * m.root_trained
    at_root = {"gradients in reduction": reduced + 4 * m.block_trained}
    return largest(at_head, at_block, at_root)


def _logits(m: Shapes, plan: Plan, head_trained: int) -> float:
    """Return the bytes of logits and of the head's gradient: in the forward two chunks of logits,
    in the backward the gradient and as many numbers per logit as the loss needs."""
    if not m.head:
        return 0
    numbers = m.vocabulary * (2 if plan.distils else 1)
    chunk = min(plan.pack_tokens, chunk_size(numbers, plan.on_cuda))
    logits = 4 * chunk * m.vocabulary
    if plan.distils:
        copies = 7
    else:
        copies = 2 if chunk < plan.pack_tokens else 1.5
    return max(2 * logits, 4 * head_trained + copies * logits)


# ---- a step ----


def largest(*times: Bytes) -> Bytes:
    """Return the memory at the time with the most bytes."""
    return max(times, key=lambda uses: sum(uses.values()))


def predict(models: Sequence[Shapes], plan: Plan) -> Bytes:
    """Return the bytes on each GPU at the peak of a step, by use: the larger peak of the update
    and, with a colocated engine, of sampling. Trained models are updated one after the other, so
    that only one has activations."""
    trained = sum(m.trained for m in models)
    weights = sum(4 * m.trained + plan.frozen * (m.weights - m.trained) for m in models)
    on_host = plan.offload == "all"
    resident = {
        "weights": 0 if on_host else weights / plan.ranks,
        # Offloaded moments of one parameter in its update take less than its backward.
        "Adam": 8 * trained / plan.ranks if plan.offload == "none" else 0,
    }
    update = resident | {"gradients": 0 if on_host else 4 * trained / plan.ranks}
    update |= largest({}, *(training_peak(m, plan) for m in models if m.trained))
    if plan.engine_stays:
        update["engine"] = plan.engine
    if not plan.engine:
        return update
    gathered = plan.bytes * max(m.root + 2 * m.block for m in models)
    sampling = resident | {"gathered weights": gathered, "engine": plan.engine}
    return largest(update, sampling)


def on_the_host(models: Sequence[Shapes], plan: Plan) -> float:
    """Return the bytes of host memory that each rank takes for `--offload`."""
    trained = sum(m.trained for m in models)
    frozen = sum(m.weights for m in models) - trained
    moments = 8 * trained
    everything = moments + 8 * trained + plan.frozen * frozen  # with weights and gradients
    return {"none": 0, "optimizer": moments, "all": everything}[plan.offload] / plan.ranks
