"""vLLM in this process: its workers are the torchrun ranks themselves."""

import contextlib
import logging
import os
from collections.abc import Iterator
from copy import copy

import torch
import torch.distributed as dist
from torch import Tensor

from common.model.hub import context_length
from common.model.loading import hub_weights
from common.parallel import distributed
from common.rollout.engine import SLOTS, Engine


def lost_asleep(worker) -> list[str]:
    """Names of tensors of vLLM's model that sleep at level 2 would not restore: neither weights, which `load_weights`
    brings, nor buffers, which vLLM keeps. (The cache is filled anew; the `_cpu` scales are of quantised caches.)"""
    return [
        f"{name}.{key}"
        for name, module in worker.get_model().named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.device.type == worker.device.type
        if key != "kv_cache" and not key.endswith("_cpu")
    ]


def forget_packed_experts(worker) -> None:
    """vLLM 0.32's CPU worker packs experts into the layout of its kernel when it makes that kernel, and only then
    (UnquantizedFusedMoEMethod._setup_kernel): reloaded ones would be computed with as if they were packed. Without
    a kernel it makes and packs anew. Can go when reloading packs."""
    for module in worker.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


class VLLMEngine(Engine):
    """vLLM with `external_launcher`: its workers are the torchrun ranks themselves."""

    def _start(self, path: str) -> None:
        # Read once at import: before anything of vllm is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(logging.ERROR)  # until it reads that: it says that a CPU has no Triton
        on_cpu = self.device.type == "cpu"
        if self.args.batch_invariant:
            if on_cpu:
                raise ValueError("--batch_invariant: on a CPU completions never depend on the batch they are in")
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        if self.dtype == torch.float32:
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # vLLM's attention would round to 10 bits, tf32
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the ranks share the cores
        kept = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
        set_num_threads = torch.set_num_threads
        from transformers import MODEL_MAPPING, AutoConfig
        from vllm import LLM

        config = AutoConfig.from_pretrained(path)
        decoder, self.model_type = MODEL_MAPPING[type(config)], config.model_type
        make_decoder = decoder.__init__
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
                gpu_memory_utilization=self.args.gpu_memory_utilization or (0.4 if self.beside_trainer else 0.9),
                max_num_seqs=SLOTS,
                seed=0,  # unused: every request brings its own
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"vLLM refuses the model or its flags: {distributed.first_line(error)}") from error
        finally:
            # vLLM's CPU worker overwrites these for subprocesses we do not have, and turns set_num_threads off,
            # which would leave the trainer on one thread (vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py).
            for name, value in kept.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            torch.set_num_threads = set_num_threads
            # Models that vLLM has no code of its own for (OLMo 2, SmolLM3) are transformers' own, whose class it makes
            # one that is compiled (vllm/model_executor/models/transformers/base.py). The trainer's are of it too.
            decoder.__init__, decoder.do_not_compile = make_decoder, True
        if not on_cpu and (lost := self.llm.collective_rpc(lost_asleep)[0]):
            raise ValueError(f"vLLM would lose {lost[0]} of this model, no weight and no buffer, while it sleeps")
        # Some of vLLM's models (Gemma 2) have no head beside the embedding and refuse weights for one.
        (self.has_head, *_) = self.llm.collective_rpc(
            lambda worker: any(name.endswith("lm_head") for name, _ in worker.get_model().named_modules())
        )
        self.client = self.llm.llm_engine.engine_core
        self.core = self.client.engine_core
        self.requests = {}  # by what they have in common
        size = self.args.tensor_parallel_size
        first = dist.get_rank() // size * size
        self.place = dist.get_rank() - first
        for start in range(0, dist.get_world_size(), size):  # new_group is collective: every rank makes all of them
            group = dist.new_group(list(range(start, start + size)), backend="gloo") if size > 1 else None
            self.group = group if start == first else self.group

    def _request(self, temperature: float):
        """One that vLLM has read and found right, to be copied: reading takes longer than all else it does to begin."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(
            seed=0,
            temperature=temperature,
            max_tokens=1,
            stop_token_ids=self.eos_ids,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        engine = self.llm.llm_engine
        return engine.input_processor.process_inputs("", tokens_input([0]), params, engine.get_supported_tasks())

    # LLMEngine's own add_request, step and abort_request keep a second account of every request, with text and
    # dictionaries of log-probs for every token, in the time in which a GPU could go on: so its core is asked.

    def _begin(self, name, completion):
        kind = completion.temperature, tuple(self.eos_ids)
        if kind not in self.requests:
            self.requests[kind] = self._request(completion.temperature)
        request = copy(self.requests[kind])
        request.request_id = name
        request.prompt_token_ids = completion.prompt + completion.ids
        request.sampling_params = params = copy(request.sampling_params)
        params.seed, params.max_tokens = completion.piece_seed, completion.limit - len(completion.ids)
        self.client.add_request(request)

    def _advance(self):
        # vLLM compiles one sampler helper even when eager: 16 seconds once, and a C++ compiler, for nothing on CPU.
        stance = torch.compiler.set_stance("force_eager") if self.device.type == "cpu" else contextlib.nullcontext()
        with stance:
            outputs = self.client.get_output().outputs
        for output in outputs:
            reason = None if output.finish_reason is None else str(output.finish_reason)
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()
            self._said(self.running[output.request_id], output.new_token_ids, logprobs, reason)

    def _stop(self, names):
        self.client.abort_requests(names)
        while self.core.batch_queue:  # what was computed ahead for them
            self.client.get_output()

    def occupancy(self) -> dict[str, float]:
        """And what fraction of its cache is taken, and how many of the running ones it had to put off for that."""
        scheduler = self.core.scheduler
        put_off = sum(request.num_preemptions > 0 for request in scheduler.requests.values())
        return super().occupancy() | dict(kv_cache=scheduler.kv_cache_manager.usage, preempted=put_off)

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if not self.has_head:
            weights = ((name, whole) for name, whole in weights if name != "lm_head.weight")
        weights = (each for name, whole in weights for each in hub_weights(self.model_type, name, whole))
        if self.device.type == "cpu":
            self.llm.collective_rpc(forget_packed_experts)
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
        if self.device.type != "cpu" and self.llm.llm_engine.is_sleeping():
            self.wake()  # freeing what is not mapped is a CUDA error (vllm/device_allocator/cumem.py)
            self.llm.wake_up(tags=["kv_cache"])
        distributed.barrier()  # vLLM's shutdown leaves the process group: nobody may still need it
        self.client.shutdown()
