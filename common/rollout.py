"""The engine that samples completions from the policy being trained.

`make_engine` returns a vLLM engine (one per rank, or per tensor-parallel group), or where vLLM is not installed a
short one over transformers. Both have `generate`, `load_weights`, `sleep`, `wake` and `close`. `common/colocated.py`
drives it on the ranks that train:

    engine.wake(); engine.load_weights(whole_weights(model, engine.dtype)); engine.generate(...); engine.sleep()

and `common/asynchronous.py` on ranks that only generate, where it never sleeps.

Completions do not depend on the number of ranks: every completion has a seed of its own.
"""

import contextlib
import importlib.util
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common import distributed
from common.config import RolloutArgs, SamplingArgs
from common.hub import context_length
from common.models import compute_dtype
from common.packing import PackedBatch, Sample

SEED_SPACING = 1 << 16  # vLLM seeds the i-th completion of a request with seed + i


def make_engine(
    path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool = True
) -> "Engine":
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
        from common.rollout_transformers import TransformersEngine

        return TransformersEngine(path, args, eos_ids, tokenizer, device, trained)
    return VLLMEngine(path, args, eos_ids, tokenizer, device, trained)


def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the policy, whole, in one order on every rank (gathering is collective).

    FSDP's own all-gather, one transformer block at a time and in the compute dtype: no more than a block is ever
    whole. Copies, because vLLM holds on to them until a layer is complete. `remove_duplicate=False` names a tied
    head too: without it the engine would keep its old head and never say so.
    """
    prefixes = {module: f"{name}." for name, module in model.hf.named_modules() if isinstance(module, FSDPModule)}
    for unit in (model, *prefixes):
        unit.reshard()  # it may still be whole, with older values, after a forward without backward
        unit.unshard()
        for name, weight in unit.named_parameters(remove_duplicate=False):
            if not isinstance(weight, DTensor):  # of another unit, still sharded
                yield prefixes.get(unit, "") + name.removeprefix("hf."), weight.detach().to(dtype, copy=True)
        unit.reshard()


class Engine:
    """What both engines share: the settings, and the form of what they return."""

    def __init__(
        self, path: str, args: SamplingArgs, eos_ids: list[int], tokenizer, device: torch.device, trained: bool
    ):
        self.args, self.eos_ids, self.tokenizer, self.device = args, eos_ids, tokenizer, device
        self.dtype = compute_dtype(args, device)
        with _untouched_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM walks over deprecated names of torch
            self._start(path)
            if trained:
                self.sleep()
        distributed.install_signal_handlers()  # vLLM's imports may have replaced them

    def generate(
        self, prompts: list[list[int]], n: int, seeds: list[int], temperature: float, limits: list[int] | None = None
    ) -> list[list[Sample]]:
        """`n` completions for each prompt of this rank, in order; `seeds` has one seed per prompt, `limits` the most
        tokens of its completions (default: `--max_new_tokens`).

        Sampled from softmax(logits / temperature), nothing cut off (temperature 0: greedy). `rollout_logprobs` are
        those of that distribution; an EOS ends a completion and belongs to it. Collective with tensor parallelism.
        """
        with _untouched_rng():
            groups = self._generate(prompts, n, seeds, temperature, limits or [self.args.max_new_tokens] * len(prompts))
        return [
            [self._sample(prompt, ids, logprobs, finish_reason) for ids, logprobs, finish_reason in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _sample(self, prompt: list[int], ids: list[int], logprobs: list[float], finish_reason: str) -> Sample:
        return Sample(
            ids=prompt + ids,
            loss_mask=[False] * len(prompt) + [True] * len(ids),
            rollout_logprobs=[0.0] * len(prompt) + logprobs,
            prompt_length=len(prompt),
            finish_reason=finish_reason,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
        )

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, all of them by name. Always before sampling; nothing guesses."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give memory to the trainer, where the engine can."""

    def wake(self) -> None:
        """Take it back. `load_weights` must follow before `generate`."""

    def close(self) -> None:
        """Shut down, on every rank, before `distributed.cleanup`."""


class VLLMEngine(Engine):
    """vLLM with `external_launcher`: its workers are the torchrun ranks themselves."""

    def _start(self, path: str) -> None:
        # Read once at import: before anything of vllm is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        on_cpu = self.device.type == "cpu"
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the ranks share the cores
        kept = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
        set_num_threads = torch.set_num_threads
        from vllm import LLM

        max_model_len = context_length(path, self.args)
        options = dict(enable_sleep_mode=True)
        if on_cpu:
            # A prompt in two chunks has vLLM rewind the request's generator, which CPU generators cannot ("CPU
            # Generator does not use offset", vllm/v1/worker/gpu_model_runner.py). So no chunks.
            whole = dict(enable_chunked_prefill=False, max_num_batched_tokens=max(8192, max_model_len))
            options = dict(enforce_eager=True) | whole
        if self.dtype != torch.float32:  # as the trainer does: see token_logprobs
            options["hf_overrides"] = dict(head_dtype="float32")
        try:
            self.llm = LLM(
                model=path,
                distributed_executor_backend="external_launcher",
                tensor_parallel_size=self.args.tensor_parallel_size,
                skip_tokenizer_init=True,
                dtype=str(self.dtype).removeprefix("torch."),
                logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, temperature included
                generation_config="vllm",  # not the model's own top_p, top_k and penalties
                max_model_len=max_model_len,
                gpu_memory_utilization=self.args.gpu_memory_utilization,
                seed=0,  # unused: every request brings its own
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        except ValueError as error:
            raise ValueError(f"vLLM refuses the model or its flags: {distributed.first_line(error)}") from error
        finally:
            # vLLM's CPU worker overwrites these for subprocesses we do not have, and turns set_num_threads off,
            # which would leave the trainer on one thread (vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py).
            for name, value in kept.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            torch.set_num_threads = set_num_threads
        size = self.args.tensor_parallel_size
        first = dist.get_rank() // size * size
        self.group_start, self.group = first, None
        for start in range(0, dist.get_world_size(), size):  # new_group is collective: every rank makes all of them
            group = dist.new_group(list(range(start, start + size)), backend="gloo") if size > 1 else None
            self.group = group if start == first else self.group

    def _generate(self, prompts, n, seeds, temperature, limits):
        from vllm import SamplingParams

        counts = [len(prompts)]
        if self.group is not None:  # the ranks of a tensor-parallel group must all ask for all of the group's prompts
            shares: list = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(shares, (prompts, seeds, limits), group=self.group)
            counts = [len(share) for share, _, _ in shares]
            prompts, seeds, limits = ([x for share in column for x in share] for column in zip(*shares, strict=True))
        params = [
            SamplingParams(
                n=n,
                seed=seed * SEED_SPACING,
                temperature=temperature,
                max_tokens=limit,
                stop_token_ids=self.eos_ids,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed, limit in zip(seeds, limits, strict=True)
        ]
        # vLLM compiles one sampler helper even when eager: 16 seconds once, and a C++ compiler, for nothing on CPU.
        stance = torch.compiler.set_stance("force_eager") if self.device.type == "cpu" else contextlib.nullcontext()
        with stance:
            requests = [dict(prompt_token_ids=prompt) for prompt in prompts]
            outputs = self.llm.generate(requests, params, use_tqdm=False) if requests else []
        mine = dist.get_rank() - self.group_start if self.group is not None else 0
        start = sum(counts[:mine])
        return [
            [
                (
                    list(c.token_ids),
                    [p[t].logprob for p, t in zip(c.logprobs, c.token_ids, strict=True)],
                    c.finish_reason,
                )
                for c in output.outputs
            ]
            for output in outputs[start : start + counts[mine]]
        ]

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights, is_checkpoint_format=True))
        if self.device.type != "cpu":
            self.llm.wake_up(tags=["kv_cache"])
        # Cached prefixes are of the old weights.
        assert self.llm.reset_prefix_cache(), "vLLM kept its prefix cache: requests were still running"

    def sleep(self) -> None:
        if self.device.type != "cpu":  # vLLM's CPU worker cannot
            self.llm.sleep(level=2)

    def wake(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.empty_cache()  # vLLM takes its memory from the driver, not from PyTorch's cache
            self.llm.wake_up(tags=["weights"])

    def close(self) -> None:
        dist.barrier()  # vLLM's shutdown leaves the process group: nobody may still need it
        self.llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def _untouched_rng():
    """Starting an engine and sampling draw from the global generators; the trainer must not notice."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def check_agreement(micro_batches: list[PackedBatch], args: RolloutArgs, device: torch.device) -> None:
    """Compare the log-probs of engine and trainer on everything a first rollout sampled. Collective.

    A wrong temperature, a stale head or a weight that did not arrive shows here, before anything is learned from it.
    Raises `RunError` above `--max_logprob_difference`.
    """
    limit = args.max_logprob_difference or (1e-3 if compute_dtype(args, device) == torch.float32 else 1.0)
    trained = [mb for mb in micro_batches if mb.loss_mask_T.any()]
    differences = [(mb.old_logprobs_T - mb.rollout_logprobs_T)[mb.loss_mask_T].abs() for mb in trained]
    largest = max((float(d.nan_to_num(nan=torch.inf).max()) for d in differences), default=0.0)
    if (worst := float(distributed.all_max(largest))) > limit:
        raise distributed.RunError(
            f"engine and trainer differ by {worst:.2g} nats on a sampled token (--max_logprob_difference {limit:g}): "
            "they do not compute the same model"
        )
