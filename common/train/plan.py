"""Plan of a run, as text for `--dry_run`: the sizes of its steps, the rewards of its first rows,
and the memory and the disk that it needs."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from common.config.groups import TrainArgs
from common.data.sample import Completion, Sample
from common.metrics.logger import preview
from common.metrics.meter import Meter
from common.model import capacity
from common.model.flops import capacity_of, num_delta_nets
from common.model.hub import resolve_model
from common.model.loading import has_other_parts, load_config, load_text_config
from common.model.memory import Shapes, shapes_of
from common.model.policy import PackedModel, compute_dtype, load_policy, load_scalar_model
from common.parallel import distributed

META = torch.device("meta")
# Columns with an answer; the first one that a row has is used.
ANSWERS = ("answer", "solution", "completion", "canonical_solution", "code", "output")


def shapes(
    args: TrainArgs, path: str | None, frozen: Sequence[str], value_path: str | None
) -> list[Shapes]:
    """Return the shapes of a run's models: the policy in `path`, or None; a scalar model; the
    `frozen` policies, where one equal to an adapted policy takes no memory; and the reward
    models."""
    models = [load_policy(path, args, META)] if path is not None else []
    if value_path is not None:
        models.append(load_scalar_model(value_path, args, META))
    for name in frozen:
        if name != path or not args.lora_rank:
            folder = resolve_model(name, weights=False)
            models.append(load_policy(folder, args, META, trainable=False))
    for name in args.reward_models:
        kind, _, path = name.partition(":")
        load = load_scalar_model if kind == "model" else load_policy
        folder = resolve_model(path, "--reward", weights=False)
        models.append(load(folder, args, META, trainable=False, flag="--reward"))
    policies = (model for model in models if isinstance(model, PackedModel))
    return [shapes_of(model.hf, model.tower) for model in policies]


def describe_model(path: str, vision: str | None) -> list[str]:
    """Return lines about the class of a policy and what it leaves alone or computes slowly, none
    for most models. `vision`: the flag."""
    config = load_config(path)
    text = load_text_config(path)
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__
    lines = []
    if has_other_parts(config):
        whole = ", ".join(config.architectures or [config.model_type])
        others = "all other weights stay as they are"
        if vision is not None:
            others = f"its vision tower is {'trained' if vision == 'train' else 'frozen'}"
        lines.append(f"{name}, the language model of {whole}: {others}")
    delta_nets = num_delta_nets(text)
    if delta_nets:
        from common.model.flops import has_kernels

        slow = "" if has_kernels() else ", in torch code, slowly; pip install onefile[delta]"
        layers = f"{delta_nets} of {text.num_hidden_layers} layers"
        lines.append(f"{name}: {layers} are gated delta nets{slow}")
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    if capped or text.model_type == "gpt_oss":
        lines.append(f"{name}: attention stores all scores of a sequence (docs/models.md)")
    return lines


def first_samples(args: TrainArgs, data) -> list[list[Sample]]:
    """Return the samples of each row of the first step. `data`: samples, groups of them, or prompts
    with their rows."""
    groups = []
    for i in data.order(args).draw(args.rows_per_step):
        match data[i]:
            case list() as group:
                groups.append(group)
            case Sample() as sample:
                groups.append([sample])
            case ids, row:
                groups.append([Completion(ids, [False] * len(ids), len(ids), row)])
    return groups


def preview_all(samples: Sequence[Sample], tokenizer) -> None:
    """Print decoded samples."""
    from rich.console import Console

    for sample in samples:
        preview(sample, tokenizer, Console())


def rewards_of_rows(
    tokenizer, prompts: list[Completion], rewards: Callable, has_environment: bool
) -> tuple[list[str], float]:
    """Return a line for each reward except those of models: its mean over the rows' own answers,
    and over empty completions; and the seconds of a completion in a second pass, when processes
    have started. Collective."""
    column = None
    if not has_environment:
        row = prompts[0].row
        column = next((name for name in ANSWERS if row.get(name) is not None), None)
    groups = []
    for prompt in prompts:
        value = "" if column is None else prompt.row.get(column, "")
        text = str(value[0] if isinstance(value, list) and value else value)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        # without the prompt, which may open a thought
        answer = Completion(ids, [], row=prompt.row, text=text)
        groups.append([answer, Completion(prompt.ids, [], prompt.prompt_length, prompt.row)])
    by_name = rewards(groups, Meter()).by_name
    started = time.perf_counter()
    rewards(groups, Meter())
    seconds = time.perf_counter() - started
    lines = []
    for name, values_P2 in by_name.items():
        answer_mean, empty_mean = (f"{mean:.3g}" for mean in values_P2.nanmean(0).tolist())
        answered = f"{answer_mean} for column {column}, " if column else ""
        start = f"reward {name}, mean of {len(groups)} rows:"
        lines.append(f"{start} {answered}{empty_mean} for empty completions")
        if column and torch.equal(*values_P2.unbind(1)):
            problem = f"column {column} scores no better than empty completions"
            lines.append(f"warning: reward {name}: {problem}")
    return lines, seconds / 2 / len(groups)


def launch(args: TrainArgs) -> tuple[int, torch.device, int]:
    """Return the number of ranks, the device of each and its bytes: those of `--dry_run 8x80GB`, or
    of this launch. The bytes of a CPU are 0."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if args.planned:
        return args.planned.ranks, torch.device("cuda"), args.planned.size
    return distributed.world_size(), device, capacity_of(device) or 0


def ranks_of_a_machine(args: TrainArgs) -> int:
    """Return the number of ranks of a machine, in the plan or in this launch."""
    if args.planned:
        return min(args.planned.machine, args.planned.ranks)
    return int(os.environ.get("LOCAL_WORLD_SIZE", distributed.world_size()))


def shard_ranks(args: TrainArgs) -> int:
    """Return the number of ranks that share a copy of each model, as `mesh.shard_mesh` finds it:
    those of a machine, or all if machines have different numbers of them."""
    ranks, *_ = launch(args)
    trainers = ranks - args.rollout_ranks
    machine = ranks_of_a_machine(args)
    return args.shard_ranks or (trainers if trainers % machine else machine)


def training_plan(args: TrainArgs, models: Sequence[Shapes]) -> capacity.Plan:
    """Return the plan of a training rank."""
    _, device, size = launch(args)
    dtype = compute_dtype(args, device)
    return capacity.make_plan(models, args, shard_ranks(args), device, dtype, size)


def describe_memory(args: TrainArgs, models: Sequence[Shapes]) -> str:
    """Return a line with the predicted memory of a training rank."""
    *_, size = launch(args)
    plan = training_plan(args, models)
    line = f"memory per training rank: {capacity.describe(models, plan, size)}"
    line += f"; activations {'recomputed' if plan.recompute else 'kept'}"
    if not size:
        return f"{line}, without the engine; --dry_run 8x80GB plans for 8 GPUs of 80 GB"
    ranks, *_ = launch(args)
    copies = (ranks - args.rollout_ranks) // plan.ranks
    machine = ranks_of_a_machine(args)
    if ranks > machine:
        line += f"; machines of {machine} GPUs"
    return f"{line}; {copies} copies, each on {plan.ranks} ranks" if copies > 1 else line


def evaluations(args: TrainArgs, steps: int) -> int:
    """Return the number of evaluations of a run; a script that samples has one before step 1."""
    return math.ceil(steps / args.eval_every) + args.samples if args.eval_every else 0


def schedule(
    args: TrainArgs, groups: list[list[Sample]], steps: int, held_out: int
) -> Iterator[str]:
    """Yield lines about the sizes of a step and the number of steps. `groups`: samples of a step,
    or its prompts alone."""
    ranks, *_ = launch(args)
    training_ranks = ranks - args.rollout_ranks
    size = len(groups[0])
    length = sum(len(sample.ids) for sample in chain.from_iterable(groups)) / len(groups) / size
    rows = args.rows_per_step
    if args.samples:
        sequences = rows * args.samples_per_prompt
        length += args.max_new_tokens
        minibatches = args.minibatches
        most = "at most "
        content = f"{rows} prompts x {args.samples_per_prompt} completions"
        epochs = f"--epochs_per_rollout {args.epochs_per_rollout}"
        passes = f"--minibatches {minibatches} x {epochs} = {args.updates_per_rollout}"
    else:
        sequences = rows * size
        minibatches = 1
        most = ""
        content = f"{rows} rows x {size}"
        passes = "1"
    tokens = f"{sequences} sequences, {most}{sequences * length:,.0f} tokens"
    yield f"step: {content} = {tokens}; optimizer steps: {passes}"
    share = sequences / minibatches / training_ranks
    others = f", {args.rollout_ranks} only generate" if args.rollout_ranks else ""
    packs = math.ceil(share * args.context_ranks / max(1, args.pack_capacity // length))
    micro_batches = f"micro-batches of {args.pack_tokens} tokens: about {packs}"
    ranks = f"{training_ranks} training ranks{others}"
    yield f"optimizer step on each of {ranks}: {share:g} sequences, {micro_batches}"
    count = evaluations(args, steps)
    yield f"run: {steps} steps, {count} evaluation{'s' * (count != 1)} of {held_out} rows"


def disk(args: TrainArgs, models: Sequence[Shapes], steps: int) -> str:
    """Return a line about the checkpoints, which have 12 bytes per trained weight, and 4 more if a
    copy of it moves."""
    size = (16e-9 if args.reference_sync else 12e-9) * sum(model.trained for model in models)
    count = min(args.keep_last + 1, math.ceil(steps / args.save_every))
    parents = (Path(args.output_dir) / "x").resolve().parents
    folder = next(parent for parent in parents if parent.is_dir())
    free = shutil.disk_usage(folder).free / 1e9
    is_short = count * size > free and not args.planned
    label = "warning: disk" if is_short else "disk"
    checkpoints = f"checkpoints {count} x {size:.3g} GB = {count * size:.3g} GB"
    here = " of this machine" if args.planned else ""
    return f"{label}: {checkpoints}; {free:.3g} GB are free in {folder}{here}"
