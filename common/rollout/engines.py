"""The choice of an engine."""

import importlib.util

import torch

from common.config.online import SamplingArgs
from common.model.flops import num_delta_nets
from common.model.loading import load_config
from common.parallel import distributed
from common.rollout.engine import Engine
from common.rollout.transformers_engine import TransformersEngine
from common.rollout.vllm_engine import VLLMEngine


def make_engine(
    path: str, args: SamplingArgs, tokenizer, device: torch.device, trained: bool = True
) -> Engine:
    """Return the engine of `--engine` with the checkpoint in folder `path`. Call after
    `load_policy`. It sleeps until `load_weights`; if no model is `trained`, it is awake with the
    weights of the checkpoint.

    Raises `ValueError` for `--engine vllm` without vLLM, or a model or flag that vLLM refuses."""
    is_installed = importlib.util.find_spec("vllm") is not None
    if args.engine == "vllm" and not is_installed:
        raise ValueError(
            "--engine vllm: vllm is not installed; use --engine transformers, which is slower"
        )
    has_delta_nets = num_delta_nets(load_config(path).get_text_config()) > 0
    if args.engine == "auto" and is_installed and device.type == "cpu" and has_delta_nets:
        _say("sampling with transformers: on a CPU vLLM computes gated delta nets in bfloat16 only")
    elif is_installed and args.engine != "transformers":
        return VLLMEngine(path, args, tokenizer, device, trained)
    if args.tensor_parallel_size > 1:
        raise ValueError("--tensor_parallel_size needs --engine vllm")
    if args.engine_args:
        raise ValueError(f"--engine_args {' '.join(args.engine_args)} needs --engine vllm")
    if args.engine == "auto" and not is_installed:
        _say("vllm is not installed: sampling with transformers, which is slower")
    return TransformersEngine(path, args, tokenizer, device, trained)


def _say(text: str) -> None:
    """Print on the first rank that samples, which `--rollout_ranks` makes another one."""
    if distributed.rank() == 0:
        print(text, flush=True)
