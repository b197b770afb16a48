"""Weights from the trainer to an engine: gather the policy's shards, load them, and compare."""

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from common.parallel import distributed
from common.rollout.engine import Engine

print_once = cache(print)


def gathered_bytes(hf: nn.Module, dtype: torch.dtype) -> int:
    """Return how many bytes `whole_weights` gathers at most: two blocks, and what is outside."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in hf.get_decoder().layers]
    outside = sum(p.numel() for p in hf.parameters()) - sum(blocks)
    return dtype.itemsize * (outside + 2 * max(blocks))


def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole tensor of every weight of the policy, in the same order on every
    rank. LoRA is merged into its layer. Collective.

    FSDP gathers one transformer block at a time in the compute dtype, and the next one meanwhile,
    so at most two blocks are whole at once. The weights are copies, because vLLM keeps references
    to them until a layer is complete. `remove_duplicate=False` also yields a tied head: without it
    the engine would silently keep its old head."""
    from torch.distributed.tensor import DTensor

    blocks = set(model.hf.get_decoder().layers)
    prefixes = {block: f"{name}." for name, block in model.hf.named_modules() if block in blocks}
    units = [model, *prefixes]
    for unit in units:
        unit.reshard()  # after a forward without a backward it may still hold older whole weights
    for unit, next_unit in pairwise([*units, None]):
        unit.unshard()  # waits for the gather that the previous pass of this loop has begun
        if next_unit is not None:
            next_unit.unshard(async_op=True)  # overlaps with the engine's loading of this unit
        for name, weight in unit.named_parameters(remove_duplicate=False):
            # A weight that is still sharded belongs to another unit, or to a tower that is not
            # trained. LoRA matrices are merged below.
            if isinstance(weight, DTensor) or ".lora_" in name:
                continue
            layer = unit.get_submodule(name.rpartition(".")[0])
            if hasattr(layer, "lora_A") and weight is layer.weight:
                weight = layer.merged(model.compute_dtype)
            whole_name = prefixes.get(unit, "") + name.removeprefix("hf.")
            yield whole_name, weight.detach().to(dtype, copy=True)
        unit.reshard()
    computed = {name for name, _ in model.hf.named_non_persistent_buffers()}
    for name, buffer in model.hf.named_buffers():  # stored ones: Gemma 4 has a factor per layer
        if name not in computed:
            yield name, buffer.clone()


def sync_weights(engine: Engine, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
    """Load the policy's weights into an engine, then read back a few columns of each weight that
    the engine holds in the policy's layout, and compare. Log-probs would not show that the engine
    still has old weights: in bfloat16 a step changes them less than rounding does. Raises
    `RunError` if any columns differ."""
    held = {_key(name): (part, read) for name, part, read in engine.held_weights()}
    new_weights: dict[str, Tensor] = {}

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if (key := _key(name)) in held:
                part, _ = held[key]
                new_weights[key] = weight[part].clone()
            yield name, weight

    to_engine = noted()
    engine.load_weights(to_engine, version)
    for _ in to_engine:  # gathers are collective: gather also what the engine did not ask for
        pass
    is_old = {}
    for key, new in new_weights.items():
        _, read = held[key]
        present = read()
        if present.shape == new.shape and present.dtype == new.dtype:  # else: its own layout
            is_old[key] = not torch.equal(present, new)
    flag = f"--engine {engine.args.engine}"
    if not any(key.startswith("layers.") for key in is_old) and distributed.rank() == 0:
        print_once(f"{flag}: its layout of the blocks hides whether their weights are the newest")
    if old := [key for key in is_old if is_old[key]]:
        problem = f"{len(old)} of {len(is_old)} weights are not those of step {version}"
        advice = "take the other engine, and report this"
        raise distributed.RunError(f"{flag}: {problem}, for example {old[0]}; {advice}")


def _key(name: str) -> str:
    """Return a weight's name from `layers.` on or, outside of blocks, its last two parts: engines
    have different prefixes before these."""
    return re.search(r"\blayers\.\d.*|[^.]*\.?[^.]+$", name)[0]
