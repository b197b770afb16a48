"""Capacity and time of a launch, as lines of `--dry_run` (docs/planning.md)."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch

from common.config.gpu_kinds import kind_of
from common.config.groups import TrainArgs, script_of
from common.config.sampling import MODEL_KINDS, SLOTS
from common.data.packing import shape_of
from common.data.sample import Sample
from common.model import capacity
from common.model.capacity import GIB
from common.model.loading import load_text_config
from common.model.memory import Shapes, predict
from common.model.policy import compute_dtype
from common.objectives.preference import REFERENCE_FREE
from common.train import plan
from common.train.engine_plan import Room, make_room
from common.train.rates import TABLE, Rates, measured_rates, rates_of_cpu, rates_of_gpu
from common.train.time_plan import SPREAD, UNTIMED, Launch

IN_PROCESSES = ("math", "code", "code_fraction", "by_row")  # rewards, beside those of users


@dataclass(frozen=True, eq=False)  # hashed by identity, for `first_step`
class Setting:
    """Run without its flags and its GPUs."""

    models: Sequence[Shapes]  # from `plan.shapes`
    path: str | None  # of the policy
    frozen: Sequence[str]  # paths of frozen policies
    has_value: bool  # whether a value model is trained beside the policy
    groups: Sequence[Sequence[Sample]]  # of the first step, like those of all steps
    longest: int  # tokens of a prompt, if completions are sampled
    rows: int  # for training; 0: streamed
    held_out: int  # rows
    reward: float  # seconds of a completion's rewards

    @cached_property
    def config(self) -> Any:
        """The policy's configuration."""
        return load_text_config(self.path)


def make_launch(args: TrainArgs, setting: Setting) -> tuple[Launch, str]:
    """Return the launch of a run, and a line that names the sources of its rates."""
    ranks, device, size = plan.launch(args)
    mean = args.planned.mean if args.planned else None
    if mean and not args.samples:
        raise ValueError(f"--dry_run {args.dry_run}: this script samples no completions; omit @")
    if mean and mean > args.max_new_tokens:
        raise ValueError(f"--dry_run {args.dry_run}: --max_new_tokens is {args.max_new_tokens}")
    dtype = compute_dtype(args, device)
    models = setting.models
    training_plan = plan.training_plan(args, models)
    prompt, shared = first_step(setting, args.share_prefix)
    each = len(setting.groups[0])
    if args.samples:
        each = args.samples_per_prompt
        shared = prompt if 0 < args.share_prefix <= prompt else 0.0
    room = None
    if args.samples and capacity.uses_vllm(args):
        sizes = (ranks, dtype.itemsize, size, round(prompt))
        room = make_room(models[0], setting.config, args, *sizes)
    count = args.rows_per_step * each
    if device.type == "cuda":
        rates, source = gpu_rates(args, size, training_plan)
    else:
        tokens = max(1, int(count * prompt / (ranks - args.rollout_ranks)))
        rates, measured = rates_of_cpu(models[0], tokens)
        source = f"this CPU: {measured}, measured; overheads of docs/planning.md"
    if args.samples:
        source += "; rewards measured here on ten rows"
    once = each * (setting.rows + setting.held_out) if scores_once(args) else 0
    held_out = setting.held_out * (1 if args.samples else each)
    trained = trained_in(setting)
    return Launch(
        args, ranks, size, training_plan, models, trained, scorers_of(args, setting), prompt,
        shared, each, count, held_out, once, room, rates, setting.reward,
    ), f"rates: {source}"  # fmt: skip


@cache  # for all proposals
def first_step(setting: Setting, share_prefix: int) -> tuple[float, float]:
    """Return the mean tokens of a sequence of the first step, and those that it shares with another
    one of its group."""
    groups = setting.groups
    sequences = len(groups) * len(groups[0])
    length = sum(len(sample.ids) for sample in chain(*groups)) / sequences
    shared = chain(*(shape_of(group, share_prefix).shared for group in groups))
    return length, sum(shared) / max(1, sequences - len(groups))


def gpu_rates(args: TrainArgs, size: int, training_plan) -> tuple[Rates, str]:
    """Return the rates of a GPU with `size` bytes and their sources."""
    name = args.planned.name if args.planned else torch.cuda.get_device_name()
    gpu = kind_of(name, size)
    measured = measured_rates(gpu)
    ranks, *_ = plan.launch(args)
    machine = plan.ranks_of_a_machine(args)
    in_machine = (machine % training_plan.ranks == 0, ranks <= machine)
    rates = rates_of_gpu(gpu, args.compile, measured, *in_machine)
    is_known = gpu.is_named(name) and abs(size / gpu.size - 1) < 0.15
    assumed = "" if is_known else ", assumed by its memory (name a kind: --dry_run 8xA100)"
    published = f"{gpu.flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e9:,.0f} GB/s published"
    shares = "shares of them measured on one GPU with 1.7B (docs/planning.md)"
    source = f"{gpu.name}{assumed}: {published}; {shares}"
    if measured:
        source += f"; {TABLE} has {' and '.join(map(repr, measured))}"
    return rates, source


def trained_in(setting: Setting) -> list[Shapes]:
    """Return the shapes of the trained models."""
    return [m for m in setting.models if m.trained]


def scorers_of(args: TrainArgs, setting: Setting) -> list[Shapes]:
    """Return the models that score the sequences of a step before its update."""
    policy, *others = trained_in(setting)
    scorers = [*others, *(m for m in setting.models if not m.trained)]
    if args.lora_rank:  # the policy without adapters takes no memory, but time
        scorers += [policy] * list(setting.frozen).count(setting.path)
    return [*scorers, policy] if scores_itself(args, setting) else scorers


def scores_itself(args: TrainArgs, setting: Setting) -> bool:
    """Return whether the policy scores its samples before the update, as each script decides."""
    script = script_of(type(args)).stem
    if not args.samples or script == "online_dpo":
        return False
    if script == "bok":
        return bool(setting.frozen)
    if getattr(args, "old_logprobs", "trainer") == "engine":
        return False
    updates = args.minibatches * getattr(args, "epochs_per_rollout", 1)
    needs = updates > 1 or setting.has_value or getattr(args, "correction_normalize", False)
    by_entropy = getattr(args, "top_entropy", 1) < 1
    with_penalty = script in ("rloo", "reinforce") and bool(setting.frozen)
    return needs or by_entropy or with_penalty


def scores_once(args: TrainArgs) -> bool:
    """Return whether a reference scores all rows before the first step."""
    losses = getattr(args, "loss", ())
    needs_none = isinstance(losses, tuple) and set(losses) <= REFERENCE_FREE
    return getattr(args, "reference_logprobs", None) == "stored" and not needs_none


# ---- whether it fits ----


def lack(launch: Launch, setting: Setting, reserve: float = 0.0) -> float:
    """Return the bytes that a GPU lacks: 0 if the run fits and vLLM starts, with `reserve` bytes
    for vLLM's activations."""
    if not launch.capacity:
        return 0.0
    usable = capacity.USABLE * launch.capacity
    missing = max(0.0, sum(predict(launch.models, launch.plan).values()) - usable)
    room = launch.room
    if room is not None:
        # vLLM does not start without room for a sequence of the longest length
        needed = room.weights + room.cached(context_of(launch.args, setting)) + reserve
        missing += max(0.0, needed - room.memory)
    return missing


def context_of(args: TrainArgs, setting: Setting) -> int:
    """Return the maximum length of a sequence in the engine."""
    longest = args.pack_capacity + 1
    return min(getattr(setting.config, "max_position_embeddings", longest), longest)


def problem(launch: Launch, setting: Setting) -> str | None:
    """Return the reason why a run does not fit or vLLM does not start, if so."""
    if not lack(launch, setting):
        return None
    missing = capacity.refusal(launch.models, launch.plan, launch.capacity)
    if missing:
        return missing
    room = launch.room
    if not room.cache:
        sizes = f"{room.weights / GIB:.1f} GiB of weights do not fit in the engine's"
        return f"{sizes} {room.memory / GIB:.1f} GiB per GPU"
    context = context_of(launch.args, setting)
    return (
        f"the engine's cache of {room.cache / GIB:.1f} GiB per GPU does not hold a sequence of"
        f" {context} tokens, {room.cached(context) / GIB:.1f} GiB"
    )


# ---- lines ----


def describe_all(args: TrainArgs, setting: Setting, steps: int) -> tuple[list[str], str | None]:
    """Return lines about the launch of a run of so many steps, and the reason why it does not fit,
    if so."""
    from common.train.proposals import proposals

    launch, rates = make_launch(args, setting)
    why = problem(launch, setting)
    better = proposals(launch, setting) if launch.capacity else ()
    return [*describe(launch, steps, why is None), *better, rates], why


def describe(launch: Launch, steps: int, fits: bool) -> Iterator[str]:
    """Yield lines about the capacity of a run of so many steps and, if it `fits`, its time."""
    args = launch.args
    if args.samples:
        yield from describe_cores(args, launch.trainers)
        if launch.room is None:
            yield "engine transformers: its memory and the time of rollouts are not predicted"
        elif launch.capacity:
            yield from describe_room(launch, launch.room)
    if launch.script in UNTIMED:
        yield f"the time of {launch.script}.py is not predicted"
    elif fits:
        yield from describe_time(launch, steps)


def describe_time(launch: Launch, steps: int) -> Iterator[str]:
    """Yield lines about the time of a step and of a run of so many steps."""
    args = launch.args
    phases = [launch.phases(0), launch.phases(1)]
    without = " without its rollout" if args.samples and launch.room is None else ""
    bounds = [launch.step(0), launch.step(1)]
    yield f"time of a step{without}: {span(*bounds)}: {describe_phases(launch)}"
    yield f"assumed: {describe_bounds(launch)}"
    if without:
        return
    count = plan.evaluations(args, steps)
    evaluation = [x["evaluation"] for x in phases]
    reference = [x["reference"] for x in phases]
    run = [steps * bounds[i] + count * evaluation[i] + reference[i] for i in (0, 1)]
    parts = [f"{steps} steps", "no evaluations"]
    if count:
        first = ", one before the first step" if args.samples else ""
        parts[1] = f"{count} evaluation{'s' * (count != 1)} of {span(*evaluation)}{first}"
    if reference[1]:
        parts.insert(0, f"the reference scores all rows once, {span(*reference)}")
    gpu_hours = [launch.ranks * seconds / 3600 for seconds in run]
    has_hours = launch.capacity and gpu_hours[1] >= 0.1
    hours = f", {numbers(*gpu_hours)} GPU-hours" if has_hours else ""
    yield f"time of the run: {span(*run)}{hours}: {'; '.join(parts)}; without start and saves"


def describe_phases(launch: Launch) -> str:
    """Return the times of the phases of a step, the longest first, with their shares of its upper
    bound, and of those at the same time."""
    low = launch.phases(0)
    high = launch.phases(1)
    critical = launch.critical(high)
    names = [name for name in high if high[name] and name not in ("evaluation", "reference")]
    names.sort(key=lambda name: -high[name])
    step = launch.step(1)
    listed = []
    others = []
    for name in names:
        share = high[name] / step
        shown = f" ({share:.0%})" if name in critical and 0.05 <= share < 1 else ""
        text = f"{name} {span(low[name], high[name])}{shown}"
        (listed if name in critical else others).append(text)
    beside = f"; at the same time {', '.join(others)}" if others else ""
    return ", ".join(listed) + beside


def describe_bounds(launch: Launch) -> str:
    """Return the assumptions of the lower and the upper bound."""
    factors = "{} and {} times the computed times".format(*SPREAD)
    if not launch.args.samples:
        return factors
    low, high = (f"{launch.new_tokens(bound):,.0f}" for bound in (0, 1))
    if low == high:
        longest = f"the longest {launch.args.max_new_tokens:,}"
        return f"{factors}; completions of {low} tokens on average, {longest}"
    known = "if you know their mean, give it: --dry_run 8xH100@900"
    return f"{factors}; completions of {low} and {high} tokens on average ({known})"


def numbers(low: float, high: float) -> str:
    """Return a range of numbers with two digits each."""
    return " to ".join(f"{float(f'{x:.2g}'):,g}" for x in (low, high))


def span(low: float, high: float) -> str:
    """Return a range of seconds as text, in the unit of its end."""
    units = ((172_800, 86_400, "days"), (7_200, 3_600, "hours"), (120, 60, "min"), (1, 1, "s"))
    size, unit = next(((size, unit) for least, size, unit in units if high >= least), (1e-3, "ms"))
    return f"{numbers(low / size, high / size)} {unit}"


def describe_cores(args: TrainArgs, ranks: int) -> Iterator[str]:
    """Yield lines about the processes of rewards and episodes on a machine, with its part of the
    ranks that train, and, if the launch is on this machine, its cores."""
    cores = os.cpu_count() or 1
    here = "" if args.planned else f"; this machine has {cores} cores"
    users = [name for name in args.reward if ":" in name and not name.startswith(MODEL_KINDS)]
    rewards = [*users, *(name for name in args.reward if name in IN_PROCESSES)]
    if rewards:
        each = args.reward_workers * len(rewards)
        ranks = min(plan.ranks_of_a_machine(args), ranks)
        is_short = each * ranks > cores and not args.planned
        label = "warning: cores" if is_short else "cores"
        rank = f"{each} processes per rank (--reward_workers) for {', '.join(rewards)}"
        trainers = f"the {ranks} training ranks" if ranks > 1 else "the training rank"
        yield f"{label}: {rank}, {each * ranks} for {trainers} of a machine{here}"
    if args.has_turns:
        yield f"cores: a process for each running episode with tools or code of yours{here}"


def describe_room(launch: Launch, room: Room) -> Iterator[str]:
    """Yield lines about an engine and its cache."""
    beside = "on rollout ranks" if launch.args.rollout_ranks else "beside the trainer"
    parts = f"weights {room.weights / GIB:.1f}, cache at most {room.cache / GIB:.1f}"
    engines = f"{room.engines} engine{'s' * (room.engines > 1)}"
    engines += f" of {room.ranks} GPU{'s' * (room.ranks > 1)} {beside}"
    yield f"memory of an engine per GPU: {room.memory / GIB:.1f} GiB ({parts}); {engines}"
    if not room.cache:
        yield f"cache of an engine: none, the weights take {room.weights / GIB:.1f} GiB"
        return
    length = launch.length(1)
    each = f"if each has {length:,.0f} tokens"
    places = room.running(length)
    running = f"all {room.completions:.4g} completions of a step run at a time, {each}"
    if not places:
        running = f"not one completion, {each}"
    elif room.completions > places:
        limit = "the cache is the limit" if places < SLOTS else "the engine has no more places"
        count = f"{places} of its {room.completions:.4g} completions of a step"
        everywhere = f"{places * room.engines:,} of {launch.sequences:,} on all engines"
        running = f"{count} run at a time, {each} ({limit}); {everywhere}"
        running = running if room.engines > 1 else running.partition("; ")[0]
    yield f"cache of an engine: at most {room.tokens:,} tokens; {running}"
