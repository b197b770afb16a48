"""The length of a run over a data set, its description on the console, and its result on held-out pairs."""

import math
from collections import Counter

from common.config.groups import TrainArgs
from common.data.token_cache import Samples
from common.metrics.logger import wilson_interval
from common.parallel import distributed
from common.train.run import Run


def num_steps(args: TrainArgs, samples: Samples) -> int:
    """Return the number of optimizer steps of the run: `--max_steps`, or as many as `--epochs` passes take."""
    return args.max_steps or math.ceil(args.epochs * len(samples) / args.batch_size)


def describe(
    args: TrainArgs, samples: Samples, eval_samples: Samples, counts: Counter, eval_counts: Counter
) -> list[str]:
    """Return lines about the rows that were dropped or changed, the data and the length of a run."""
    named = (("training", counts), ("held-out", eval_counts))
    lines = [f"{count} {name} rows {reason}" for name, found in named for reason, count in found.items()]
    steps, ranks = num_steps(args, samples), distributed.world_size()
    on_ranks = f"{ranks} rank{'s' * (ranks > 1)}"
    return [*lines, f"{samples.num_rows} training rows, {len(eval_samples)} held out, {steps} steps on {on_ranks}"]


def held_out_accuracy(run: Run, held_out: Samples) -> str:
    """Return the accuracy of the last evaluation with its confidence interval, or nothing without an evaluation."""
    if (accuracy := run.latest.get("eval_rewards/accuracies")) is None:
        return ""
    low, high = wilson_interval(accuracy, len(held_out))
    return f"held-out accuracy {accuracy:.3f} on {len(held_out)} rows (95% interval {low:.3f} to {high:.3f})"
