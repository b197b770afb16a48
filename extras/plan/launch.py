"""Memory, room in the engines and time of a launch, by arithmetic alone (README.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from common.config.groups import TrainArgs
from common.config.online import OnlineArgs
from common.config.sampling import ALONE, BESIDE_TRAINER, SLOTS
from common.model.flops import attention_shape, num_delta_nets
from common.model.hub import context_length
from common.model.memory import (
    GIB,
    USABLE,
    Bytes,
    block_and_root,
    num_weights,
    total,
)
from common.model.policy import PackedModel
from extras.plan.memory import Plan, make_plan, predict, size_of, uses_vllm

# Shares of the published rates that are reached, and the band around the time that they give.
TRAINING = 0.27  # of FLOP/s
DECODING = 0.8  # of bandwidth
BAND = (0.5, 2.0)
MACHINE = 8  # GPUs of a planned machine


class Gpu(NamedTuple):
    """A kind of GPU by the numbers of its manufacturer; 0: unknown."""

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
    counts them."""
    config = model.hf.config.get_text_config()
    heads, width = attention_shape(config)
    layers = config.num_hidden_layers - num_delta_nets(config)
    return 2.0 * model.matrix_weights + 2.0 * heads * width * length * layers


def bytes_in_cache(config, tokens: float, size: int, gpus: int) -> float:
    """Return the bytes of a sequence in the cache of each GPU of an engine, with numbers of `size`
    bytes. A layer keeps keys and values of all tokens, or of those in its window; a delta net keeps
    its state, in float32."""
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
    """A run on its GPUs. Models are on meta; bytes are those on each GPU."""

    args: TrainArgs
    gpus: int
    gpu: Gpu
    machine: int  # GPUs of a machine
    trained: Sequence[PackedModel]
    frozen: Sequence[PackedModel]  # in memory
    scorers: Sequence[PackedModel]  # each scores the sequences of a step once
    prompt: float  # mean tokens of a prompt; without sampling, of a sequence
    each: int  # sequences of a row
    trained_share: float = 1.0  # of the sequences

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
        """Tokens of a completion of full length."""
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
    def models(self) -> list[PackedModel]:
        return [*self.trained, *self.frozen]

    @cached_property
    def plan(self) -> Plan:
        """The plan of a training rank. A copy of each model is sharded as `shard_mesh` does it."""
        whole = self.trainers if self.trainers % self.machine else self.machine
        return make_plan(self.models, self.args, self.args.shard_ranks or whole, self.gpu.memory)

    def memory(self, plan: Plan) -> Bytes:
        """Return the bytes on a training rank at the peak of a step, by use: the larger peak of the
        update and, with a colocated engine, of sampling."""
        update = predict(self.models, plan)
        if not self.has_vllm or self.rollout_ranks:
            return update
        sampling = {name: update[name] for name in ("weights", "frozen models", "Adam")}
        parts = [(model.compute_dtype.itemsize, *block_and_root(model)) for model in self.models]
        sampling["gathered weights"] = max(size * (root + 2 * block) for size, block, root in parts)
        return max(update, sampling | dict(engine=self.engine), key=total)

    def on_the_host(self, plan: Plan) -> float:
        """Return the bytes of host memory that each rank takes for `--offload`."""
        moments = 8 * sum(num_weights(model, trained=True) for model in self.trained)
        everything = sum(map(size_of, self.models)) + 1.5 * moments  # with gradients
        return {"none": 0, "optimizer": moments, "all": everything}[plan.offload] / plan.ranks

    def describe_memory(self) -> str:
        """Return the memory of a training rank in GiB, in one line, the largest use first."""
        uses = sorted(self.memory(self.plan).items(), key=lambda use: -use[1])
        listed = [f"{use} {size / GIB:.1f}" for use, size in uses if size >= 0.05 * GIB]
        available = f" of {self.gpu.memory / GIB:.1f}" if self.gpu.memory else ""
        line = f"{sum(size for _, size in uses) / GIB:.1f} GiB{available} ({', '.join(listed)}"
        if self.plan.offload != "none":
            line += f"; on the host {self.on_the_host(self.plan) / GIB:.1f}"
        return line + ")"

    @property
    def fits(self) -> bool:
        return total(self.memory(self.plan)) <= USABLE * self.gpu.memory

    @property
    def has_vllm(self) -> bool:
        return self.samples and uses_vllm(self.args)

    @property
    def engines(self) -> int:
        return (self.rollout_ranks or self.gpus) // self.args.tensor_parallel_size

    @property
    def engine(self) -> float:
        """Bytes of an engine."""
        default = ALONE if self.rollout_ranks else BESIDE_TRAINER
        return self.gpu.memory * self.args.engine_options.get("gpu_memory_utilization", default)

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
        """Completions of full length that an engine runs at a time, at most: vLLM's own activations
        and graphs are not predicted."""
        cache = max(0.0, self.engine - self.engine_weights)
        return min(SLOTS, int(cache / self.cached(self.length)))

    def problem(self) -> str | None:
        """Return the reason why the run does not fit or vLLM does not start, if so."""
        if not self.fits:
            needs = self.describe_memory()
            return f"needs {needs} on each GPU, of which {USABLE:.0%} are usable"
        if not self.has_vllm:
            return None
        longest = self.cached(context_length(self.trained[0].path, self.args))
        if self.engine_weights + longest <= self.engine:
            return None
        parts = f"{self.engine_weights / GIB:.1f} GiB of weights and {longest / GIB:.1f} for the"
        parts += f" longest sequence exceed the engine's {self.engine / GIB:.1f} GiB per GPU"
        return f"vLLM would not start: {parts}; raise --tensor_parallel_size"

    # ---- time ----

    def seconds(self) -> dict[str, float]:
        """Return the time of each phase of a step, all completions at full length."""
        tokens = self.sequences * self.length / self.trainers / (TRAINING * self.gpu.flops)
        times = dict(rollout=self.rollout_seconds()) if self.has_vllm else {}
        times["log-probs"] = tokens * sum(flops_per_token(m, self.length) for m in self.scorers)
        trained = sum(flops_per_token(m, self.length) * self.passes(m) for m in self.trained)
        epochs = self.args.epochs_per_rollout if self.samples else 1
        times["update"] = epochs * self.trained_share * tokens * trained
        return times

    def passes(self, model: PackedModel) -> int:
        """Return how many forwards forward and backward take: 2 if only adapters are trained."""
        is_whole = next(model.hf.parameters()).requires_grad
        return (3 if is_whole else 2) + self.plan.recompute

    def rollout_seconds(self) -> float:
        """Return the time in which an engine samples its share. A token of all running completions
        takes as long as reading the weights and the cache, half full, or as computing it."""
        policy = self.trained[0]
        rate = TRAINING * self.gpu.flops * self.args.tensor_parallel_size
        prompts = self.args.rows_per_step * self.prompt / self.engines
        count = self.sequences / self.engines
        waves = math.ceil(count / self.running)
        context = self.prompt + self.new / 2
        read = self.engine_weights + count / waves * self.cached(context)
        computed = count / waves * flops_per_token(policy, 2 * context) / rate
        token = max(read / (DECODING * self.gpu.bandwidth), computed)
        return prompts * flops_per_token(policy, self.prompt) / rate + waves * self.new * token
