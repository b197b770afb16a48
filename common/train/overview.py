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
    per_step = args.prompts_per_step if isinstance(args, OnlineArgs) else args.batch_size
    return args.max_steps or math.ceil(args.epochs * len(data) / per_step)


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
    return [*lines, f"{data.num_rows} training rows, {len(held_out)} held out, {length(args, data)}"]


def describe_rollouts(args: OnlineArgs, prompts: Prompts, held_out: Prompts, rollouts: Sampler) -> list[str]:
    """Return lines about the data, the length, the engine and the updates of a run, and about its preset."""
    updates = args.updates_per_rollout
    mode = [f"{updates} updates per rollout"] if updates > 1 else []
    mode += [f"weights up to {args.max_staleness} steps old"] if rollouts.prefetch_steps else []
    mode = f"off-policy: {', '.join(mode)}" if mode else "on-policy"
    lines = [f"{prompts}, {held_out} held out, {length(args, prompts)}, {rollouts}, {mode}"]
    if args.PRESETS and args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[args.preset].items())
        lines.append(f"preset {args.preset}: {flags}")
    return lines


def held_out_accuracy(run: Run, held_out: Samples) -> str:
    """Return the accuracy of the last evaluation with its confidence interval, or nothing without an evaluation."""
    if (accuracy := run.latest.get("eval_rewards/accuracies")) is None:
        return ""
    low, high = wilson_interval(accuracy, len(held_out))
    return f"held-out accuracy {accuracy:.3f} on {len(held_out)} rows (95% interval {low:.3f} to {high:.3f})"
