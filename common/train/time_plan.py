"""Time of the phases of a step, for `--dry_run`, from the operations and bytes of a rank and the
rates of its device (docs/planning.md). Times are in seconds, rates per second."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from timeit import Timer

import torch

from common.config.gpu_kinds import Gpu
from common.config.groups import TrainArgs, script_of
from common.model.memory import Plan, Shapes
from common.train.engine_plan import Room

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
# Assumed: other models, kinds and numbers of GPUs against the measurement, lower and upper bound.
SPREAD = (0.7, 1.3)
LENGTHS = (0.5, 1.0)  # assumed: mean length of completions, as a share of the maximum

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


# ---- parts of a step ----


def flops_per_token(m: Shapes, length: float) -> float:
    """Return the operations of one forward per token of sequences of this length, as
    `forward_flops` counts them."""
    weights = matrix_weights(m)
    if m.experts:  # only those of a token
        in_block = m.hidden * (2 * m.queries + 2 * m.keys + 3 * m.inner)
        weights = m.layers * in_block + m.head
    return 2.0 * weights + 2.0 * m.queries * (length + 1) * (m.layers - m.delta_nets)


def matrix_weights(m: Shapes) -> int:
    """Return the weights without an embedding that is not the head too."""
    is_tied = 0 < m.root < 1.5 * m.head
    return m.weights if is_tied else m.weights - m.vocabulary * m.hidden


def pass_seconds(
    m: Shapes, tokens: float, length: float, plan: Plan, rates: Rates, minibatches: int = 1,
    trains: bool = False,
) -> float:  # fmt: skip
    """Return the time of a forward over `tokens` tokens of a rank in sequences of this length or,
    if it `trains`, of forward and backward. Computation overlaps with the traffic of weights and
    gradients, between ranks and, with `--offload all`, between host and GPU."""
    micro_batches = minibatches * math.ceil(tokens / minibatches / plan.pack_tokens)
    times = 1
    traffic = plan.bytes * m.weights
    hosted = 4 * m.trained + plan.frozen * (m.weights - m.trained)
    if trains:
        times = 3 if m.trained > m.weights / 2 else 2  # adapters: without gradients of the others
        times += plan.recompute  # a second forward
        traffic = 2 * traffic + 4 * m.trained
        hosted = 2 * hosted + 4 * m.trained
    compute = times * tokens * flops_per_token(m, length) / rates.training
    traffic *= micro_batches * (plan.ranks - 1) / plan.ranks / rates.shards
    overhead = rates.layer + (rates.collective if plan.ranks > 1 else 0.0)
    hosted *= micro_batches * (plan.offload == "all") / plan.ranks / (LINK * HOST_LINK)
    return max(compute, traffic, hosted) + micro_batches * m.layers * overhead * (
        3 if trains else 1
    )


def update_seconds(m: Shapes, plan: Plan, rates: Rates, copies: int = 1) -> float:
    """Return the time of the average over copies of the models, of clipping and of AdamW."""
    shard = m.trained / plan.ranks
    averaged = 8 * shard * (copies - 1) / copies / rates.copies
    updating = HOST_UPDATING if plan.offload == "all" else rates.updating
    moved = 16 * shard / (LINK * HOST_LINK) if plan.offload == "optimizer" else 0.0
    return averaged + 40 * shard / updating + moved


def sync_seconds(m: Shapes, plan: Plan, rates: Rates) -> float:
    """Return the time in which every engine gets all weights."""
    size = plan.bytes * m.weights
    gathers = 0.0
    if plan.ranks > 1:
        gathers = size / rates.shards + m.layers * rates.collective
    return size / rates.loading + gathers + m.layers * rates.loaded


def exchange_seconds(m: Shapes, tokens: float, room: Room, rates: Rates) -> float:
    """Return the time in which the ranks of an engine add up two tensors per layer."""
    size = 2 * 2 * tokens * m.hidden  # bytes, sent twice
    return 2 * m.layers * (EXCHANGE + size / rates.link) if room.ranks > 1 else 0.0


def sampling_seconds(
    m: Shapes, room: Room, count: float, prompts: float, prompt: float, mean: float, longest: float,
    rates: Rates,
) -> float:  # fmt: skip
    """Return the time in which an engine samples `count` completions of `prompts` prompts, which
    have `prompt` tokens each. Completions have `mean` tokens on average, and one has `longest`. A
    round samples a token of each running completion: it reads weights and cache, or computes,
    whichever takes longer."""

    def round_of(running: float, context: float) -> float:
        # of a mixture of experts, the weights of the running tokens are read
        unused = (1 - min(1.0, flops_per_token(m, 0) / 2 / matrix_weights(m))) ** running
        weights = (1 - unused) * matrix_weights(m) / m.weights * room.weights
        read = (weights + running * room.cached(context)) / rates.reading
        # a token attends to all before it, those of a prompt to half of them on average
        compute = running * flops_per_token(m, 2 * context) / room.ranks / rates.prompts
        exchange = exchange_seconds(m, running, room, rates)
        return max(read, compute) + exchange + rates.round + running * rates.token

    running = max(1.0, min(count, room.running(prompt + mean)))
    prefill = prompts * prompt * flops_per_token(m, prompt) / room.ranks / rates.prompts
    prefill += exchange_seconds(m, prompts * prompt, room, rates)
    rounds = max(count / running, 1.0) * mean
    tail = (longest - mean) * round_of(1.0, prompt + longest)
    return prefill + rounds * round_of(running, prompt + mean / 2) + tail


# ---- a step ----

UNTIMED = ("distill", "self_distill")  # scripts whose samples and teachers vary


@dataclass(frozen=True)
class Launch:
    """A run on its GPUs or CPU cores. Its times have two bounds: 0, the lower one, and 1."""

    args: TrainArgs
    ranks: int
    capacity: float  # bytes of each GPU; 0: a CPU
    plan: Plan  # of a training rank
    models: Sequence[Shapes]
    trained: Sequence[Shapes]
    scorers: Sequence[Shapes]  # models that score the sequences before the update
    prompt: float  # mean tokens of a prompt, or of a sequence without sampling
    shared: float  # mean tokens of a sequence that shared prefixes save
    sequences: int  # of a step
    held_out: int  # prompts, or sequences
    scored_once: int  # sequences that a reference scores before the first step
    room: Room | None  # in an engine, if there is one and it is vLLM
    rates: Rates
    reward: tuple[float, float]  # bounds of the time of a completion's rewards

    @property
    def is_timed(self) -> bool:
        """Whether the time of a step is predicted."""
        has_rollout = self.room is not None or not self.args.samples
        return has_rollout and script_of(type(self.args)).stem not in UNTIMED

    @property
    def trainers(self) -> int:
        """Ranks that train."""
        return self.ranks - self.args.rollout_ranks

    @property
    def is_concurrent(self) -> bool:
        """Whether rollout ranks sample while the others train."""
        return self.args.rollout_ranks > 0 and self.args.max_staleness > 0

    def new_tokens(self, bound: int) -> float:
        """Return the mean length of a completion."""
        if not self.args.samples:
            return 0.0
        mean = self.args.planned.mean if self.args.planned else None
        longest = self.args.max_new_tokens
        return LENGTHS[bound] * longest if mean is None else min(mean, longest)

    def length(self, bound: int) -> float:
        """Return the mean length of a sequence."""
        return self.prompt + self.new_tokens(bound)

    def scoring(self, m: Shapes, bound: int, sequences: float) -> float:
        """Return the time of a forward of `m` over sequences of all training ranks."""
        length = self.length(bound)
        tokens = sequences * (length - self.shared) / self.trainers
        return pass_seconds(m, tokens, length, self.plan, self.rates, self.args.minibatches)

    def sampling(self, bound: int, count: float, prompts: float) -> float:
        """Return the time in which the engines sample `count` completions."""
        shares = (count / self.room.engines, prompts / self.room.engines)
        lengths = (self.prompt, self.new_tokens(bound), self.args.max_new_tokens)
        return sampling_seconds(self.trained[0], self.room, *shares, *lengths, self.rates)

    def updating(self, bound: int) -> float:
        """Return the time of the updates of a step."""
        args = self.args
        length = self.length(bound)
        tokens = self.sequences * (length - self.shared) / self.trainers
        setting = (self.plan, self.rates, args.minibatches)
        copies = self.trainers // self.plan.ranks
        seconds = 0.0
        for m in self.trained:
            seconds += pass_seconds(m, tokens, length, *setting, trains=True)
            seconds += args.minibatches * update_seconds(m, self.plan, self.rates, copies)
        return getattr(args, "epochs_per_rollout", 1) * seconds

    def phases(self, bound: int) -> dict[str, float]:
        """Return a bound of the time of each phase of a step, of an evaluation, and of the
        reference's pass before the first step."""
        args = self.args
        policy = self.trained[0]
        phases = {
            "log-probs": sum(self.scoring(m, bound, self.sequences) for m in self.scorers),
            "update": self.updating(bound),
            "reference": self.scoring(policy, bound, self.scored_once),
        }
        if args.samples and self.room is not None:
            phases["sync"] = sync_seconds(policy, self.plan, self.rates)
            phases["rollout"] = self.sampling(bound, self.sequences, args.rows_per_step)
            evaluation = self.sampling(bound, self.held_out, self.held_out)
            phases["evaluation"] = evaluation + phases["sync"]
        elif not args.samples:
            phases["evaluation"] = self.scoring(policy, bound, self.held_out)
        phases = {name: SPREAD[bound] * seconds for name, seconds in phases.items()}
        return phases | dict(rewards=self.reward[bound] * self.sequences / self.trainers)

    def critical(self, bound: int) -> list[str]:
        """Return the phases that add up to the time of a step. Rewards are computed during the
        rollout; rollout ranks sample while the others train."""
        phases = self.phases(bound)
        training = ["log-probs", "update"]
        sampling = [max("rollout", "rewards", key=lambda name: phases.get(name, 0.0))]
        if not self.is_concurrent:
            return [*sampling, *training, "sync"]
        groups = (training, sampling)
        return [*max(groups, key=lambda names: sum(phases.get(x, 0.0) for x in names)), "sync"]

    def step(self, bound: int) -> float:
        """Return a bound of the time of a step."""
        phases = self.phases(bound)
        return sum(phases.get(name, 0.0) for name in self.critical(bound))
