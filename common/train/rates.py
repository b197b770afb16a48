"""Rates of a GPU or a CPU core for the time of a plan (docs/planning.md). Times are in seconds,
rates per second."""

from dataclasses import dataclass
from pathlib import Path
from timeit import Timer

import torch

from common.config.gpu_kinds import Gpu
from common.model.memory import Shapes

# What one H200 (training) and one H100 (the rest) have reached with a model of 1.7B (docs/gpu.md),
# as shares of their published rates.
TRAINING = 271e12 / 989e12  # FLOP of a micro-batch of 8,192 tokens, activations kept
COMPILED = 378e12 / 989e12  # the same with --compile
READING = 0.8  # assumed: bytes read in decoding
SAMPLING = 22e-6  # seconds for each token: the rest of a round; vLLM has a generator per completion
UPDATING = 0.48  # bytes of clipping and AdamW, at 40 per weight
LOADING = 17e9  # bytes of new weights of an engine; no share
# Of "vLLM: generate": FLOP of its prompts, bytes that its rounds read, and sampled tokens.
GENERATED = (4.6e14, 5.69e12, 65_536)
# The parts of bench/gpu.py that these come from: size, and FLOP, bytes or runs.
PARTS = {
    "micro-batch": ("1721M, 8192 tokens", 87.4e12),
    "micro-batch, compiled": ("1721M, 8192 tokens", 87.4e12),
    "vLLM: generate": ("256 prompts of 512, 256 new tokens", 1.0),
    "clip and AdamW": ("1721M", 68.8e9),
    "vLLM: sync": ("", 3.44e9),
}
TABLE = Path("runs/gpu.md")  # of bench/gpu.py
# Assumed, for each GPU: the share of a link's bytes; bytes between host and GPU, of AdamW on the
# host, and between machines; and the seconds in which GPUs add up small tensors.
LINK = 0.6
HOST_LINK = 32e9
HOST_UPDATING = 10e9
NETWORK = 50e9
EXCHANGE = 20e-6

# One core of a CPU with `tiny` (docs/planning.md), in shares of the FLOP measured in the dry run
# and in multiples of the time of a small operation.
CPU_TRAINING = 0.56
OVERHEADS = dict(layer=600, collective=1800, loaded=5000, round=2800, token=80)


@dataclass(frozen=True)
class Rates:
    """Rates of a rank and, on a CPU, seconds of overheads."""

    training: float  # FLOP, activations kept
    prompts: float  # FLOP of an engine
    reading: float  # bytes
    updating: float
    loading: float
    link: float  # between ranks of an engine
    shards: float  # between ranks that share a copy of the models
    copies: float  # between copies
    layer: float = 0.0  # of a layer in a forward, and twice in a backward
    collective: float = 0.0  # of a layer in the same, and in the weight sync
    loaded: float = 0.0  # of a layer in the weight sync
    round: float = 0.0  # of a round of the engine
    token: float = 0.0  # of a sampled token


def measured_rates(gpu: Gpu) -> dict[str, float]:
    """Return the rates of the parts in bench/gpu.py's table, if it has run on this kind of GPU with
    its own sizes."""
    text = TABLE.read_text() if TABLE.is_file() else ""
    heading, *lines = text.splitlines() or [""]
    if not gpu.is_named(heading) or "| 1721M" not in text:
        return {}
    rates = {}
    for line in lines:
        for part, (size, work) in PARTS.items():
            if line.startswith(f"| {part} | {size} |"):
                milliseconds = float(line.split("|")[4])
                rates[part] = 1e3 * work / milliseconds
    return rates


def generating_seconds(gpu: Gpu) -> float:
    """Return the time of "vLLM: generate" without a measurement."""
    flops, read, tokens = GENERATED
    return flops / (TRAINING * gpu.flops) + read / (READING * gpu.bandwidth) + SAMPLING * tokens


def rates_of_gpu(
    gpu: Gpu, compiles: bool, measured: dict[str, float], shards_in_machine: bool = True,
    copies_in_machine: bool = True,
) -> Rates:  # fmt: skip
    """Return the `measured` rates of a GPU; without them, shares of the published ones. Shards of a
    copy of the models, or all copies, may lie in one machine."""
    rates = {
        "micro-batch": TRAINING * gpu.flops,
        "micro-batch, compiled": COMPILED * gpu.flops,
        "vLLM: generate": 1 / generating_seconds(gpu),
        "clip and AdamW": UPDATING * gpu.bandwidth,
        "vLLM: sync": LOADING,
    } | measured
    faster = rates["vLLM: generate"] * generating_seconds(gpu)
    network = min(gpu.link, NETWORK)
    return Rates(
        training=rates["micro-batch, compiled" if compiles else "micro-batch"],
        prompts=rates["micro-batch"],
        reading=faster * READING * gpu.bandwidth,
        updating=rates["clip and AdamW"],
        loading=rates["vLLM: sync"],
        link=LINK * gpu.link,
        shards=LINK * (gpu.link if shards_in_machine else network),
        copies=LINK * (gpu.link if copies_in_machine else network),
        token=SAMPLING / faster,
    )


def rates_of_cpu(m: Shapes, tokens: int) -> tuple[Rates, str]:
    """Return the rates of this process, and the measured ones as text: FLOP of a float32 product in
    the model's MLP for so many tokens, and small operations of torch."""
    a = torch.randn(min(tokens, 1024), m.hidden)
    b = torch.randn(m.hidden, m.inner)
    x = torch.zeros(64)
    seconds = []
    for timer in (Timer(lambda: a @ b), Timer(lambda: x + x)):
        count = max(1, timer.autorange()[0] // 20)  # of 0.2 s or more
        seconds.append(min(timer.repeat(20, count)) / count)
    product, small = seconds
    flops = 2 * a.numel() * m.inner / product
    training = CPU_TRAINING * flops
    overheads = {name: count * small for name, count in OVERHEADS.items()}
    rates = Rates(training, training, 10e9, 5e9, 5e9, 2e9, 2e9, 2e9, **overheads)
    return rates, f"{flops / 1e9:.0f} GFLOP/s, {1e6 * small:.2f} us per small operation"
