"""Results on held-out rows as text for the console: an accuracy with its confidence interval, and
signs that a preference loss unlearns good answers."""

import math
from collections.abc import Sized


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


def signs_of_unlearning(
    beta: float, first: dict[str, float], metrics: dict[str, float], answered: int,
    referenced: bool = True,
) -> str:  # fmt: skip
    """Return what an evaluation shows if the model unlearns good answers while the preference loss
    falls, else an empty text: `eval/solved`, of so many `answered` prompts, is two standard errors
    below its `first` value, or the log-prob of chosen completions is below the reference's by a nat
    and a tenth. `referenced`: whether `rewards` are `beta` x summed log-ratios."""
    signs = []
    before = first.get("eval/solved", 0.0)
    solved = metrics.get("eval/solved", 1.0)
    standard_error = math.sqrt(before * (1 - before) / max(1, answered))
    if before - solved > 2 * standard_error:
        signs.append(f"eval/solved fell from {before:.3g} to {solved:.3g}")
    logp = metrics.get("eval_logps/chosen", 0.0)
    ratio = metrics.get("eval_rewards/chosen", 0.0) / beta if referenced else 0.0
    reference_logp = logp - ratio
    if -ratio > max(1.0, 0.1 * abs(reference_logp)):
        signs.append(
            f"the log-prob of chosen completions fell from {reference_logp:.3g} to {logp:.3g}"
        )
    return " and ".join(signs)
