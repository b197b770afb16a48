"""What a script prints before its first step: the length of the run, its data and its settings.
Also the metrics that most scripts show, and the door to `--dry_run`."""

import math
from collections import Counter
from collections.abc import Sequence, Sized
from fractions import Fraction
from itertools import chain

from common.config.extra import extra
from common.config.groups import TrainArgs
from common.packs.sample import without_shared_ids
from common.parallel import distributed

COST_ROWS = 256  # `cost_of_rewriting` counts the tokens of this many rows, the first ones

# Scripts that sample from the policy print the metrics SHOW and draw the metrics CURVES.
SHOW = ("reward", "kl", "eval/solved", "completions/mean_length", "time/step")
CURVES = (
    "reward", "rewards/*/mean", "eval/solved", "kl", "entropy", "completions/mean_length",
    "grad_norm", "sampling/sampling_logp_difference/max",
)  # fmt: skip


def num_steps(args: TrainArgs, data: Sized) -> int:
    """Return the number of steps of the run: `--max_steps`, or as many as `--epochs` passes over
    the data take."""
    epochs = Fraction(str(args.epochs))  # 1.1 times 100 is 110, but in floats it is more
    return args.max_steps or math.ceil(epochs * len(data) / args.rows_per_step)


def cautions_about_data(args: TrainArgs, data: Sized) -> list[str]:
    """Return a warning if `--eval_dataset` is given but never evaluated, and one if a step is
    larger than the data, so that it draws rows more than once."""
    unread = args.eval_dataset is not None and not args.eval_every
    lines = ["warning: --eval_dataset is not read: --eval_every is 0"] if unread else []
    size = args.rows_per_step
    if not isinstance(data, Sized) or size <= len(data):
        return lines
    flag = f"--{args.ROWS_FLAG} {size}"
    times = f"each step draws every row {size / len(data):.3g} times"
    problem = f"{flag} exceeds the {len(data)} training rows: {times}"
    return [*lines, f"warning: {problem}; lower it"]


def length_of_run(args: TrainArgs, data: Sized) -> str:
    ranks = distributed.counted(distributed.world_size(), "rank")
    return f"{distributed.counted(num_steps(args, data), 'step')} on {ranks}"


def describe_data(
    args: TrainArgs, data, held_out: Sized, counts: Counter, eval_counts: Counter
) -> list[str]:
    """Return the lines that a script without sampling prints about its data: how many rows were
    dropped or changed and why, how many are left, and the length of the run."""
    lines = [f"{count} training rows {reason}" for reason, count in counts.items()]
    lines += [f"{count} held-out rows {reason}" for reason, count in eval_counts.items()]
    num_rows = len(data) if isinstance(data, Sized) else "a stream of"
    lines.append(f"{num_rows} training rows, {len(held_out)} held out, {length_of_run(args, data)}")
    return lines + cautions_about_data(args, data)


def cost_of_rewriting(policy, samples) -> list[str]:
    """Return a line about wasted work, or none. If the chat template rewrites earlier turns, a
    conversation becomes several sequences that begin alike. Unless `policy` shares such prefixes,
    it computes these tokens again for each sequence."""
    if policy.share_prefix or not isinstance(samples, Sequence):
        return []
    groups = samples[:COST_ROWS]
    if all(len(group) == 1 for group in groups):
        return []
    whole = sum(len(sample.ids) for sample in chain(*groups))
    shared = sum(len(sample.ids) for sample in chain(*map(without_shared_ids, groups)))
    whole, shared = (f"{round(tokens / len(groups)):,}" for tokens in (whole, shared))
    problem = "the chat template rewrites earlier turns, and no prefix is shared"
    cost = f"{whole} tokens a row are computed in place of {shared}"
    return [f"{problem}: {cost}; --train_on last trains the last turn of each row alone"]


def describe_rollouts(
    args, prompts: Sized, held_out: Sized, sampler, preset: str | None = None
) -> list[str]:
    """Return the lines that a script with sampling prints about its run: data, length, engine, how
    far off-policy it trains, rewards, and its preset."""
    updates = args.updates_per_rollout
    mode = [f"{updates} updates per rollout"] if updates > 1 else []
    if sampler is not None and args.rollout_ranks and args.max_staleness:
        mode.append(f"weights up to {args.max_staleness} steps old")
    mode = f"off-policy: {', '.join(mode)}" if mode else "on-policy"
    engine = sampler or "no engine"
    rewards = f"reward {' + '.join(args.reward)}" if args.reward else "no reward"
    run = f"{length_of_run(args, prompts)}, {engine}, {mode}, {rewards}"
    lines = [f"{prompts}, {held_out} held out, {run}"]
    lines += cautions_about_data(args, prompts)
    kinds = {name.partition(":")[0] for name in args.reward}
    if kinds == {"rank"} and args.eval_every and args.eval_samples == 1:
        lines.append("evaluations have no reward: rank:PATH compares; see --eval_samples")
    if preset is not None:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[preset].items())
        lines.append(f"preset {preset}: {flags}")
    return lines


def dry_run(args: TrainArgs, *inputs, **models) -> None:
    """Do what `--dry_run` promises instead of training: check the data, compute ten rewards, print
    the first row, and plan memory and time. extras/plan/plan.py describes the arguments."""
    with extra("plan", "--dry_run"):
        from extras.plan.plan import dry_run
    dry_run(args, *inputs, **models)
