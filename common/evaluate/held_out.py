"""Evaluation on held-out prompts by generation, in all scripts, and an accuracy with its interval
for the console."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sized
from itertools import chain

from pydantic.dataclasses import dataclass

from common.config.groups import ImageArgs, TrainArgs
from common.config.online import OnlineArgs
from common.evaluate.estimators import pass_at_k, shown_ks, solved
from common.metrics.meter import Meter
from common.model.hub import context_length
from common.model.policy import Policy
from common.packs.order import Order
from common.packs.sample import Group
from common.parallel import distributed
from common.rewards.total import Rewards
from common.rollout.prompts import Prompts, encode_prompts, prompt_columns
from common.rollout.sampler import ColocatedEngine, Sampler
from common.text.encode import Encoder
from common.text.rows import held_out_rows, train_and_eval_rows


def evaluate_prompts(
    rollouts: Sampler, step: int, held_out: Prompts, rewards: Rewards
) -> dict[str, float]:
    """Return the metrics of `--eval_samples` completions of each held-out prompt after `step`
    steps, greedy or sampled at `--eval_temperature`; {} without prompts.

    `eval/solved` is the fraction of completions whose first reward is at least 1,
    `eval/solved_stderr` its standard error over the prompts, `eval/reward` the mean weighted sum,
    and `eval/pass_at_k` the fraction of prompts that one of k completions solves. A completion
    whose reward failed is not solved, and `eval/failed` counts them; `eval/unscored` counts those
    that are in no fraction, because no reward applies. If rows name their data set, `metric/name`
    is the metric of that set alone. Collective."""
    if not held_out:
        return {}
    groups = rollouts.complete_held_out(step, held_out)
    rewards_PS, named_rewards, numbers = rewards.wait(groups, Meter())
    first_PS = rewards.first(named_rewards)
    means = {
        "eval/solved": solved(first_PS, groups),
        "eval/reward": rewards_PS,
    }
    means |= {f"eval/rewards/{name}/mean": named_PS for name, named_PS in named_rewards.items()}
    means |= {f"eval/rewards/{name}": number_PS for name, number_PS in numbers.items()}
    say_failures(f"evaluation after step {step}", groups)
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
                right = int(solved_S.sum())
                meter.mean(f"eval/pass_at_{k}{end}", pass_at_k(len(solved_S), right, k))
            meter.sum(f"eval/failed{end}", sum(bool(sample.reward_errors) for sample in group))
            meter.sum(f"eval/unscored{end}", len(group) - len(solved_S))
            if len(solved_S):
                meter.standard_error(f"eval/solved_stderr{end}", solved_S.mean())
    return meter.reduce()


def say_failures(what: str, groups: list[Group]) -> None:
    """Print how many completions of all ranks have a reward that failed, and the first error.
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


# ---- scripts that do not sample ----


class Generation:
    """`--eval_generate` of a script that trains on data alone: an engine, prompts and rewards.
    Without the flag, nothing."""

    def __init__(self, policy: Policy, args: TrainArgs, tokenizer):
        """Start the engine and load the prompts. Call after the optimizer is made. Collective.

        Raises `ValueError` for rows without a prompt or without the columns that the reward needs.
        """
        self.sampler = None
        if not (args.eval_generate and args.eval_every):
            return
        online = sampling_args(args)
        if args.eval_dataset is None:
            rows = train_and_eval_rows(args)[1]
        else:
            rows = held_out_rows(args)
        # As in the data: those of samples may be without some, or changed.
        rows = first_of_each_set(rows, args.eval_generate)
        columns = prompt_columns(online, rows)
        room = context_length(policy.path, args) - online.max_new_tokens
        self.prompts = encode_prompts(rows, columns, Encoder(tokenizer, args), room, online)
        if len(self.prompts) < args.eval_generate:
            distributed.say(f"--eval_generate {args.eval_generate} answers {self.prompts}")
        self.rewards = Rewards(online, self.prompts.rows, tokenizer, policy.device)
        order = Order({"": range(len(rows))}, args.seed)  # nothing is drawn
        engine = ColocatedEngine(policy, online, tokenizer, on_complete=self.rewards.begin)
        self.sampler = Sampler(self.prompts, online, order, engine)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return `eval/solved` and `eval/reward` of the policy after `step` steps, see
        `evaluate_prompts`. Collective."""
        if self.sampler is None:
            return {}
        return evaluate_prompts(self.sampler, step, self.prompts, self.rewards)

    def close(self) -> None:
        """Shut the engine down, before `distributed.cleanup`. Collective."""
        if self.sampler is not None:
            self.sampler.close()


def first_of_each_set(rows: list[dict], count: int) -> list[dict]:
    """Return `count` rows: the first ones of every held-out set, equally many of each if they have
    so many."""
    seen: Counter = Counter()
    turns = []
    for i, row in enumerate(rows):
        name = row.get("_dataset")
        turns.append((seen[name], i))
        seen[name] += 1
    return [rows[i] for i in sorted(i for _, i in sorted(turns)[:count])]


@dataclass
class AnswerArgs(ImageArgs, OnlineArgs):
    """Flags of the evaluations of a script that does not sample."""


def sampling_args(args: TrainArgs) -> AnswerArgs:
    """Return the flags with which a script that does not sample answers held-out prompts."""
    names = {field.name for field in dataclasses.fields(AnswerArgs)}
    shared = {name: value for name, value in vars(args).items() if name in names}
    return AnswerArgs(**shared | dict(overlong="drop"))


# ---- accuracy on the console ----


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
