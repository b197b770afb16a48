"""Capacity and time of a launch, as lines of `--dry_run` (docs/planning.md)."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from common.config.gpu_kinds import kind_of
from common.config.groups import TrainArgs
from common.config.online import MODEL_KINDS
from common.data.sample import Sample
from common.model import capacity
from common.model.capacity import GIB
from common.model.hub import context_length
from common.model.loading import load_text_config
from common.model.memory import Shapes
from common.model.policy import compute_dtype
from common.train import engine_plan, plan, time_plan
from common.train.engine_plan import Room
from common.train.time_plan import LENGTHS, SPREAD, Launch

IN_PROCESSES = ("math", "code", "code_fraction", "by_row")  # rewards, beside those of users
PHASES = ("rollout", "rewards", "log-probs", "update", "sync")


def make_launch(
    args: TrainArgs, models: Sequence[Shapes], path: str | None, frozen: Sequence[str],
    groups: Sequence[Sequence[Sample]], held_out: int, reward: tuple[float, float],
) -> tuple[Launch, str]:  # fmt: skip
    """Return the launch of `models` from `plan.shapes`, with `path` and `frozen` as there, whose
    steps are like the first one, `groups`; and a line that names the sources of its rates."""
    ranks, device, size = plan.launch(args)
    dtype = compute_dtype(args, device)
    trainers = ranks - args.rollout_ranks
    prompt = sum(len(sample.ids) for sample in chain(*groups)) / len(groups) / len(groups[0])
    each = args.samples_per_prompt if args.samples else len(groups[0])
    trained = [m for m in models if m.trained]
    scorers = [*trained[1:], *(m for m in models if not m.trained)]
    if args.lora_rank:  # the policy without adapters takes no memory, but time
        scorers += [models[0]] * list(frozen).count(path)
    updates = args.minibatches * getattr(args, "epochs_per_rollout", 1)
    reads_engine = getattr(args, "old_logprobs", "trainer") == "engine"
    if args.samples and not reads_engine and (updates > 1 or len(trained) > 1):
        scorers.append(models[0])
    room = None
    no_vllm = not args.planned and importlib.util.find_spec("vllm") is None
    if args.samples and args.engine != "transformers" and not no_vllm:
        config = load_text_config(path)
        sizes = (ranks, dtype.itemsize, size, round(prompt))
        room = engine_plan.make_room(models[0], config, args, *sizes)
    count = args.rows_per_step * each
    if device.type == "cuda":
        name = args.planned[2] if args.planned else torch.cuda.get_device_name()
        gpu = kind_of(name, size)
        measured = time_plan.measured_rates(gpu)
        rates = time_plan.rates_of_gpu(gpu, args.compile, measured)
        is_known = gpu.is_named(name) and abs(size / gpu.size - 1) < 0.15
        assumed = "" if is_known else ", assumed by its memory (such as --dry_run 8xA100)"
        published = f"{gpu.flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e9:,.0f} GB/s published"
        shares = "shares of them measured on one GPU with 1.7B (docs/planning.md)"
        source = f"{gpu.name}{assumed}: {published}; {shares}"
        if measured:
            source += f"; {time_plan.TABLE} has {' and '.join(map(repr, measured))}"
    else:
        rates, measured = time_plan.rates_of_cpu(models[0], int(count * prompt / trainers))
        source = f"this CPU: {measured}, measured; overheads of docs/planning.md"
    launch = Launch(
        args, ranks, size, plan.training_plan(args, models), models, trained, scorers,
        prompt, count, held_out * (1 if args.samples else each), room, rates, reward,
    )  # fmt: skip
    if args.samples:
        source += "; rewards measured here on ten rows"
    return launch, f"rates: {source}"


def problem(launch: Launch, path: str | None) -> str | None:
    """Return the reason why vLLM does not start, if so."""
    if launch.room is None or not launch.capacity:
        return None
    context = context_length(path, launch.args)
    size = launch.plan.bytes
    needed = engine_plan.bytes_in_cache(load_text_config(path), context, size, launch.room.ranks)
    if needed <= launch.room.cache:
        return None
    return (
        f"the engine's cache of {launch.room.cache / GIB:.1f} GiB per GPU does not hold a sequence"
        f" of {context} tokens, {needed / GIB:.1f} GiB; raise --gpu_memory_utilization or"
        " --tensor_parallel_size, or lower --pack_tokens"
    )


def describe(launch: Launch, steps: int) -> Iterator[str]:
    """Yield lines about the capacity and the time of a run of so many steps."""
    args = launch.args
    if args.samples:
        yield from describe_cores(args, launch.ranks - args.rollout_ranks)
        if launch.room is None:
            yield "engine transformers: its memory and the time of rollouts are not predicted"
        elif launch.capacity:
            yield from describe_room(launch, launch.room)
    phases = [launch.phases(0), launch.phases(1)]
    listed = [f"{n} {span(*(x[n] for x in phases))}" for n in PHASES if phases[1].get(n)]
    bounds = [launch.step(0), launch.step(1)]
    without = " without its rollout" if args.samples and launch.room is None else ""
    yield f"time of a step{without}: {span(*bounds)} ({', '.join(listed)})"
    lengths = f"; completions of {LENGTHS[0]:.0%} to {LENGTHS[1]:.0%} of --max_new_tokens"
    spread = f"{SPREAD[0]} to {SPREAD[1]} times the time, for other models, kinds and several GPUs"
    yield f"assumed: {spread}{lengths if args.samples else ''}"
    if without:
        return
    count = plan.evaluations(args, steps)
    evaluation = [x["evaluation"] for x in phases]
    run = [steps * bounds[i] + count * evaluation[i] for i in (0, 1)]
    first = " (one before the first step)" if args.samples else ""
    evaluations = f"{count} evaluation{'s' * (count != 1)}{first} of {span(*evaluation)}"
    evaluations = evaluations if count else "no evaluations"
    yield f"time of the run: {span(*run)}: {steps} steps, {evaluations}; without start and saves"


def span(low: float, high: float) -> str:
    """Return a range of seconds as text, in the unit of its end."""
    units = ((172_800, 86_400, "days"), (7_200, 3_600, "hours"), (120, 60, "min"), (1, 1, "s"))
    size, unit = next(((size, unit) for least, size, unit in units if high >= least), (1e-3, "ms"))
    ends = [f"{float(f'{x / size:.2g}'):g}" for x in (low, high)]
    return f"{' to '.join(ends)} {unit}"


def describe_cores(args: TrainArgs, ranks: int) -> Iterator[str]:
    """Yield lines about the processes of rewards and episodes on a machine, with at most 8 of the
    ranks that train, and the cores of this one."""
    here = f"this machine has {os.cpu_count()} cores"
    users = [name for name in args.reward if ":" in name and not name.startswith(MODEL_KINDS)]
    rewards = [*users, *(name for name in args.reward if name in IN_PROCESSES)]
    if rewards:
        each = args.reward_workers * len(rewards)
        ranks = min(8, ranks)
        label = "warning: cores" if each * ranks > (os.cpu_count() or 1) else "cores"
        rank = f"{each} processes per rank (--reward_workers) for {', '.join(rewards)}"
        yield f"{label}: {rank}, {each * ranks} on a machine of {ranks} ranks; {here}"
    if args.has_turns:
        yield f"cores: a process for each running episode with tools or code of yours; {here}"


def describe_room(launch: Launch, room: Room) -> Iterator[str]:
    """Yield lines about an engine and its cache, and flags that serve better."""
    beside = "on rollout ranks" if launch.args.rollout_ranks else "beside the trainer"
    parts = f"weights {room.weights / GIB:.1f}, cache at most {room.cache / GIB:.1f}"
    engines = f"{room.engines} x {room.ranks} GPU{'s' * (room.ranks > 1)} {beside}"
    yield f"memory of an engine per GPU: {room.memory / GIB:.1f} GiB ({parts}); {engines}"
    running = f"{room.at_a_time} of {room.length:,} tokens at a time"
    limit = "the cache's limit" if room.is_tight else "the engine's limit"
    if room.completions <= room.at_a_time:
        running = f"all at a time, if each has {room.length:,} tokens"
        limit = "no limit"
    count = f"{room.completions:g} completions of a step"
    yield f"cache of an engine: at most {room.tokens:,} tokens; {count}, {running} ({limit})"
    if room.is_tight:
        better = "; ".join(remedies(launch, room))
        yield f"serves better, and fits: {better or 'more GPUs'}"


def remedies(launch: Launch, room: Room) -> Iterator[str]:
    """Yield flags with which more completions run at a time: the lowest
    `--gpu_memory_utilization` beside the trainer with which the cache is no limit, or the highest;
    and the `--rollout_ranks` with the fastest step. Slower ones only if the launch does not fit."""
    fits = capacity.fits(launch.models, launch.plan, launch.capacity)
    larger = []
    timed = []
    for share in (step / 20 for step in range(1, 20)) if not launch.args.rollout_ranks else ():
        more = replace(room, memory=share * launch.capacity)
        setting = replace(launch.plan, engine=more.memory)
        if more.memory > room.memory and capacity.fits(launch.models, setting, launch.capacity):
            larger.append((f"--gpu_memory_utilization {share:g}", replace(launch, room=more)))
            if not more.is_tight:
                break
    inputs = (room, launch.args, launch.ranks, launch.capacity)
    for args, more in engine_plan.with_rollout_ranks(*inputs):
        shards = args.shard_ranks or launch.ranks - args.rollout_ranks
        setting = replace(launch.plan, ranks=shards, engine=0.0)
        if capacity.fits(launch.models, setting, launch.capacity):
            other = replace(launch, args=args, room=more, plan=setting)
            timed.append((f"--rollout_ranks {args.rollout_ranks}", other))
    timed.sort(key=lambda pair: pair[1].step(1))
    for flag, other in (*larger[-1:], *timed[:1]):
        ratio = other.step(1) / launch.step(1)
        if ratio < 1 or not fits:
            each = f"{other.room.at_a_time} at a time on each engine (of {other.room.engines})"
            yield f"{flag}: {each}, {ratio:.0%} of the time of a step"
