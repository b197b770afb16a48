"""Time of the phases of a step, for `--dry_run`, from the operations and bytes of a rank and the
rates of its device (rates.py, docs/planning.md). Times are in seconds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.config.groups import TrainArgs, script_of
from common.model.memory import Plan, Shapes
from common.train.engine_plan import Room
from common.train.rates import EXCHANGE, HOST_LINK, HOST_UPDATING, LINK, Rates

# Assumed: other models, kinds and numbers of GPUs against the measurement, lower and upper bound.
SPREAD = (0.7, 1.3)
LENGTHS = (0.5, 1.0)  # assumed: mean length of completions, as a share of the maximum


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
    m: Shapes, tokens: float, length: float, plan: Plan, rates: Rates, micro_batches: int,
    trains: bool = False,
) -> float:  # fmt: skip
    """Return the time of a forward over `tokens` tokens of a rank, in sequences of this length and
    in so many micro-batches, or, if it `trains`, of forward and backward. Computation overlaps with
    the traffic of weights and gradients, between ranks and, with `--offload all`, between host and
    GPU."""
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
    context = prompt + mean / 2
    if mean < longest:  # a new completion begins where another one ends
        sampling = max(count / running, 1.0) * round_of(running, context)
    else:  # all end together
        waves, others = divmod(max(count, running), running)
        sampling = waves * round_of(running, context) + (others > 0) * round_of(others, context)
    tail = (longest - mean) * round_of(1.0, prompt + longest)
    return prefill + mean * sampling + tail


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
    shared: float  # mean tokens of a sequence that it shares with others of its group
    each: int  # sequences of a group
    sequences: int  # of a step
    held_out: int  # prompts, or sequences
    scored_once: int  # sequences that a reference scores before the first step
    room: Room | None  # in an engine, if there is one and it is vLLM
    rates: Rates
    reward: float  # seconds of a completion's rewards

    @property
    def script(self) -> str:
        return script_of(type(self.args)).stem

    @property
    def is_timed(self) -> bool:
        """Whether the time of a step is predicted."""
        has_rollout = self.room is not None or not self.args.samples
        return has_rollout and self.script not in UNTIMED

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
        return LENGTHS[bound] * self.args.max_new_tokens if mean is None else mean

    def length(self, bound: int) -> float:
        """Return the mean length of a sequence."""
        return self.prompt + self.new_tokens(bound)

    def packed(self, bound: int, sequences: float) -> tuple[float, int]:
        """Return the tokens that a training rank computes of sequences of all ranks, and its
        micro-batches. A pack has whole sequences; those of a group share a prefix."""
        args = self.args
        prefix = self.shared
        own = self.length(bound) - prefix
        together = max(1, int((args.pack_capacity - prefix) / own))
        tokens = sequences * (own + prefix / min(together, self.each)) / self.trainers
        packs = sequences * args.context_ranks / self.trainers / args.minibatches / together
        return tokens, args.minibatches * math.ceil(packs)

    def scoring(self, m: Shapes, bound: int, sequences: float) -> float:
        """Return the time of a forward of `m` over sequences of all training ranks."""
        tokens, micro_batches = self.packed(bound, sequences)
        return pass_seconds(m, tokens, self.length(bound), self.plan, self.rates, micro_batches)

    def sampling(self, bound: int, count: float, prompts: float) -> float:
        """Return the time in which the engines sample `count` completions."""
        shares = (count / self.room.engines, prompts / self.room.engines)
        lengths = (self.prompt, self.new_tokens(bound), self.args.max_new_tokens)
        return sampling_seconds(self.trained[0], self.room, *shares, *lengths, self.rates)

    def updating(self, bound: int) -> float:
        """Return the time of the updates of a step."""
        args = self.args
        tokens, micro_batches = self.packed(bound, self.sequences)
        setting = (self.plan, self.rates, micro_batches)
        copies = self.trainers // self.plan.ranks
        seconds = 0.0
        for m in self.trained:
            seconds += pass_seconds(m, tokens, self.length(bound), *setting, trains=True)
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
            "rewards": self.reward * self.sequences / self.trainers,
        }
        if args.samples and self.room is not None:
            phases["sync"] = sync_seconds(policy, self.plan, self.rates)
            phases["rollout"] = self.sampling(bound, self.sequences, args.rows_per_step)
            evaluation = self.sampling(bound, self.held_out, self.held_out)
            phases["evaluation"] = evaluation + phases["sync"]
        elif not args.samples:
            phases["evaluation"] = self.scoring(policy, bound, self.held_out)
        return {name: SPREAD[bound] * seconds for name, seconds in phases.items()}

    def critical(self, phases: dict[str, float]) -> list[str]:
        """Return the `phases` that add up to the time of a step. Rewards are computed during the
        rollout; rollout ranks sample while the others train."""
        training = ["log-probs", "update"]
        sampling = [max("rollout", "rewards", key=lambda name: phases.get(name, 0.0))]
        if not self.is_concurrent:
            return [*sampling, *training, "sync"]
        groups = (training, sampling)
        return [*max(groups, key=lambda names: sum(phases.get(x, 0.0) for x in names)), "sync"]

    def step(self, bound: int) -> float:
        """Return a bound of the time of a step."""
        phases = self.phases(bound)
        return sum(phases.get(name, 0.0) for name in self.critical(phases))
