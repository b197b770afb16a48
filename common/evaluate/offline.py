"""Evaluations of the scripts that train on data alone: the accuracy on held-out rows with its
interval, and the door to completions of held-out prompts."""

import math
from collections.abc import Sized

from common.config.groups import OfflineArgs
from common.model.policy import Policy


def start_generation(policy: Policy, args: OfflineArgs, tokenizer, rows: list[dict]):
    """Return a started `Generation` that answers held-out `rows` with `--eval_generate`, else None.
    Call after the optimizer is made. Collective."""
    if not (args.eval_generate and args.eval_every):
        return None
    # Engines, rewards and environments: a run without the flag loads none of them.
    from common.evaluate.generation import Generation

    return Generation(policy, args, tokenizer, rows)


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a probability, estimated as a `fraction` of `count`
    independent trials."""
    z = 1.96
    center = fraction + z * z / (2 * count)
    spread = z * math.sqrt(fraction * (1 - fraction) / count + (z / 2 / count) ** 2)
    return (center - spread) / (1 + z * z / count), (center + spread) / (1 + z * z / count)


def held_out_accuracy(metrics: dict[str, float], held_out: Sized) -> str:
    """Return the accuracy of the last evaluation with its confidence interval, or nothing without
    an evaluation."""
    accuracy = metrics.get("eval_rewards/accuracies")
    if accuracy is None:
        return ""
    low, high = wilson_interval(accuracy, len(held_out))
    interval = f"95% interval {low:.3f} to {high:.3f}"
    return f"held-out accuracy {accuracy:.3f} on {len(held_out)} rows ({interval})"
