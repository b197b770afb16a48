"""Greedy completions of held-out prompts, and their rewards."""

import math
from itertools import product

from common.metrics.meter import Meter
from common.rewards.total import Rewards
from common.rollout.base_sampler import Sampler
from common.rollout.prompts import Prompts


def evaluate_prompts(
    rollouts: Sampler, step: int, held_out: Prompts, rewards: Rewards
) -> dict[str, float]:
    """Return the metrics of greedy completions of all held-out prompts after `step` steps; {}
    without prompts.

    `eval/solved` is the fraction of completions whose first reward is at least 1, `eval/reward` the
    mean weighted sum. If rows name their data set, `metric/name` is the metric of that set alone.
    Collective."""
    if not held_out:
        return {}
    meter = Meter()
    groups = rollouts.sample_now(step, held_out, [0] * len(held_out), n=1, temperature=0.0)
    rewards_PG, named_rewards, numbers = rewards(groups, Meter())
    first_PG = rewards.first(named_rewards)
    means = {
        "eval/solved": first_PG.ge(1).double().masked_fill(first_PG.isnan(), math.nan),
        "eval/reward": rewards_PG,
    }
    means |= {f"eval/rewards/{name}/mean": named_PG for name, named_PG in named_rewards.items()}
    means |= {f"eval/rewards/{name}": number_PG for name, number_PG in numbers.items()}
    for i, (sample,) in enumerate(groups):
        ends = ["", f"/{sample.row['_dataset']}"] if "_dataset" in sample.row else [""]
        for end, (name, values_PG) in product(ends, means.items()):
            meter.mean(f"{name}{end}", values_PG[i].nansum(), (~values_PG[i].isnan()).sum())
    return meter.reduce()
