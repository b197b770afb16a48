"""Evaluation in scripts that train on data alone (sft.py, dpo.py, rm.py, ...): the accuracy on
held-out rows with its interval, and the start of `--eval_generate`."""

import math
from collections.abc import Sized

from common.config.groups import OfflineArgs
from common.model.policy import Policy


def start_generation(policy: Policy, args: OfflineArgs, tokenizer, rows: list[dict]):
    """Return a started `Generation` that samples answers to held-out `rows`, or None without
    `--eval_generate`. Make the optimizer first. Collective."""
    if not (args.eval_generate and args.eval_every):
        return None
    # This imports engines, rewards and environments, which a run without the flag does not need.
    from common.evaluate.generation import Generation

    return Generation(policy, args, tokenizer, rows)


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a probability that was estimated as `fraction` in `count`
    independent trials."""
    z = 1.96
    center = fraction + z * z / (2 * count)
    spread = z * math.sqrt(fraction * (1 - fraction) / count + (z / 2 / count) ** 2)
    return (center - spread) / (1 + z * z / count), (center + spread) / (1 + z * z / count)


def held_out_accuracy(metrics: dict[str, float], held_out: Sized) -> str:
    """Return a line with the accuracy of the last evaluation and its confidence interval; empty
    without an evaluation."""
    accuracy = metrics.get("eval_rewards/accuracies")
    if accuracy is None:
        return ""
    low, high = wilson_interval(accuracy, len(held_out))
    interval = f"95% interval {low:.3f} to {high:.3f}"
    return f"held-out accuracy {accuracy:.3f} on {len(held_out)} rows ({interval})"
