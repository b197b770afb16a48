"""Construction of the engine that samples from the policy, and the weights that it loads.

An engine is vLLM (one per rank or per tensor-parallel group) or, where vLLM is not installed, transformers. A training
rank samples in this order; a rollout rank never sleeps:

    engine.wake(); engine.load_weights(whole_weights(policy, engine.dtype), version); engine.step() ...; engine.sleep()
"""

import importlib.util
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.config.groups import SamplingArgs
from common.model.lora import LoRALinear
from common.rollout.engine import Engine


def make_engine(
    path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool = True
) -> Engine:
    """Return the engine of `--engine` with the checkpoint in folder `path`. Call after `load_policy`. It sleeps until
    `wake` and `load_weights`; if no model is `trained`, it is awake with the weights of the checkpoint.

    Raises `ValueError` for `--engine vllm` without vLLM, or a model or tensor-parallel size that vLLM refuses.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if args.engine == "vllm" and not installed:
        raise ValueError("--engine vllm: vllm is not installed; use --engine transformers, which is slower")
    if args.engine == "transformers" or not installed:
        if args.tensor_parallel_size > 1:
            raise ValueError("--tensor_parallel_size needs --engine vllm")
        if args.engine == "auto" and dist.get_rank() == 0:
            print("vllm is not installed: sampling with transformers, which is slower")
        from common.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(path, args, eos_ids, tokenizer, device, trained)
    from common.rollout.vllm_engine import VLLMEngine

    return VLLMEngine(path, args, eos_ids, tokenizer, device, trained)


def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of the policy, whole, by name, in the same order on every rank. Collective.

    FSDP gathers one transformer block at a time in the compute dtype, so at most two blocks are whole at once. The
    weights are copies, because vLLM keeps references to them until a layer is complete. `remove_duplicate=False` also
    yields a tied head: without it the engine would silently keep its old head.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    prefixes = {module: f"{name}." for name, module in model.hf.named_modules() if isinstance(module, FSDPModule)}
    units = [model, *prefixes]
    for unit in units:
        unit.reshard()  # after a forward without a backward it may still hold older whole weights
    for unit, following in pairwise([*units, None]):
        unit.unshard()  # waits for the gather that the previous turn has begun
        if following is not None:
            following.unshard(async_op=True)  # overlaps with the engine's loading of this unit
        for name, weight in unit.named_parameters(remove_duplicate=False):
            if isinstance(weight, DTensor) or ".lora_" in name:  # sharded: of another unit; LoRA: merged below
                continue
            layer = unit.get_submodule(name.rpartition(".")[0])
            if isinstance(layer, LoRALinear) and weight is layer.weight:
                weight = layer.merged()
            yield prefixes.get(unit, "") + name.removeprefix("hf."), weight.detach().to(dtype, copy=True)
        unit.reshard()
