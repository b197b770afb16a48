"""The length of a run that samples from the policy it trains, its description on the console, and its main metrics."""

import math

from common.config.groups import OnlineArgs
from common.parallel import distributed
from common.rollout.prompts import Prompts
from common.rollout.sampler import Sampler

SHOW = ("reward", "kl", "eval/solved", "completions/mean_length", "time/step")  # beside the progress bar
CURVES = ("reward", "rewards/*/mean", "eval/solved", "kl", "entropy", "completions/mean_length", "grad_norm",
          "sampling/sampling_logp_difference/max")  # fmt: skip


def num_steps(args: OnlineArgs, prompts: Prompts) -> int:
    """Return the number of rollout steps of the run: `--max_steps`, or as many as `--epochs` passes take."""
    return args.max_steps or math.ceil(args.epochs * len(prompts) / args.prompts_per_step)


def describe(args: OnlineArgs, prompts: Prompts, held_out: Prompts, rollouts: Sampler) -> list[str]:
    """Return lines about the data, the length, the engine and the updates of a run, and about its preset."""
    updates, ranks = args.updates_per_rollout, distributed.world_size()
    mode = [f"{updates} updates per rollout"] if updates > 1 else []
    mode += [f"weights up to {args.max_staleness} steps old"] if rollouts.prefetch_steps else []
    mode = f"off-policy: {', '.join(mode)}" if mode else "on-policy"
    steps = f"{num_steps(args, prompts)} steps on {ranks} rank{'s' * (ranks > 1)}"
    lines = [f"{prompts}, {held_out} held out, {steps}, {rollouts}, {mode}"]
    if args.PRESETS and args.preset:
        flags = " ".join(f"--{flag} {value}" for flag, value in args.PRESETS[args.preset].items())
        lines.append(f"preset {args.preset}: {flags}")
    return lines
