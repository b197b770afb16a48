"""Whether a run fits on its GPUs: the memory that memory.py predicts beside the memory that they
have."""

import gc
import importlib.util
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from common.config.groups import TrainArgs
from common.config.sampling import BESIDE_TRAINER
from common.model.flops import capacity_of
from common.model.memory import Plan, Shapes, on_the_host, predict, shapes_of
from common.parallel import distributed

GIB = 2**30
# of a GPU's memory: NCCL's buffers, CUDA graphs and the allocator's pools are not predicted
USABLE = 0.92


def describe(models: Sequence[Shapes], plan: Plan, capacity: float) -> str:
    """Return the predicted memory in GiB, in one line."""
    uses = predict(models, plan)
    listed = [f"{use} {size / GIB:.1f}" for use, size in uses.items() if size >= 0.05 * GIB]
    available = f" of {capacity / GIB:.1f}" if capacity else ""
    line = f"{sum(uses.values()) / GIB:.1f} GiB{available} ({', '.join(listed)}"
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
    policies = [m.weights for m in models if m.head and m.trained]
    copy = plan.bytes * max(policies, default=0) / plan.engine_ranks
    if plan.engine and copy > plan.engine:
        sizes = f"{copy / GIB:.1f} GiB of weights do not fit in the engine's"
        return f"{sizes} {plan.engine / GIB:.1f} GiB per GPU"
    return None


def make_plan(
    models: Sequence[Shapes], args: TrainArgs, ranks: int, device: torch.device, dtype: torch.dtype,
    capacity: float,
) -> Plan:  # fmt: skip
    """Return the plan for models with the compute `dtype` that are sharded over `ranks` devices of
    this type. Without `--activation_checkpointing`, CUDA recomputes activations that do not fit."""
    on_cuda = device.type == "cuda"
    plan = Plan(
        ranks=ranks,
        pack_tokens=args.pack_tokens,
        context_ranks=args.context_ranks,
        recompute=bool(args.activation_checkpointing),
        offload=args.offload,
        bytes=dtype.itemsize,
        frozen=4 if args.reference_sync else dtype.itemsize,
        distils=args.teacher_logprobs is not None,
        on_cuda=on_cuda,
    )
    if args.teacher_logprobs == "live":
        heads = [m.head for m in models if not m.trained]
        plan = replace(plan, teacher_head=max(heads, default=0))
    if args.samples and not args.rollout_ranks:
        plan = _with_engine(plan, models, args, capacity)
    if args.activation_checkpointing is None and on_cuda:
        is_unpredicted = any(m.capped for m in models)
        plan = replace(plan, recompute=is_unpredicted or not fits(models, plan, capacity))
    return plan


def uses_vllm(args: TrainArgs) -> bool:
    """Return whether vLLM samples in this launch, or in a planned one."""
    is_there = args.planned or importlib.util.find_spec("vllm") is not None
    return args.engine != "transformers" and bool(is_there)


def _with_engine(plan: Plan, models: Sequence[Shapes], args, capacity: float) -> Plan:
    """Return the plan with an engine on the training ranks."""
    if not uses_vllm(args):  # a second copy of the policy
        policies = [m.weights for m in models if m.head and m.trained]
        engine = plan.bytes * max(policies, default=0)
        return replace(
            plan, engine=engine, engine_ranks=args.tensor_parallel_size, engine_stays=True
        )
    engine = capacity * (args.gpu_memory_utilization or BESIDE_TRAINER)
    return replace(plan, engine=engine, engine_ranks=args.tensor_parallel_size)


# ---- models of this process ----

_loaded: weakref.WeakKeyDictionary[nn.Module, Shapes] = weakref.WeakKeyDictionary()


def loaded_shapes() -> list[Shapes]:
    """Return the shapes of the models of this process."""
    gc.collect()  # a dropped model may be part of a reference cycle
    return list(_loaded.values())


def plan_of(model: nn.Module, args: TrainArgs) -> Plan:
    """Return the plan for the loaded models, of which `model` is one, and the flags."""
    parameter = next(model.parameters())
    mesh = parameter.device_mesh
    sharded = [i for i, placement in enumerate(parameter.placements) if placement.is_shard()]
    ranks = mesh.size(sharded[0])
    capacity = capacity_of(model.device)
    return make_plan(loaded_shapes(), args, ranks, model.device, model.compute_dtype, capacity)


def require_memory(model: nn.Module, label: str, args: TrainArgs) -> None:
    """Raise `ValueError` if a model does not fit on a GPU beside the loaded ones. Call it before
    the weights are read."""
    _loaded[model] = shapes_of(model.hf, model.tower)  # includes adapters of a value model
    capacity = capacity_of(model.device)
    problem = refusal(loaded_shapes(), plan_of(model, args), capacity)
    if problem:
        gpus = f"{distributed.world_size() + args.rollout_ranks}x{capacity / 1e9:.0f}GB"
        raise ValueError(f"{label}: {problem}; --dry_run {gpus} lists flags with which it fits")


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
