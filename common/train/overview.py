"""The length of a run, its description on the console, its main metrics, and its result on held-out pairs."""

import math
from collections import Counter

from common.config.groups import OnlineArgs, TrainArgs
from common.data.token_cache import Samples
from common.metrics.logger import wilson_interval
from common.parallel import distributed
from common.rollout.prompts import Prompts
from common.rollout.sampler import Sampler
from common.train.run import Run

# Of scripts that sample from the policy they train.
SHOW = ("reward", "kl", "eval/solved", "completions/mean_length", "time/step")  # beside the progress bar
CURVES = ("reward", "rewards/*/mean", "eval/solved", "kl", "entropy", "completions/mean_length", "grad_norm",
          "sampling/sampling_logp_difference/max")  # fmt: skip


def num_steps(args: TrainArgs, data: Samples | Prompts) -> int:
    """Return the number of steps of the run: `--max_steps`, or as many as `--epochs` passes over the data take."""
    return args.max_steps or math.ceil(args.epochs * len(data) / getattr(args, size_flag(args)))


def size_flag(args: TrainArgs) -> str:
    """Return the flag with the number of rows of a step."""
    return "prompts_per_step" if isinstance(args, OnlineArgs) else "batch_size"


def repetitions(args: TrainArgs, data: Samples | Prompts) -> list[str]:
    """Return a line if a step draws rows more than once."""
    flag = size_flag(args)
    size = getattr(args, flag)
    if getattr(args, "streaming", False) or size <= len(data):
        return []
    times = f"each step draws every row {size / len(data):.3g} times"
    return [f"warning: --{flag} {size} exceeds the {len(data)} training rows: {times}; lower it"]


def length(args: TrainArgs, data: Samples | Prompts) -> str:
    """Return the number of steps and of ranks as text."""
    ranks = distributed.world_size()
    return f"{num_steps(args, data)} steps on {ranks} rank{'s' * (ranks > 1)}"


def describe_data(
    args: TrainArgs, data: Samples, held_out: Samples, counts: Counter, eval_counts: Counter
) -> list[str]:
    """Return lines about the rows that were dropped or changed, the data and the length of a run."""
    named = (("training", counts), ("held-out", eval_counts))
    lines = [f"{count} {name} rows {reason}" for name, found in named for reason, count in found.items()]
    lines.append(f"{data.num_rows} training rows, {len(held_out)} held out, {length(args, data)}")
    return lines + repetitions(args, data)


def describe_rollouts(args: OnlineArgs, prompts: Prompts, held_out: Prompts, rollouts: Sampler) -> list[str]:
    """Return lines about the data, the length, the engine and the updates of a run, and about its preset."""
    updates = args.updates_per_rollout
    mode = [f"{updates} updates per rollout"] if updates > 1 else []
    mode += [f"weights up to {args.max_staleness} steps old"] if rollouts.prefetch_steps else []
    mode = f"off-policy: {', '.join(mode)}" if mode else "on-policy"
    lines = [f"{prompts}, {held_out} held out, {length(args, prompts)}, {rollouts}, {mode}"]
    lines += repetitions(args, prompts)
    if args.PRESETS and args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[args.preset].items())
        lines.append(f"preset {args.preset}: {flags}")
    return lines


def fall(args: TrainArgs, first: dict[str, float], metrics: dict[str, float], referenced: bool = True) -> str:
    """Return what an evaluation shows if the model unlearns good answers while the preference loss falls, else an empty
    text: `eval/solved` is two standard errors below its `first` value, or the log-prob of chosen completions is below
    the reference's by a nat and a tenth. `referenced`: whether `rewards` are beta x summed log-ratios."""
    found = []
    before, solved = first.get("eval/solved", 0.0), metrics.get("eval/solved", 1.0)
    if before - solved > 2 * math.sqrt(before * (1 - before) / max(1, args.eval_generate)):
        found.append(f"eval/solved fell from {before:.3g} to {solved:.3g}")
    ratio = metrics.get("eval_rewards/chosen", 0.0) / args.beta if referenced else 0.0
    logp = metrics.get("eval_logps/chosen", 0.0)
    if -ratio > max(1.0, 0.1 * abs(logp - ratio)):
        found.append(f"the log-prob of chosen completions fell from {logp - ratio:.3g} to {logp:.3g}")
    return " and ".join(found)


def held_out_accuracy(run: Run, held_out: Samples) -> str:
    """Return the accuracy of the last evaluation with its confidence interval, or nothing without an evaluation."""
    if (accuracy := run.latest.get("eval_rewards/accuracies")) is None:
        return ""
    low, high = wilson_interval(accuracy, len(held_out))
    return f"held-out accuracy {accuracy:.3f} on {len(held_out)} rows (95% interval {low:.3f} to {high:.3f})"
