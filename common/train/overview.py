"""The length of a run, its description on the console, its main metrics, and the dry run."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from typing import NoReturn, Protocol

from common.config.groups import TrainArgs
from common.parallel import distributed

# Of scripts that sample from the policy they train. SHOW: beside the progress bar.
SHOW = ("reward", "kl", "eval/solved", "completions/mean_length", "time/step")
CURVES = (
    "reward", "rewards/*/mean", "eval/solved", "kl", "entropy", "completions/mean_length",
    "grad_norm", "sampling/sampling_logp_difference/max",
)  # fmt: skip


class Samples(Sized, Protocol):
    """Samples of `num_rows` rows."""

    num_rows: int


def num_steps(args: TrainArgs, data: Sized) -> int:
    """Return the number of steps of the run: `--max_steps`, or as many as `--epochs` passes over
    the data take."""
    return args.max_steps or math.ceil(args.epochs * len(data) / args.rows_per_step)


def repetitions(args: TrainArgs, data: Sized) -> list[str]:
    """Return a line if a step draws rows more than once."""
    size = args.rows_per_step
    if args.streaming or size <= len(data):
        return []
    flag = f"--{args.ROWS_FLAG} {size}"
    times = f"each step draws every row {size / len(data):.3g} times"
    return [f"warning: {flag} exceeds the {len(data)} training rows: {times}; lower it"]


def length(args: TrainArgs, data: Sized) -> str:
    """Return the number of steps and of ranks as text."""
    ranks = distributed.world_size()
    return f"{num_steps(args, data)} steps on {ranks} rank{'s' * (ranks > 1)}"


def describe_data(
    args: TrainArgs, data: Samples, held_out: Sized, counts: Counter, eval_counts: Counter
) -> list[str]:
    """Return lines about the rows that were dropped or changed, the data and the length of a
    run."""
    named_counts = (("training", counts), ("held-out", eval_counts))
    lines = [
        f"{count} {name} rows {reason}"
        for name, reasons in named_counts
        for reason, count in reasons.items()
    ]
    lines.append(f"{data.num_rows} training rows, {len(held_out)} held out, {length(args, data)}")
    return lines + repetitions(args, data)


def describe_rollouts(
    args: TrainArgs, prompts: Sized, held_out: Sized, rollouts: object | None
) -> list[str]:
    """Return lines about the data, the length, the engine and the updates of a run with flags for
    sampling, and about its preset."""
    updates = args.updates_per_rollout
    mode = [f"{updates} updates per rollout"] if updates > 1 else []
    if rollouts is not None and args.rollout_ranks and args.max_staleness:
        mode.append(f"weights up to {args.max_staleness} steps old")
    mode = f"off-policy: {', '.join(mode)}" if mode else "on-policy"
    engine = rollouts or "no engine"
    lines = [f"{prompts}, {held_out} held out, {length(args, prompts)}, {engine}, {mode}"]
    lines += repetitions(args, prompts)
    if args.PRESETS and args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[args.preset].items())
        lines.append(f"preset {args.preset}: {flags}")
    return lines


def dry_run(
    args: TrainArgs, path: str | None, tokenizer, data, held_out: Sized,
    rewards: Callable | None = None, frozen: Sequence[str] = (), value_path: str | None = None,
    counts: Counter | None = None,
) -> NoReturn:  # fmt: skip
    """`--dry_run`: build the models without weights, print the first row of the run, the rewards of
    ten rows and the plan, and end the process.

    `data`: the samples, or the prompts of a script with `rewards`. `path`, `frozen` and
    `value_path`: see `plan.shapes`; `counts`: dropped rows by reason. Collective. Raises
    `ValueError` if the run does not fit, or a model is not supported, and `RunError` if rewards
    cannot be computed."""
    from common.train import launch_plan, plan

    models = plan.shapes(args, path, frozen, value_path)
    groups = plan.first_samples(args, data)
    lines = [f"{count} rows {reason}" for reason, count in (counts or {}).items()]
    seconds = 0.0
    if rewards is not None:
        lines.append(f"{data}, {held_out} held out")
        prompts = [prompt for (prompt,) in groups[:10]]
        has_environment = args.has_turns
        reward_lines, seconds = plan.rewards_of_rows(tokenizer, prompts, rewards, has_environment)
        lines += reward_lines
    if path is not None:
        lines += plan.describe_model(path, args.vision)
    steps = num_steps(args, data)
    lines += plan.schedule(args, groups, steps, len(held_out))
    lines += repetitions(args, data)
    lines += [plan.disk(args, models, steps), plan.describe_memory(args, models)]
    longest = max(map(len, data.ids + held_out.ids), default=0) if args.samples else 0
    sizes = (longest, 0 if args.streaming else len(data), len(held_out), seconds)
    has_value = None not in (path, value_path)
    setting = launch_plan.Setting(models, path, frozen, has_value, groups, *sizes)
    launch_lines, problem = launch_plan.describe_all(args, setting, steps)
    lines += [*launch_lines, "dry run: no weights were loaded, nothing was written"]
    if distributed.is_main():
        if rewards is None:  # else the first prompt is already shown
            plan.preview_all(groups[0], tokenizer)
        distributed.say("\n".join(lines))
    if problem:
        raise ValueError(f"--dry_run: {problem}")
    distributed.cleanup()
    distributed.end_process()
    sys.exit(0)
