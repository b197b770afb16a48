"""Capacity of inference engines, for `--dry_run`: weights, the cache of keys and values, and the
completions that run at a time (docs/planning.md)."""

from dataclasses import dataclass
from typing import Any

from common.config.groups import TrainArgs
from common.config.sampling import ALONE, BESIDE_TRAINER, SLOTS
from common.model.flops import attention_shape, num_delta_nets
from common.model.memory import Shapes


@dataclass(frozen=True)
class Room:
    """The room in an engine, and its completions."""

    engines: int
    ranks: int  # GPUs of an engine
    memory: float  # bytes on each GPU
    weights: float
    config: Any  # of the model
    size: int  # bytes of a number in the cache
    length: int  # tokens of a prompt and of the longest completion
    completions: float  # of a step, per engine

    @property
    def cache(self) -> float:
        """Bytes for keys and values on each GPU."""
        return max(0.0, self.memory - self.weights)

    def cached(self, length: float) -> float:
        """Return the bytes of a completion of `length` tokens in the cache of each GPU."""
        return bytes_in_cache(self.config, length, self.size, self.ranks)

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds in completions of full length."""
        return int(self.cache / self.cached(self.length) * self.length)

    def running(self, length: float) -> int:
        """Return the completions that run at a time, if each has `length` tokens."""
        return min(SLOTS, int(self.cache / self.cached(length)))


def bytes_in_cache(config, tokens: float, size: int, ranks: int) -> float:
    """Return the bytes of a completion in the cache of each of the `ranks` GPUs of an engine, for
    numbers of `size` bytes. A layer keeps keys and values of all tokens, or of those in its sliding
    window. A gated delta net keeps its state, in float32, whatever the length."""
    heads, width = attention_shape(config)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    per_token = 2 * max(1, key_heads // ranks) * width * size
    window = getattr(config, "sliding_window", None) or tokens
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windowed = kinds.count("sliding_attention")
    delta_nets = num_delta_nets(config)
    state = 0.0
    if delta_nets:
        from common.model.flops import state_size

        state = 4 * delta_nets * state_size(config) / ranks
    kept = windowed * min(tokens, window) + (layers - windowed - delta_nets) * tokens
    return per_token * kept + state


def make_room(
    m: Shapes, config, args: TrainArgs, ranks: int, size: int, capacity: float, prompt: int
) -> Room:
    """Return the room in the engines on `ranks` GPUs with `capacity` bytes each, for weights with
    numbers of `size` bytes and prompts of `prompt` tokens. A capacity of 0 is a CPU."""
    share = args.gpu_memory_utilization or (ALONE if args.rollout_ranks else BESIDE_TRAINER)
    together = args.tensor_parallel_size
    engines = (args.rollout_ranks or ranks) // together
    length = prompt + args.max_new_tokens
    weights = size * m.weights / together
    return Room(
        engines=engines,
        ranks=together,
        memory=share * capacity or weights + 2**30,  # vLLM's cache on a CPU
        weights=weights,
        config=config,
        size=size,
        length=length,
        completions=args.prompts_per_step * args.samples_per_prompt / engines,
    )
