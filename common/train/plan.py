"""`--dry_run`: a run up to its models, which are built without weights, and the plan of its steps."""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from common.config.groups import OnlineArgs, TrainArgs
from common.data.order import make_order
from common.data.sample import Completion, Sample
from common.data.token_cache import Samples
from common.metrics.logger import preview
from common.metrics.meter import Meter
from common.model import lora, memory
from common.model.hub import resolve_model
from common.model.policy import PackedModel, compute_dtype, load_policy, load_scalar_model
from common.model.value import load_with_value_model
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.prompts import Prompts
from common.train.overview import num_steps, repetitions, size_flag

META = torch.device("meta")
ANSWERS = ("answer", "solution", "completion", "canonical_solution", "code", "output")  # columns; the first one is used


def dry_run(
    args: TrainArgs, path: str | None, tokenizer, data: Prompts | Samples, held_out: Prompts | Samples,
    rewards: Rewards | None = None, frozen: Sequence[str] = (), value_path: str | None = None,
    counts: Counter | None = None,
) -> None:  # fmt: skip
    """With `--dry_run`, print the first prompt or row of the run, the rewards of ten rows and the plan, and end the
    process. `path`, `frozen` and `value_path`: see `shapes`; `counts`: dropped rows by reason. Collective. Raises
    `ValueError` if the run does not fit, or a model is not supported, and `RunError` if rewards cannot be computed."""
    if not args.dry_run:
        return
    models, lines = shapes(args, path, frozen, value_path), [f"{n} rows {why}" for why, n in (counts or {}).items()]
    order = make_order(data.rows, args) if isinstance(data, Prompts) else data.order(args)
    drawn = [data[i] for i in order.draw(getattr(args, size_flag(args)))]
    if isinstance(args, OnlineArgs):
        items = [[Completion(ids, [False] * len(ids), len(ids), row)] for ids, row in drawn]
        lines += [f"{data}, {held_out} held out", *rewards_of_rows(args, tokenizer, items[:10], rewards)]
    else:
        items = [item if isinstance(item, list) else [item] for item in drawn]
    length = sum(len(sample.ids) for item in items for sample in item) / len(items) / len(items[0])
    steps = num_steps(args, data)
    problem, line = predicted(args, models)
    lines += [*schedule(args, len(items[0]), length, steps, len(held_out)), *repetitions(args, data)]
    lines += [disk(args, models, steps), line]
    if distributed.is_main():
        from rich.console import Console

        for sample in [] if isinstance(args, OnlineArgs) else items[0]:  # a first prompt is already shown
            preview(sample, tokenizer, Console())
        distributed.say("\n".join([*lines, "dry run: no weights were loaded, nothing was written"]))
    if problem:
        raise ValueError(f"--dry_run: {problem}")
    distributed.cleanup()
    distributed.leave()
    sys.exit(0)


def shapes(args: TrainArgs, path: str | None, frozen: Sequence[str], value_path: str | None) -> list[memory.Shapes]:
    """Return the shapes of a run's models: the policy in `path`, or None; a scalar model; the `frozen` policies, where
    one equal to an adapted policy takes no memory; and the reward models."""
    if path is None:
        models = [load_scalar_model(value_path, args, META)]
    else:
        models = load_with_value_model(path, value_path, args, META) if value_path else [load_policy(path, args, META)]
    others = [resolve_model(name, weights=False) for name in frozen if name != path or not lora.has_adapters(args)]
    models = [*models, *(load_policy(other, args, META, trainable=False) for other in others)]
    judges = [name.removeprefix("model:") for name in getattr(args, "reward", ()) if name.startswith("model:")]
    folders = [resolve_model(name, "--reward", weights=False) for name in judges]
    models += [load_scalar_model(folder, args, META, trainable=False, flag="--reward") for folder in folders]
    return [memory.shapes_of(model.hf) for model in models if isinstance(model, PackedModel)]


def rewards_of_rows(args: OnlineArgs, tokenizer, items: list[list[Sample]], rewards: Rewards) -> Iterator[str]:
    """Yield a line for each reward except those of models: its mean over the rows' own answers, and over empty
    completions. Collective."""
    groups, row = [], items[0][0].row
    column = next((name for name in ANSWERS if args.environment is None and row.get(name) is not None), None)
    for (prompt,) in items:
        value = "" if column is None else prompt.row.get(column, "")
        text = str(value[0] if isinstance(value, list) and value else value)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = Completion(ids, [], row=prompt.row, text=text)  # without the prompt, which may open a thought
        groups.append([answer, Completion(prompt.ids, [], prompt.prompt_length, prompt.row)])
    for name, values_P2 in rewards(groups, Meter()).parts.items():
        of_answers, of_empty = (f"{mean:.3g}" for mean in values_P2.nanmean(0).tolist())
        answered = f"{of_answers} for column {column}, " if column else ""
        yield f"reward {name}, mean of {len(groups)} rows: {answered}{of_empty} for empty completions"
        if column and torch.equal(*values_P2.unbind(1)):
            yield f"warning: reward {name}: column {column} scores no better than empty completions"


def launch(args: TrainArgs) -> tuple[int, int, torch.device, int]:
    """Return the number of training ranks and of dedicated rollout ranks, the device of each and its bytes: those of
    `--dry_run 8x80GB`, or of this launch. The bytes of a CPU are 0."""
    here = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ranks, capacity = args.planned or (distributed.world_size(), memory.capacity_of(here) or 0)
    apart = args.rollout_ranks if isinstance(args, OnlineArgs) else 0
    return ranks - apart, apart, torch.device("cuda") if args.planned else here, capacity


def predicted(args: TrainArgs, models: Sequence[memory.Shapes]) -> tuple[str | None, str]:
    """Return the reason why the run does not fit, if so, and a line with the predicted memory of a training rank."""
    ranks, _, device, capacity = launch(args)
    plan = memory.make_plan(models, args, args.shard_ranks or ranks, device, compute_dtype(args, device), capacity)
    end = "" if capacity else ", without the engine; --dry_run 8x80GB plans for 8 GPUs of 80 GB"
    problem = memory.refusal(models, plan, capacity) if capacity else None
    return problem, f"memory per training rank: {memory.describe(models, plan, capacity)}{end}"


def schedule(args: TrainArgs, size: int, length: float, steps: int, held_out: int) -> Iterator[str]:
    """Yield lines about the sizes of a step and the number of steps. `size`: sequences of a row of data; `length`: mean
    tokens of a sequence or, for a script that samples, of a prompt."""
    ranks, apart, *_ = launch(args)
    if isinstance(args, OnlineArgs):
        count, updates, most = args.prompts_per_step * args.samples_per_prompt, args.minibatches, "at most "
        length += args.max_new_tokens
        what = f"{args.prompts_per_step} prompts x {args.samples_per_prompt} completions"
        epochs = f"--epochs_per_rollout {args.epochs_per_rollout}"
        passes = f"--minibatches {updates} x {epochs} = {args.updates_per_rollout}"
    else:
        count, updates, most = args.batch_size * size, 1, ""
        what, passes = f"{args.batch_size} rows x {size}", "1"
    yield f"step: {what} = {count} sequences, {most}{count * length:,.0f} tokens; optimizer steps: {passes}"
    share, others = count / updates / ranks, f", {apart} only generate" if apart else ""
    packs = f"micro-batches of {args.pack_tokens} tokens: {most}{math.ceil(share * length / args.pack_tokens)}"
    yield f"optimizer step on each of {ranks} training ranks{others}: {share:g} sequences, {packs}"
    evaluations = math.ceil(steps / args.eval_every) if args.eval_every else 0
    yield f"run: {steps} steps, {evaluations} evaluations of {held_out} rows"


def disk(args: TrainArgs, models: Sequence[memory.Shapes], steps: int) -> str:
    """Return a line about the checkpoints, which have 12 bytes per trained weight."""
    size, count = 12e-9 * sum(m.trained for m in models), min(args.keep_last + 1, math.ceil(steps / args.save_every))
    folder = next(folder for folder in (Path(args.output_dir) / "x").resolve().parents if folder.is_dir())
    free = shutil.disk_usage(folder).free / 1e9
    sizes = f"checkpoints {count} x {size:.3g} GB = {count * size:.3g} GB; {free:.3g} GB are free in {folder}"
    return f"{'warning: disk' if count * size > free else 'disk'}: {sizes}"
