"""How much memory and time a launch takes, and what fits in its engines, by arithmetic alone
(README.md). plan.py prints it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

from torch import nn

from common.config.groups import TrainArgs
from common.config.online import ALONE, SLOTS, USABLE, OnlineArgs
from common.model.flops import attention_shape, num_delta_nets
from common.model.hub import longest_sequence
from common.model.policy import PackedModel
from common.rollout.weights import gathered_bytes
from extras.plan.memory import (
    GIB,
    Bytes,
    blocks_to_keep,
    num_blocks,
    num_weights,
    total,
    training_peak,
)

# The shares of the published rates that runs reach, and the band around the predicted time.
EAGER, COMPILED = 0.27, 0.38  # of FLOP/s: 271 and 378 of 989 TFLOP/s (docs/log.md)
DECODING = 0.8  # of the memory's bandwidth
BAND = (0.5, 2.0)
MACHINE = 8  # GPUs of a planned machine


class Gpu(NamedTuple):
    """A kind of GPU, by its manufacturer's numbers. 0: unknown."""

    memory: float  # bytes that torch reports
    flops: float = 0.0  # per second, dense, bfloat16
    bandwidth: float = 0.0  # bytes per second of its memory


GPUS = {
    "A100": Gpu(79.1 * GIB, 312e12, 2.04e12),
    "A100_40GB": Gpu(39.4 * GIB, 312e12, 1.555e12),
    "H100": Gpu(79.1 * GIB, 989e12, 3.35e12),
    "H200": Gpu(139.8 * GIB, 989e12, 4.8e12),
    "B200": Gpu(178 * GIB, 2250e12, 8e12),
    "L40S": Gpu(44.4 * GIB, 362e12, 0.864e12),
    "4090": Gpu(23.5 * GIB, 165e12, 1.008e12),
}


def flops_per_token(model: PackedModel, length: float) -> float:
    """Return the operations of a forward per token of sequences of this length, as `forward_flops`
    counts."""
    config = model.hf.config.get_text_config()
    heads, width = attention_shape(config)
    layers = config.num_hidden_layers - num_delta_nets(config)
    return 2.0 * model.matrix_weights + 2.0 * heads * width * length * layers


def bytes_in_cache(config, tokens: float, size: int, gpus: int) -> float:
    """Return the bytes that a sequence takes in the cache of each GPU of an engine, if a number
    takes `size` bytes. A layer keeps keys and values of all tokens, or only of its window; a delta
    net keeps its state, in float32."""
    heads, width = attention_shape(config)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    per_token = 2 * max(1, key_heads // gpus) * width * size
    window = min(tokens, getattr(config, "sliding_window", None) or tokens)
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windowed = kinds.count("sliding_attention")
    delta_nets = num_delta_nets(config)
    kept = per_token * (windowed * window + (layers - windowed - delta_nets) * tokens)
    if delta_nets:
        state = config.linear_key_head_dim * config.linear_value_head_dim
        kept += 4 * delta_nets * config.linear_num_value_heads * state / gpus
    return kept


@dataclass(frozen=True)
class Launch:
    """A run on its GPUs. Its models are on meta, without weights. Bytes are those on each GPU."""

    args: TrainArgs
    gpus: int
    gpu: Gpu
    machine: int  # GPUs on each machine
    trained: Sequence[PackedModel]
    frozen: Sequence[PackedModel]  # in memory
    scorers: Sequence[PackedModel]  # models that score the sequences of a step once
    prompt: float  # mean tokens of a prompt; without sampling, of a sequence
    each: int  # sequences of a row
    trained_fraction: float = 1.0  # share of the sequences that is trained
    own_forwards: float = 0.0  # how often the trained model scores them before the update

    @property
    def samples(self) -> bool:
        return isinstance(self.args, OnlineArgs)

    @property
    def rollout_ranks(self) -> int:
        return self.args.rollout_ranks if self.samples else 0

    @property
    def trainers(self) -> int:
        return self.gpus - self.rollout_ranks

    @property
    def new(self) -> int:
        """Tokens of a completion of full length, without its prompt."""
        return self.args.max_new_tokens if self.samples else 0

    @property
    def length(self) -> float:
        """Tokens of a sequence."""
        return self.prompt + self.new

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.args.rows_per_step * self.each

    # ---- memory ----

    @property
    def ranks(self) -> int:
        """The number of ranks over which a copy of each model is sharded, as in `shard_mesh`."""
        whole = self.trainers if self.trainers % self.machine else self.machine
        return self.args.shard_ranks or whole

    @cached_property
    def kept(self) -> list[int]:
        """How many blocks of each trained model keep their activations."""
        if not self.gpu.memory and self.args.activation_checkpointing is None:
            return [num_blocks(model) for model in self.trained]
        room = USABLE * self.gpu.memory - total(self.states)
        return [blocks_to_keep(model, room, self.ranks, self.args) for model in self.trained]

    @property
    def states(self) -> Bytes:
        """Bytes on a training rank during an update, by use, without those of a micro-batch."""
        args = self.args
        on_gpu = 0 if args.offload == "all" else 1 / self.ranks
        numbers = sum(num_weights(model, trained=True) for model in self.trained)
        has_copy = self.samples and not self.rollout_ranks and not self.has_vllm
        return {
            "weights": sum(map(size_of, self.trained)) * on_gpu,
            "frozen models": sum(map(size_of, self.frozen)) * on_gpu,
            # The moments of one parameter on the GPU, during its update, take less than its
            # backward.
            "Adam": 8 * numbers / self.ranks if args.offload == "none" else 0,
            "gradients": 4 * numbers * on_gpu,
            "engine": self.engine_weights if has_copy else 0,
        }

    @property
    def update_memory(self) -> Bytes:
        """Bytes on a training rank at the peak of an update, by use. Models are updated one after
        the other, so only one has activations."""
        settings = repeat(self.ranks), repeat(self.args.pack_tokens), self.kept
        return self.states | max(map(training_peak, self.trained, *settings), key=total)

    @cached_property
    def memory(self) -> Bytes:
        """Bytes on a training rank at the peak of a step, by use: that of the update or, if it is
        larger, that of sampling with a colocated engine."""
        if not self.has_vllm or self.rollout_ranks:
            return self.update_memory
        return max(self.update_memory, self.sampling | dict(engine=self.engine), key=total)

    @property
    def sampling(self) -> Bytes:
        """Bytes on a training rank beside a colocated engine that samples, by use."""
        sampling = {name: self.states[name] for name in ("weights", "frozen models", "Adam")}
        policy = self.trained[0]
        return sampling | {"gathered weights": gathered_bytes(policy.hf, policy.compute_dtype)}

    def describe_memory(self) -> str:
        """Return the memory of a training rank in GiB, in one line, the largest use first."""
        uses = sorted(self.memory.items(), key=lambda use: -use[1])
        listed = [f"{use} {size / GIB:.1f}" for use, size in uses if size >= 0.05 * GIB]
        available = f" of {self.gpu.memory / GIB:.1f}" if self.gpu.memory else ""
        return f"{total(self.memory) / GIB:.1f} GiB{available} ({', '.join(listed)})"

    @property
    def has_vllm(self) -> bool:
        return self.samples and self.args.engine != "transformers"

    @property
    def engines(self) -> int:
        return (self.rollout_ranks or self.gpus) // self.args.tensor_parallel_size

    @property
    def engine(self) -> float:
        """Bytes of an engine: as the flag says, else what is free while it samples."""
        given = self.args.engine_options.get("gpu_memory_utilization")
        if given or self.rollout_ranks:
            return (given or ALONE) * self.gpu.memory
        free = USABLE * self.gpu.memory - total(self.sampling)
        return max(0.0, min(ALONE * self.gpu.memory, free))

    @property
    def engine_weights(self) -> float:
        policy = self.trained[0]
        size = policy.compute_dtype.itemsize * num_weights(policy)
        return size / self.args.tensor_parallel_size

    def cached(self, tokens: float) -> float:
        """Return the bytes of a sequence in the cache of an engine."""
        policy = self.trained[0]
        config, size = policy.hf.config.get_text_config(), policy.compute_dtype.itemsize
        return bytes_in_cache(config, tokens, size, self.args.tensor_parallel_size)

    @property
    def running(self) -> int:
        """How many completions of full length an engine can run at a time. This is an upper bound:
        vLLM's own activations and graphs are not predicted."""
        cache = max(0.0, self.engine - self.engine_weights)
        return min(SLOTS, int(cache / self.cached(self.length)))

    def problem(self) -> str | None:
        """Return why the run does not fit or vLLM would not start, or None."""
        if round(total(self.memory)) > round(USABLE * self.gpu.memory):
            needs = f"{self.describe_memory()} on each GPU, of which {USABLE:.0%} are usable"
            return f"needs {needs}; --offload, --lora_rank or more GPUs save memory"
        if not self.has_vllm:
            return None
        longest = self.cached(longest_sequence(self.trained[0].path, self.args).tokens)
        if self.engine_weights + longest <= self.engine:
            return None
        parts = f"{self.engine_weights / GIB:.1f} GiB of weights and {longest / GIB:.1f} for the"
        parts += f" longest sequence exceed the engine's {self.engine / GIB:.1f} GiB per GPU"
        return f"vLLM would not start: {parts}; raise --tensor_parallel_size"

    # ---- time ----

    @property
    def training(self) -> float:
        """The share of the GPU's FLOP/s that training reaches."""
        return EAGER if self.args.compile is False else COMPILED

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase of a step, if all completions have full length."""
        tokens = self.sequences * self.length / self.trainers / (self.training * self.gpu.flops)
        times = dict(rollout=self.rollout_seconds()) if self.has_vllm else {}
        own = self.own_forwards * flops_per_token(self.trained[0], self.length)
        scored = own + sum(flops_per_token(m, self.length) for m in self.scorers)
        times["log-probs"] = tokens * scored
        trained = sum(flops_per_token(m, self.length) * self.passes(m) for m in self.trained)
        epochs = self.args.epochs_per_rollout if self.samples else 1
        times["update"] = epochs * self.trained_fraction * tokens * trained
        return times

    @property
    def overlaps(self) -> bool:
        """Whether rollout ranks sample while the others train."""
        return self.rollout_ranks > 0 and self.args.max_staleness > 0

    def step_seconds(self, phases: dict[str, float]) -> float:
        """Return the seconds of a step with these phases."""
        rollout = phases.get("rollout", 0.0)
        rest = sum(phases.values()) - rollout
        return max(rollout, rest) if self.overlaps else rollout + rest

    def passes(self, model: PackedModel) -> float:
        """Return how many forwards a forward and backward cost: 3, or 2 if only adapters are
        trained, plus the share of blocks that are recomputed."""
        is_whole = next(model.hf.parameters()).requires_grad
        kept = self.kept[self.trained.index(model)]
        return (3 if is_whole else 2) + 1 - kept / num_blocks(model)

    def rollout_seconds(self) -> float:
        """Return the seconds in which an engine samples its share. One token of all running
        completions takes as long as the slower of two things: reading the weights and the cache,
        half full, and computing."""
        policy = self.trained[0]
        rate = EAGER * self.gpu.flops * self.args.tensor_parallel_size  # not measured in vLLM
        prompts = self.args.rows_per_step * self.prompt / self.engines
        count = self.sequences / self.engines
        waves = math.ceil(count / self.running)
        context = self.prompt + self.new / 2
        read = self.engine_weights + count / waves * self.cached(context)
        computed = count / waves * flops_per_token(policy, 2 * context) / rate
        token = max(read / (DECODING * self.gpu.bandwidth), computed)
        return prompts * flops_per_token(policy, self.prompt) / rate + waves * self.new * token


def size_of(model: nn.Module) -> int:
    """Return the bytes of all weights: float32 masters, or frozen ones in the compute dtype."""
    return sum(p.numel() * p.element_size() for p in model.parameters())
