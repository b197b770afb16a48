"""`make_engine`: vLLM or transformers, as `--engine` says."""

import importlib.util

import torch

from common.config.online import SamplingArgs
from common.model.flops import num_delta_nets
from common.model.loading import load_config
from common.parallel import distributed
from common.rollout.engine import NO_OPTIONS, Engine, EngineOptions
from common.rollout.vllm_engine import VLLMEngine


def make_engine(
    path: str, args: SamplingArgs, tokenizer, device: torch.device, trained: bool = True,
    options: EngineOptions = NO_OPTIONS,
) -> Engine:  # fmt: skip
    """Return the engine that `--engine` names, for the checkpoint in folder `path`. If the model is
    `trained`, the engine sleeps until `load_weights` gives it the policy's weights; else it is
    awake and has those of the checkpoint. Call after `load_policy`: vLLM takes the memory left.

    Raises `ValueError` if vLLM is asked for and not installed, or refuses the model or a flag."""
    is_installed = importlib.util.find_spec("vllm") is not None
    if args.engine == "vllm" and not is_installed:
        raise ValueError(
            "--engine vllm: vllm is not installed; use --engine transformers, which is slower"
        )
    reason = None  # why --engine auto takes transformers
    if not is_installed:
        reason = "vllm is not installed: sampling with transformers, which is slower"
    elif device.type == "cpu" and num_delta_nets(load_config(path).get_text_config()):
        reason = "sampling with transformers: on a CPU vLLM computes gated delta nets in bfloat16"
    if args.engine == "vllm" or (args.engine == "auto" and reason is None):
        return VLLMEngine(path, args, tokenizer, device, trained, options)
    if args.tensor_parallel_size > 1 or args.engine_args:
        raise ValueError("--tensor_parallel_size and --engine_args need --engine vllm")
    if args.engine == "auto" and distributed.rank() == 0:  # `say` is silent on rollout ranks
        print(reason, flush=True)
    from common.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(path, args, tokenizer, device, trained, options)
