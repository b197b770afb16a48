"""The engine that samples completions from the policy being trained, and the weights it is given.

`make_engine` returns a vLLM engine (one per rank, or per tensor-parallel group), or where vLLM is not installed a
short one over transformers. Both have `submit`, `step`, `load_weights`, `sleep`, `wake` and `close`. `colocated.py`
drives it on the ranks that train:

    engine.wake(); engine.load_weights(whole_weights(model, engine.dtype)); engine.step() ...; engine.sleep()

and `remote.py` on ranks that only generate, where it never sleeps.

Completions do not depend on the number of ranks: every completion has a seed of its own.
"""

import importlib.util
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common.config.groups import SamplingArgs
from common.model.lora import LoRALinear
from common.rollout.engine import Engine


def make_engine(
    path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool = True
) -> Engine:
    """The engine `--engine` asks for, loaded with the checkpoint in folder `path`. Call after `load_policy`. It sleeps
    until it is given weights or, if no model is `trained`, is awake with those of the checkpoint.

    Raises `ValueError` for `--engine vllm` without vLLM or a tensor-parallel size that vLLM refuses.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if args.engine == "vllm" and not installed:
        raise ValueError("--engine vllm: vllm is not installed; --engine transformers is the slower fallback")
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
    """Every weight of the policy, whole, in one order on every rank (gathering is collective).

    FSDP's own all-gather, one transformer block at a time and in the compute dtype: no more than two blocks are ever
    whole. Copies, because vLLM holds on to them until a layer is complete. `remove_duplicate=False` names a tied
    head too: without it the engine would keep its old head and never say so.
    """
    prefixes = {module: f"{name}." for name, module in model.hf.named_modules() if isinstance(module, FSDPModule)}
    units = [model, *prefixes]
    for unit in units:
        unit.reshard()  # it may still be whole, with older values, after a forward without backward
    for unit, following in pairwise([*units, None]):
        unit.unshard()  # waits for what the last turn has begun
        if following is not None:
            following.unshard(async_op=True)  # on its way while the engine takes this one
        for name, weight in unit.named_parameters(remove_duplicate=False):
            if isinstance(weight, DTensor) or ".lora_" in name:  # of another unit, still sharded; in the weight
                continue
            layer = unit.get_submodule(name.rpartition(".")[0])
            if isinstance(layer, LoRALinear) and weight is layer.weight:
                weight = layer.merged()
            yield prefixes.get(unit, "") + name.removeprefix("hf."), weight.detach().to(dtype, copy=True)
        unit.reshard()
