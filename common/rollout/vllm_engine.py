"""Engine that runs vLLM inside the torchrun processes: no server, the ranks are vLLM's workers."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from common.config.extra import extra
from common.config.online import ALONE, SLOTS, USABLE
from common.metrics.meter import Meter
from common.model.flops import num_delta_nets, used_memory
from common.model.hub import longest_sequence
from common.model.loading import has_images, hub_weights, load_config, model_class, open_model
from common.parallel import distributed
from common.rollout.engine import COMPARED, Engine, Request, SampledTurn
from common.rollout.weights import gathered_bytes


def held_weights(worker) -> Iterator[tuple[str, tuple, Callable[[], Tensor]]]:
    """Yield what `Engine.held_weights` promises, in a vLLM worker. Only layers that vLLM does not
    fuse with others can be compared: the embedding, the head, and the last projection of attention
    and MLP. With tensor parallelism the parts are from this rank's shard."""
    from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    model = worker.get_model()
    text = model.get_language_model() if hasattr(model, "get_language_model") else model
    for name, layer in text.named_modules():
        rows, first = slice(None), 0
        if isinstance(layer, VocabParallelEmbedding):
            shard = layer.shard_indices
            rows = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
        elif isinstance(layer, RowParallelLinear):
            first = layer.tp_rank * layer.input_size_per_partition
        elif not isinstance(layer, ReplicatedLinear):
            continue
        if hasattr(layer, "weight"):
            name = f"{name}.weight".replace(".attn.", ".self_attn.")  # of gpt-oss
            yield name, (rows, slice(first, first + COMPARED)), partial(_first_columns, layer)


def _first_columns(layer) -> Tensor:
    weight = layer.weight
    if not weight.numel():  # vLLM's CPU worker has packed it for a kernel
        width = getattr(layer, "input_size_per_partition", layer.input_size)
        return layer.cpu_linear(torch.eye(COMPARED, width, dtype=weight.dtype), weight, None).T
    return weight[: getattr(layer, "num_org_embeddings_per_partition", None), :COMPARED]


def free_fraction(capacity: float, used: float, gathered: float) -> float:
    """Return the fraction of a GPU that the engine may take, the same on every rank: all of it but
    the bytes in use and those that a weight sync gathers. vLLM takes this fraction of the whole
    GPU, beside what was in use at its start (vllm/v1/worker/utils.py:request_memory). Collective.

    Raises `ValueError` if nothing is free."""
    taken = float(distributed.all_max((used + gathered) / capacity))
    if taken >= USABLE:
        problem = f"{taken:.0%} of a GPU are in use, {USABLE:.0%} are usable"
        raise ValueError(f"--engine vllm: {problem}; --offload, --lora_rank or more GPUs help")
    return min(ALONE, USABLE - taken)


# ---- workarounds for surprises of vLLM 0.32, each with the place in its source ----


@contextlib.contextmanager
def same_environment() -> Iterator[None]:
    """Restore environment variables that vLLM's CPU worker sets for its subprocesses
    (vllm/platforms/cpu.py, vllm/v1/worker/cpu_worker.py). Here it has none, but the trainer reads
    LOCAL_WORLD_SIZE, and would pass LD_PRELOAD on to its own."""
    variables = {name: os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """Give the trainer its threads back: the CPU worker disables `torch.set_num_threads`
    (vllm/v1/worker/cpu_worker.py), all workers reduce the threads (vllm/utils/torch_utils.py)."""
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)


@contextlib.contextmanager
def same_class(decoder: type) -> Iterator[None]:
    """Restore transformers' decoder class. vLLM runs some models (OLMo 2, SmolLM3) with
    transformers' own code, and makes their class a compiled one
    (vllm/model_executor/models/transformers/base.py). The trainer's model has the same class."""
    make_decoder = decoder.__init__
    try:
        yield
    finally:
        decoder.__init__ = make_decoder
        decoder.do_not_compile = True


def remove_shared_memory() -> None:
    """Remove the files in /dev/shm by which the ranks of a CPU engine share memory (with AVX-512).
    Every launch uses the same names (vllm/distributed/device_communicators/cpu_communicator.py), so
    a file that stayed behind would stop the next launch. Once vLLM has started, all ranks have
    mapped the files and no longer need their names. Collective."""
    distributed.barrier()
    name = os.environ["VLLM_DIST_IDENT"].lstrip("/")
    for file in Path("/dev/shm").glob(f"{name}-*cpushm*"):
        file.unlink(missing_ok=True)


def lost_asleep(worker) -> list[str]:
    """Return the names of the tensors in vLLM's model that it loses when it sleeps at level 2
    (vllm/device_allocator/cumem.py): all on the GPU that are not a weight, a buffer, the cache or a
    scale of a quantised cache (`_cpu`)."""
    return [
        f"{name}.{key}"
        for name, module in worker.get_model().named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor) and value.device.type == worker.device.type
        if key != "kv_cache" and not key.endswith("_cpu")
    ]


def require_nothing_lost(llm) -> None:
    """Raise `ValueError` if sleep loses a tensor of the model."""
    if lost := llm.collective_rpc(lost_asleep)[0]:
        problem = f"sleep loses {lost[0]} of this model"
        raise ValueError(f"--engine vllm: {problem}; use --engine transformers")


def has_head(worker) -> bool:
    """Return whether vLLM's model has a layer for the head. Some models with a tied head have only
    the embedding, and refuse weights for a head (vllm/model_executor/models/gemma2.py)."""
    return any(name.endswith("lm_head") for name, _ in worker.get_model().named_modules())


def cpu_options(max_model_len: int, has_delta_nets: bool) -> dict:
    """Return the options of an engine on a CPU. Prompts must be computed in one chunk: after a
    prompt in two chunks vLLM rewinds the request's random generator, and a CPU generator cannot do
    that (vllm/v1/worker/gpu_model_runner.py). Cached states of delta nets end in the same error, so
    models with delta nets have no prefix cache."""
    return dict(
        enforce_eager=True,
        # The completions of a prompt share only whole blocks of it. vLLM's default on a CPU, 128
        # tokens, is longer than many prompts.
        block_size=32,
        enable_chunked_prefill=False,
        enable_prefix_caching=False if has_delta_nets else None,
        max_num_batched_tokens=max(8192, max_model_len),
    )


def eager_sampler(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which torch compiles nothing on a CPU. Even in eager mode vLLM compiles a
    function of its sampler (vllm/v1/sample/ops/logprobs.py). That takes 16 seconds and a C++
    compiler, and gains nothing."""
    is_cpu = device.type == "cpu"
    return torch.compiler.set_stance("force_eager") if is_cpu else contextlib.nullcontext()


def forget_packed_experts(worker) -> None:
    """Remove the kernel of each expert layer before weights are loaded, so that vLLM makes it anew.
    Its CPU worker packs experts into the kernel's layout only when it makes the kernel
    (UnquantizedFusedMoEMethod._setup_kernel). With the old kernel it would take reloaded experts,
    which are not packed, for packed ones. Can go when vLLM packs on reload."""
    for module in worker.get_model().modules():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None


def stop_requests(llm, names: list[str]) -> None:
    """End the requests of a stopped rollout. vLLM computes some batches ahead and queues them
    (vllm/v1/engine/core.py); run these too, so that nothing of the ended turns is left in it."""
    llm.llm_engine.abort_request(names)
    while llm.llm_engine.engine_core.engine_core.batch_queue:
        llm.llm_engine.step()


def reason_of(error: Exception) -> str:
    """Return why vLLM refuses a model or an option. pydantic says it below its first line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return ": ".join([*map(str, problem["loc"]), problem["msg"]])
    return distributed.first_line(error)


# ---- the engine ----


class VLLMEngine(Engine):
    """vLLM with `external_launcher`: torchrun, not vLLM, has started the workers."""

    def _start(self) -> None:
        self.keeps_weights = self.device.type == "cpu"
        config = load_config(self.path)
        with torch.device("meta"):
            self.model = model_class(config).from_config(config)
        self.language_model = None
        if self.images is None and (has_images(config) or config.model_type == "gpt_oss"):
            with extra("architectures", f"--engine vllm: {config.model_type}"):
                from extras.architectures.in_vllm import LanguageModel
            size = self.args.tensor_parallel_size
            self.language_model = LanguageModel(config, self.model, size)
            config, self.model = self.language_model.config, self.language_model.model
        self._set_environment()
        with same_environment(), same_threads(), same_class(type(self.model.get_decoder())):
            from vllm import LLM

            options = self._options(num_delta_nets(config.get_text_config()) > 0)
            try:
                if self.images is not None:
                    options |= self.images.vllm_options(config.architectures[0])
                elif self.language_model is not None:
                    options |= self.language_model.vllm_options(options.get("hf_overrides", {}))
                self.llm = LLM(model=self.path, **options)
            except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
                reason = reason_of(error)
                raise ValueError(f"--engine vllm: refuses the model or a flag: {reason}") from error
        size = self.args.tensor_parallel_size
        if self.device.type != "cpu":
            require_nothing_lost(self.llm)
        elif size > 1:
            remove_shared_memory()
        self.has_head = self.llm.collective_rpc(has_head)[0]
        engine = self.llm.llm_engine
        engine.set_weight_version(str(self.version))
        engine.output_processor.tokenizer = self.tokenizer  # vLLM needs it to find stop strings
        if size > 1:
            # pyrefly: ignore[bad-assignment]  # an int only on a rank that is in no group
            self.group, _ = dist.new_subgroups(size, backend="gloo", timeout=distributed.DAY)
            self.group_rank = dist.get_rank() % size
        if self.language_model is not None and not self.trained:  # vLLM has read no weights
            weights = open_model(self.path, self.dtype).state_dict()
            self.load_weights((name, x.to(self.dtype)) for name, x in weights.items())

    def _set_environment(self) -> None:
        """Set the variables that vLLM reads when it is imported."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # also hides warnings from before vLLM sets that level, such as no Triton on a CPU
        logging.getLogger("vllm").setLevel(logging.ERROR)
        if self.dtype == torch.float32:  # vLLM's attention would compute in tf32
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        if self.device.type == "cpu":  # a cache of 1 GiB; do not bind ranks to cores, they share
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

    def _options(self, has_delta_nets: bool) -> dict:
        max_model_len = longest_sequence(self.path, self.args).tokens
        on_cpu = self.device.type == "cpu"
        options: dict = dict(
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=self.args.tensor_parallel_size,
            skip_tokenizer_init=True,
            dtype=str(self.dtype).removeprefix("torch."),
            logprobs_mode="processed_logprobs",  # log-probs of the sampled distribution
            generation_config="vllm",  # ignores top_p, top_k and penalties in the model's file
            max_model_len=max_model_len,
            max_logprobs=max(20, self.support),
            scheduling_policy="priority",
            seed=0,  # unused: every request has a seed
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if self.dtype != torch.float32:  # the trainer does the same: see token_logprobs
            options["hf_overrides"] = dict(head_dtype="float32")
        if not on_cpu:
            options["enable_sleep_mode"] = True
        flags = self.args.engine_options
        for name in ("model", "tokenizer", "load_format", *options):
            if name in flags:
                raise ValueError(f"--engine_args {name}={flags[name]}: the run sets it")
        options["gpu_memory_utilization"] = ALONE
        if not (on_cpu or distributed.is_rollout_rank() or "gpu_memory_utilization" in flags):
            used, capacity = used_memory(self.device)
            gathered = gathered_bytes(self.model, self.dtype) if self.trained else 0
            options["gpu_memory_utilization"] = free_fraction(capacity, used, gathered)
        options["max_num_seqs"] = SLOTS
        if on_cpu:
            options |= cpu_options(max_model_len, has_delta_nets)
        return options | flags

    def _add(self, name: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            seed=request.seed,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            stop_token_ids=self.eos_ids,
            stop=list(self.args.stop),
            detokenize=bool(self.args.stop),
            skip_special_tokens=False,
            logprobs=self.support,  # 0: only the log-prob of the sampled token
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            **(self.truncation or {}),  # ignored at temperature 0
        )
        prompt = tokens_input([*request.completion.ids])
        if request.completion.images:
            prompt = self.images.vllm_input(request.completion)
        # vLLM orders requests of the same priority by arrival_time. All ranks of the engine must
        # have the same order, and their clocks differ: so give the number of the request.
        self.llm.llm_engine.add_request(
            name, prompt, params, arrival_time=float(name), priority=request.priority
        )

    def _step(self, meter: Meter) -> list[tuple[str, SampledTurn]]:
        """Run a round. Also logs which fraction of the prompts' tokens was in vLLM's cache."""
        with eager_sampler(self.device):
            outputs = self.llm.llm_engine.step()
        turns = []
        for output in outputs:
            (turn,) = output.outputs
            spans = turn.weight_versions
            versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
            # For each token, the sampled id and then the most likely ids. Those that truncation
            # leaves out have -inf: the sampled id stands in for them.
            columns = turn.logprobs.token_ids, turn.logprobs.logprobs
            ids, values = (np.reshape(x, (-1, 1 + self.support)) for x in columns)
            support = np.where(values > -np.inf, ids, ids[:, :1]) if self.support else ()
            logprobs = values[:, 0].tolist()
            sampled = SampledTurn(turn.token_ids, logprobs, versions, turn.finish_reason, support)
            turns.append((output.request_id, sampled))
            cached, size = output.num_cached_tokens, len(output.prompt_token_ids)
            meter.mean("engine/prefix_hit_rate", cached, size)
        return turns

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int = 0) -> None:
        self.version = version
        if self.device.type == "cpu":
            self.llm.collective_rpc(forget_packed_experts)
        else:
            # vLLM asks the driver for memory and cannot use what PyTorch has cached
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        if self.language_model is not None:
            weights = self.language_model.weights_for_vllm(weights)
        options = dict(weights_iterator=self._hub_weights(weights), is_checkpoint_format=True)
        self.llm.collective_rpc("reload_weights", kwargs=options)
        if self.language_model is not None:
            self.language_model.after_vllm_load(self.llm)
        if self.images is not None:
            self.images.after_vllm_load(self.llm)
            self.llm.llm_engine.reset_encoder_cache()  # the old weights encoded its images
        if self.device.type != "cpu":
            self.llm.wake_up(tags=["kv_cache"])
        # The old weights computed the cached prefixes. The new ones compute the tokens of requests
        # in flight again; their random generators go on where they were.
        self.llm.reset_prefix_cache(reset_running_requests=True)
        self.llm.llm_engine.set_weight_version(str(version))

    def held_weights(self) -> Iterator[tuple[str, tuple, Callable[[], Tensor]]]:
        yield from self.llm.collective_rpc(held_weights)[0]

    def _hub_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, whole in weights:
            if self.has_head or name not in ("lm_head.weight", "lm_head.bias"):
                yield from hub_weights(self.model, {name: whole}).items()

    def sleep(self) -> None:
        if self.device.type == "cpu":  # vLLM's CPU worker cannot sleep
            self.llm.reset_prefix_cache()
        else:
            stop_requests(self.llm, [*self.running])
            self.llm.sleep(level=2)

    def close(self) -> None:
        if self.device.type != "cpu" and self.llm.llm_engine.is_sleeping():
            # freeing unmapped memory is a CUDA error (vllm/device_allocator/cumem.py)
            torch.cuda.empty_cache()
            self.llm.wake_up()
        # vLLM's shutdown destroys the process group, which other ranks may still need
        distributed.barrier()
        self.llm.llm_engine.engine_core.shutdown()
