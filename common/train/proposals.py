"""Flags with which a launch fits or a step is faster, for `--dry_run`. A proposal is a launch of
its own: its flags are valid together, it fits, and its time is predicted in the same way."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from common.config.groups import TrainArgs, check_ranks
from common.model.capacity import GIB
from common.model.memory import Shapes, on_the_host
from common.train import plan
from common.train.launch_plan import Setting, lack, make_launch, span
from common.train.time_plan import Launch

Flags = dict[str, object]
WORTH = 0.97  # of the time: a change that saves less is not proposed
RESERVE = 1.5 * GIB  # assumed: activations and graphs of vLLM in a proposed engine


@dataclass(frozen=True)
class Proposal:
    """Flags to change, and the launch with them."""

    flags: Flags
    launch: Launch
    lack: float  # bytes

    @cached_property
    def seconds(self) -> float:
        """Mean bound of the time of a step."""
        return (self.launch.step(0) + self.launch.step(1)) / 2

    @property
    def cost(self) -> tuple[float, float]:
        return self.lack, self.seconds


def proposals(launch: Launch, setting: Setting) -> Iterator[str]:
    """Yield lines with the best value of each flag that makes a step faster, and with the best
    combination; for a launch that does not fit, those with which it fits."""
    own = Proposal({}, launch, lack(launch, setting))
    if not own.lack and not launch.is_timed:
        return
    single = [x for x in best_of_each(own, setting) if not x.lack]
    single.sort(key=lambda x: x.seconds)
    together = descend(own, setting)
    least = single[0].seconds if single else math.inf
    if len(together.flags) > 1 and not together.lack and together.seconds < WORTH * least:
        single.insert(0, together)
    if own.lack:
        single += [x for x in last_resorts(own, setting) if not x.lack]
        if not single:
            yield "no flags make it fit: take a smaller model"
    for proposal in single:
        yield describe(proposal, own)


def best_of_each(present: Proposal, setting: Setting) -> Iterator[Proposal]:
    """Yield the best value of each flag, if it is better than the present one."""
    for values in changes(present):
        found = chain.from_iterable(tried(present, change, setting) for change in values)
        best = min(found, key=lambda x: x.cost, default=present)
        if is_better(best, present):
            yield best


def descend(present: Proposal, setting: Setting) -> Proposal:
    """Change the flag that helps most, until none helps."""
    while True:
        found = [*best_of_each(present, setting)]
        if not found:
            return present
        present = min(found, key=lambda x: x.cost)


def is_better(one: Proposal, other: Proposal) -> bool:
    if one.lack or other.lack:
        return one.lack < other.lack
    return one.seconds < WORTH * other.seconds


def tried(present: Proposal, change: Flags, setting: Setting) -> Iterator[Proposal]:
    """Yield the launch with changed flags, if they are valid and no prompt is too long for them."""
    with suppress(ValueError):  # flags that contradict each other
        args = replace(present.launch.args, **change)
        ranks, *_ = plan.launch(args)
        check_ranks(args, ranks)
        if is_long_enough(args, present.launch.args, setting.longest):
            launch, _ = make_launch(args, setting)
            reserve = RESERVE if launch.room != present.launch.room else 0.0
            yield Proposal(present.flags | change, launch, lack(launch, setting, reserve))


def is_long_enough(args: TrainArgs, before: TrainArgs, longest: int) -> bool:
    """Return whether a pack has room for the longest prompt and its completions. Those of `before`
    have it."""
    if not args.samples or args.pack_capacity >= before.pack_capacity:
        return True  # without samples, --max_length is checked
    if args.has_turns:
        return False  # the length of an episode is not known
    return args.sequences_together * (longest + args.max_new_tokens) <= args.pack_capacity


def changes(present: Proposal) -> Iterator[list[Flags]]:
    """Yield for each flag the values to try. They change neither the objective nor the number of
    GPUs."""
    launch = present.launch
    machine = plan.ranks_of_a_machine(launch.args)
    packs = [2**n for n in range(10 if present.lack else 12, 18)]
    yield [dict(pack_tokens=tokens) for tokens in packs]
    yield [dict(compile=True)]
    yield [dict(activation_checkpointing=value) for value in (False, True)]
    yield [dict(offload=value) for value in ("none", "optimizer", "all")]
    shards = (machine * 2**n for n in range(1, 11))
    yield [dict(shard_ranks=count) for count in shards if count <= launch.ranks]
    if launch.room is None:
        return
    parallel = [n for n in (1, 2, 4, 8) if n <= machine]
    yield [dict(tensor_parallel_size=n) for n in parallel]
    yield [dict(gpu_memory_utilization=step / 20) for step in range(2, 19)]
    stride = max(1, launch.ranks // 16)
    yield [dict(rollout_ranks=count) for count in range(0, launch.ranks, stride)]


def last_resorts(own: Proposal, setting: Setting) -> Iterator[Proposal]:
    """Yield adapters and more GPUs, for a launch that does not fit, with further flags."""
    if all(m.trained in (0, m.weights) for m in setting.models):
        models = [m for m in setting.models if m.trained]
        frozen = [m for m in setting.models if not m.trained]
        others = frozen[: len(setting.frozen)]
        pairs = zip(others, setting.frozen, strict=True)
        models += [m for m, path in pairs if path != setting.path]  # that one has its weights
        models += frozen[len(others) :]
        adapted = replace(setting, models=[_with_adapters(m) for m in models])
        for adapters in tried(own, dict(lora_rank=16), adapted):
            yield descend(adapters, adapted) if adapters.lack else adapters
    planned = own.launch.args.planned
    for factor in (2, 4, 8, 16, 32) if planned else ():
        more = dict(dry_run=planned.times(factor))
        found = [*tried(own, more, setting)]
        found += tried(own, more | dict(shard_ranks=planned.ranks * factor), setting)
        found += [descend(x, setting) for x in found if x.lack]
        fitting = [x for x in found if not x.lack]
        yield from fitting[:1]
        if any(x.flags.keys() <= {"dry_run", "shard_ranks"} for x in fitting):
            return  # no further flags


def _with_adapters(m: Shapes) -> Shapes:
    """Return the shapes with adapters, about a hundredth of the weights, as the trained weights."""
    return replace(
        m, trained=m.trained // 100, block_trained=m.block_trained // 100, root_trained=0
    )


def describe(proposal: Proposal, own: Proposal) -> str:
    """Return the line of a proposal."""
    launch = proposal.launch
    flags = dict(proposal.flags)
    gpus = flags.pop("dry_run", None)
    words = [f"--{flag} {text(value)}" for flag, value in flags.items()]
    words += [f"on {gpus}"] if gpus else []
    notes = []
    room = launch.room
    if room is not None and room != own.launch.room:
        running = min(room.completions, room.running(launch.length(1)))
        notes.append(f"{room.engines * running:,g} of {launch.sequences:,} completions at a time")
    if launch.is_concurrent and not own.launch.is_concurrent:
        steps = launch.args.max_staleness
        notes.append(f"samples up to {steps} step{'s' * (steps > 1)} old")
    if launch.plan.offload != "none":
        size = on_the_host(launch.models, launch.plan) / GIB
        notes.append(f"{size:.1f} GiB on the host for each rank")
    if "lora_rank" in flags:
        notes.append("trains adapters alone: docs/lora.md")
    noted = f" ({'; '.join(notes)})" if notes else ""
    kind = "fits" if own.lack else "faster"
    if not launch.is_timed:
        return f"{kind}: {' '.join(words)}{noted}"
    part = "" if own.lack else f", {proposal.seconds / own.seconds:.0%} of now"
    return f"{kind}: {' '.join(words)}: {span(launch.step(0), launch.step(1))} a step{part}{noted}"


def text(value: object) -> str:
    """Return a value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
