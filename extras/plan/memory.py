"""Memory of a run that is not there yet, by arithmetic alone (docs/memory.md). Bytes, on each of R
ranks."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from common.config.groups import TrainArgs
from common.config.online import OnlineArgs
from common.model.memory import (
    USABLE,
    Bytes,
    head_weights,
    is_capped,
    num_weights,
    total,
    training_peak,
)


@dataclass(frozen=True)
class Plan:
    """Settings of a run that its memory depends on."""

    ranks: int  # ranks that a model is sharded over
    pack_tokens: int
    recompute: bool
    offload: str = "none"
    engine: float = 0.0  # bytes of a transformers engine, which stays while the trainer works


def make_plan(models: Sequence[nn.Module], args: TrainArgs, ranks: int, capacity: float) -> Plan:
    """Return the plan for models that are sharded over `ranks` GPUs of this `capacity`; 0: a CPU.
    Without `--activation_checkpointing`, activations that do not fit are recomputed."""
    engine = 0.0
    if isinstance(args, OnlineArgs) and not args.rollout_ranks and not uses_vllm(args):
        policies = [m for m in models if head_weights(m) and num_weights(m, trained=True)]
        engine = max((m.compute_dtype.itemsize * num_weights(m) for m in policies), default=0)
    plan = Plan(ranks, args.pack_tokens, bool(args.activation_checkpointing), args.offload, engine)
    if args.activation_checkpointing is None and capacity:
        too_large = total(predict(models, plan)) > USABLE * capacity
        plan = replace(plan, recompute=any(map(is_capped, models)) or too_large)
    return plan


def uses_vllm(args: TrainArgs) -> bool:
    """Return whether vLLM samples in this launch, or in one that is planned."""
    is_there = args.dry_run or importlib.util.find_spec("vllm") is not None
    return args.engine != "transformers" and bool(is_there)


def predict(models: Sequence[nn.Module], plan: Plan) -> Bytes:
    """Return the bytes on each GPU at the peak of an update, by use. Trained models are updated one
    after the other, so that only one has activations."""
    trained = [model for model in models if num_weights(model, trained=True)]
    frozen = [model for model in models if model not in trained]
    on_gpu = 0 if plan.offload == "all" else 1 / plan.ranks
    numbers = sum(num_weights(model, trained=True) for model in trained)
    settings = plan.ranks, plan.pack_tokens, plan.recompute
    peaks = [training_peak(model, *settings) for model in trained]
    return {
        "weights": sum(map(size_of, trained)) * on_gpu,
        "frozen models": sum(map(size_of, frozen)) * on_gpu,
        # Offloaded moments of one parameter in its update take less than its backward.
        "Adam": 8 * numbers / plan.ranks if plan.offload == "none" else 0,
        "gradients": 4 * numbers * on_gpu,
        "engine": plan.engine,
    } | max(peaks, key=total, default={})


def size_of(model: nn.Module) -> int:
    """Return the bytes of all weights: float32 masters, or frozen ones in the compute dtype."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
