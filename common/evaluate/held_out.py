"""Evaluation on held-out prompts by generation, and an accuracy with its interval for the
console."""

import math
from collections.abc import Sized

from common.evaluate.estimators import pass_at_k, shown_ks
from common.metrics.meter import Meter
from common.rewards.total import Rewards
from common.rollout.prompts import Prompts
from common.rollout.sampler import Sampler


def evaluate_prompts(
    rollouts: Sampler, step: int, held_out: Prompts, rewards: Rewards
) -> dict[str, float]:
    """Return the metrics of `--eval_samples` completions of each held-out prompt after `step`
    steps, greedy or sampled at `--eval_temperature`; {} without prompts.

    `eval/solved` is the fraction of completions whose first reward is at least 1,
    `eval/solved_stderr` its standard error over the prompts, `eval/reward` the mean weighted sum,
    and `eval/pass_at_k` the fraction of prompts that one of k completions solves. If rows name
    their data set, `metric/name` is the metric of that set alone. Collective."""
    if not held_out:
        return {}
    groups = rollouts.answer(step, held_out)
    rewards_PS, named_rewards, numbers = rewards(groups, Meter())
    first_PS = rewards.first(named_rewards)
    means = {
        "eval/solved": first_PS.ge(1).double().masked_fill(first_PS.isnan(), math.nan),
        "eval/reward": rewards_PS,
    }
    means |= {f"eval/rewards/{name}/mean": named_PS for name, named_PS in named_rewards.items()}
    means |= {f"eval/rewards/{name}": number_PS for name, number_PS in numbers.items()}
    meter = Meter()
    for i, group in enumerate(groups):
        solved_S = means["eval/solved"][i]
        solved_S = solved_S[~solved_S.isnan()]
        row = group[0].row
        for end in ["", f"/{row['_dataset']}"] if "_dataset" in row else [""]:
            for name, values_PS in means.items():
                valid_S = ~values_PS[i].isnan()
                meter.mean(f"{name}{end}", values_PS[i].nansum(), valid_S.sum())
            for k in shown_ks(len(solved_S))[1:]:
                solved = int(solved_S.sum())
                meter.mean(f"eval/pass_at_{k}{end}", pass_at_k(len(solved_S), solved, k))
            if len(solved_S):
                meter.standard_error(f"eval/solved_stderr{end}", solved_S.mean())
    return meter.reduce()


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
