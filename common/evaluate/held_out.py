"""Evaluation during training in scripts that sample: complete the held-out prompts, reward the
completions, and average."""

from itertools import chain

from common.evaluate.estimators import pass_at_k, shown_ks, solved
from common.metrics.meter import Meter
from common.packs.sample import Group
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.prompts import Prompts
from common.rollout.sampler import Sampler


def evaluate_prompts(
    sampler: Sampler, step: int, held_out: Prompts, rewards: Rewards
) -> dict[str, float]:
    """Sample `--eval_samples` completions of each held-out prompt, greedily or at
    `--eval_temperature`, and return their metrics; {} without prompts.

    `eval/solved` is the fraction of completions whose first reward is at least 1, and
    `eval/solved_stderr` its standard error over the prompts. `eval/reward` is the mean weighted sum
    of the rewards. `eval/pass_at_k` is the estimated fraction of prompts that at least one of k
    completions solves. A completion whose reward failed is not solved, and `eval/failed` counts
    such completions. Those to which no reward applies are in no fraction; `eval/unscored` counts
    them. If rows name their data set, `metric/name` is the metric of that set alone. Collective."""
    if not held_out:
        return {}
    groups = sampler.complete_held_out(step, held_out)
    rewards_PG, named_rewards, numbers = rewards.wait(groups, Meter())
    first_PG = rewards.first(named_rewards)
    means = {"eval/solved": solved(first_PG, groups), "eval/reward": rewards_PG}
    means |= {f"eval/rewards/{name}/mean": named_PG for name, named_PG in named_rewards.items()}
    means |= {f"eval/rewards/{name}": number_PG for name, number_PG in numbers.items()}
    say_failures(f"evaluation after step {step}", groups)
    meter = Meter()
    for i, group in enumerate(groups):
        solved_G = means["eval/solved"][i]
        solved_G = solved_G[~solved_G.isnan()]
        row = group[0].row
        for end in ["", f"/{row['_dataset']}"] if "_dataset" in row else [""]:
            for name, values_PG in means.items():
                valid_G = ~values_PG[i].isnan()
                meter.mean(f"{name}{end}", values_PG[i].nansum(), valid_G.sum())
            for k in shown_ks(len(solved_G))[1:]:
                right = int(solved_G.sum())
                meter.mean(f"eval/pass_at_{k}{end}", pass_at_k(len(solved_G), right, k))
            meter.sum(f"eval/failed{end}", sum(bool(sample.reward_errors) for sample in group))
            meter.sum(f"eval/unscored{end}", len(group) - len(solved_G))
            if len(solved_G):
                meter.standard_error(f"eval/solved_stderr{end}", solved_G.mean())
    return meter.reduce()


def say_failures(what: str, groups: list[Group]) -> None:
    """Print how many completions of all ranks have a failed reward, and the first error.
    Collective."""
    samples = list(chain(*groups))
    failures = [
        f"{name} on {sample.row['_source']}: {error}"
        for sample in samples
        for name, error in list(sample.reward_errors.items())[:1]
    ]
    of_ranks = distributed.gather_objects((len(samples), failures))
    count = sum(number for number, _ in of_ranks)
    failures = list(chain(*(each for _, each in of_ranks)))
    if failures:
        problem = f"{what}: {len(failures)} of {count} completions have a reward that failed"
        distributed.say(f"{problem} and count as not solved; the first: {failures[0]}")
