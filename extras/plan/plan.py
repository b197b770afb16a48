"""`--dry_run`: check a launch and print its plan, without loading weights (README.md)."""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from rich.console import Console

from common.config.groups import NO_IMAGES, CheckpointArgs, ImageArgs, TrainArgs
from common.config.online import OnlineArgs
from common.metrics.logger import preview
from common.metrics.meter import Meter
from common.model.hub import resolve_model
from common.model.policy import (
    PackedModel,
    Policy,
    compute_dtype,
    load_policy,
    load_scalar_model,
)
from common.packs.order import make_order
from common.packs.sample import Completion, Sample
from common.parallel import distributed
from common.rewards.total import Rewards
from common.train.overview import cautions_about_data, num_steps
from extras.plan.launch import BAND, DECODING, GPUS, MACHINE, Gpu, Launch
from extras.plan.memory import GIB, num_blocks

META = torch.device("meta")
# Columns with an answer; the first one that a row has is used.
ANSWERS = ("answer", "solution", "completion", "canonical_solution", "code", "output")


def dry_run(
    args: TrainArgs, path: str | None, tokenizer, data, held_out: Sized,
    rewards: Rewards | None = None, frozen: Sequence[str] = (), *, value_path: str | None = None,
    kind: type[Policy] = Policy, moving: bool = False, own_forwards: float = 0,
    trained_fraction: float = 1.0, counts: Counter | None = None, image_args: ImageArgs = NO_IMAGES,
) -> None:  # fmt: skip
    """Print the first row of the run, the rewards of ten rows and the plan.

    `data`: the samples, or the prompts of a script with `rewards`; `counts`: dropped rows by
    reason. `path`: the trained policy, of this `kind`; `value_path`: the trained scalar model.
    `frozen`: policies in memory that score the sequences of a step once, in float32 if they are
    `moving`. `own_forwards`: how often a step runs trained models on all sequences without a
    gradient; `trained_fraction`: the share of the sequences that is trained.

    Collective. Raises `ValueError` if the run does not fit, or a model is not supported, and
    `RunError` if rewards cannot be computed."""
    groups = first_groups(args, data)
    lines = [f"{count} rows {reason}" for reason, count in (counts or {}).items()]
    if rewards is not None:
        lines.append(f"{data}, {held_out} held out")
        lines += rewards_of_rows(args, tokenizer, [group[0] for group in groups[:10]], rewards)
    gpus, machine, name, gpu = gpus_of(args)
    if gpu.memory and args.dtype == "auto":
        args = replace(args, dtype="bfloat16")
    trained, others = build(args, path, value_path, frozen, moving, kind, image_args)
    # With adapters, the frozen policy may be the trained one with its adapters off.
    own_forwards += list(frozen).count(path) if args.lora_rank else 0
    samples = [*chain.from_iterable(groups)]
    launch = Launch(
        args, gpus, gpu, machine, trained, others,
        scorers=others,
        prompt=sum(len(sample.ids) for sample in samples) / len(samples),
        each=(args.samples_per_prompt if isinstance(args, OnlineArgs)
              else math.ceil(len(samples) / len(groups))),
        trained_fraction=trained_fraction, own_forwards=own_forwards,
    )  # fmt: skip
    lines += [*cautions_about_data(args, data), *describe_memory(launch)]
    problem = launch.problem() if gpu.memory else None
    if not problem:
        lines += describe_time(launch, name, num_steps(args, data))
    if distributed.is_main():
        if rewards is None:  # else the first prompt is already shown
            for sample in groups[0]:
                preview(sample, tokenizer, Console())
        lines.append("dry run: no weights were loaded, nothing was written")
        distributed.say("\n".join(lines))
    if problem:
        raise ValueError(f"--dry_run: {problem}")
    distributed.cleanup()


# ---- what is checked ----


def first_groups(args: TrainArgs, data) -> list[list[Sample]]:
    """Return the samples of each row of the first step. `data`: groups, or prompts with their
    rows."""
    groups = []
    order = make_order(data.rows, args) if isinstance(args, OnlineArgs) else data.order(args)
    for i in order.draw(args.rows_per_step):
        match data[i]:
            case list() as group:
                groups.append(group)
            case ids, row:
                groups.append([Completion(ids, [False] * len(ids), len(ids), row)])
    return groups


def rewards_of_rows(
    args: TrainArgs, tokenizer, prompts: list[Completion], rewards: Rewards
) -> Iterator[str]:
    """Yield a line for each reward that is no model: its mean over the rows' own answers, and over
    empty completions. Collective."""
    row = prompts[0].row
    column = next((name for name in ANSWERS if row.get(name) is not None), None)
    if isinstance(args, OnlineArgs) and args.has_turns:  # a row's answer is no episode
        column = None
    groups = []
    for prompt in prompts:
        value = prompt.row.get(column, "")
        text = str(value[0] if isinstance(value, list) and value else value)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # leave out the prompt, which may open a thought
        answer = Completion(ids, [], row=prompt.row, text=text)
        groups.append([answer, Completion(prompt.ids, [], prompt.prompt_length, prompt.row)])
    for name, values_P2 in rewards.wait(groups, Meter()).by_name.items():
        answer_mean, empty_mean = (f"{mean:.3g}" for mean in values_P2.nanmean(0).tolist())
        answered = f"{answer_mean} for column {column}, " if column else ""
        start = f"reward {name}, mean of {len(groups)} rows:"
        yield f"{start} {answered}{empty_mean} for empty completions"
        if column and torch.equal(*values_P2.unbind(1)):
            problem = f"column {column} scores no better than empty completions"
            yield f"warning: reward {name}: {problem}"


def build(
    args: TrainArgs,
    path: str | None,
    value_path: str | None,
    frozen: Sequence[str],
    moving: bool = False,
    kind: type[Policy] = Policy,
    image_args: ImageArgs = NO_IMAGES,
) -> tuple[list[PackedModel], list[PackedModel]]:
    """Return the trained and the frozen models of a run on meta, the latter with reward models. A
    frozen policy that is the trained one without adapters takes no memory, and is not listed."""
    load_own = partial(load_policy, args=args, device=META, image_args=image_args)
    trained = [load_own(path, kind=kind)] if path is not None else []
    if value_path is not None:
        trained.append(load_scalar_model(value_path, args, META))
    others = [
        load_own(resolve_model(name, weights=False), trainable=False, moves=moving)
        for name in frozen
        if name != path or not args.lora_rank
    ]
    reward_models = args.reward_models if isinstance(args, OnlineArgs) else ()
    for spec in reward_models:
        form, _, name = spec.partition(":")
        load = load_scalar_model if form == "model" else load_policy
        folder = resolve_model(name, "--reward", weights=False)
        others.append(load(folder, args, META, trainable=False, flag="--reward"))
    for model in (*trained, *others):
        model.compute_dtype = compute_dtype(args, META)
    return trained, others


def gpus_of(args: CheckpointArgs) -> tuple[int, int, str, Gpu]:
    """Return the number of GPUs, the number on a machine, their kind and its numbers: those of
    `--dry_run 8xH100`, or of this launch. A CPU has memory 0, because other programs share it."""
    if args.planned_ranks:
        kind = args.dry_run.partition("x")[2].upper()
        if kind not in GPUS:
            raise ValueError(f"--dry_run {args.dry_run}: unknown kind; use {', '.join(GPUS)}")
        return args.planned_ranks, min(MACHINE, args.planned_ranks), kind, GPUS[kind]
    ranks = distributed.world_size()
    machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if not torch.cuda.is_available():
        return ranks, machine, "CPU", Gpu(0)
    name = torch.cuda.get_device_name()
    gpu = next((GPUS[kind] for kind in GPUS if kind in name), Gpu(0))
    return ranks, machine, name, gpu._replace(memory=torch.cuda.mem_get_info()[1])


# ---- lines ----


def describe_memory(launch: Launch) -> Iterator[str]:
    """Yield lines about the size of a step, the memory of a rank and the engines."""
    args, length = launch.args, launch.length
    most = "at most " if launch.samples else ""
    tokens = f"{most}{launch.sequences * length:,.0f} tokens"
    updates = args.updates_per_rollout if launch.samples else 1
    size = f"{args.rows_per_step} rows x {launch.each} = {launch.sequences} sequences, {tokens}"
    yield f"step: {size}; training ranks: {launch.trainers}; optimizer steps: {updates}"
    blocks = f"{sum(launch.kept)} of {sum(map(num_blocks, launch.trained))} blocks"
    yield f"memory of a training rank: {launch.describe_memory()}; activations of {blocks} kept"
    if launch.has_vllm and launch.gpu.memory:
        cache = max(0.0, launch.engine - launch.engine_weights)
        parts = f"weights {launch.engine_weights / GIB:.1f}, cache at most {cache / GIB:.1f}"
        engines = f"{launch.engines} x {launch.engine / GIB:.1f} GiB per GPU ({parts})"
        each = f"{launch.running} completions of {length:,.0f} tokens at a time"
        yield f"engines: {engines}: {each}, of {launch.sequences / launch.engines:.4g} of a step"


def describe_time(launch: Launch, name: str, steps: int) -> Iterator[str]:
    """Yield lines about the time of a step and of the run."""
    args, gpu = launch.args, launch.gpu
    if not gpu.flops or launch.samples and not launch.has_vllm:
        why = f"for a {name}" if not gpu.flops else "without vLLM"
        yield f"time: not predicted {why}; --dry_run 8xH100 plans for 8 of these GPUs"
        return
    phases = launch.seconds()
    step = launch.step_seconds(phases)
    shares = ", ".join(f"{phase} {time / step:.0%}" for phase, time in phases.items() if time)
    beside = ", the rollout of the next step beside the rest" * launch.overlaps
    yield f"time of a step: {span(step)}: {shares}{beside}"
    hours = band(steps * step * launch.gpus / 3600)
    others = "without start, evaluations and checkpoints"
    yield f"time of the run: {span(steps * step)}, {hours} GPU-hours: {steps} steps, {others}"
    rates = f"training at {launch.training:.0%} of {gpu.flops / 1e12:g} TFLOP/s"
    if launch.samples:
        rates += f", decoding at {DECODING:.0%} of {gpu.bandwidth / 1e9:,.0f} GB/s, all"
        rates += f" completions of {launch.new:,} tokens"
    if args.offload != "none":
        rates += ", without the traffic of --offload"
    yield "assumed: x{:g} to x{:g} of a roofline for {}: {}".format(*BAND, name, rates)


def span(seconds: float) -> str:
    """Return the band around a time as text, in a fitting unit."""
    units = ((172_800, 86_400, "days"), (7_200, 3_600, "hours"), (120, 60, "min"), (1, 1, "s"))
    high = max(BAND) * seconds
    size, unit = next(((size, unit) for least, size, unit in units if high >= least), (1e-3, "ms"))
    return f"{band(seconds / size)} {unit}"


def band(number: float) -> str:
    """Return the band around a number as text, with two digits for each end."""
    return " to ".join(f"{float(f'{bound * number:.2g}'):,g}" for bound in BAND)
