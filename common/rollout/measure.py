"""Measurements of a rollout: lengths, truncation and rewards.

Shapes: P prompts on this rank, G samples per prompt.
"""

import math
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.objectives.advantages import group_std
from common.parallel import distributed


def lengths(groups: list[Group]) -> Tensor:
    """Return the number of tokens of each completion, including those of an environment, [P, G]
    int64; of branches the longest counts."""
    return _table(groups, lambda sample: sample.longest, torch.int64)


def trained_counts(groups: list[Group]) -> Tensor:
    """Return the number of trained tokens of each completion, [P, G] int64."""
    return _table(groups, trained_count, torch.int64)


def trained_count(sample: Completion) -> int:
    """Return the number of trained tokens of a completion and its branches."""
    return sum(sum(sequence.loss_mask) for sequence in sample.sequences)


def truncated(groups: list[Group]) -> Tensor:
    """Return which completions are truncated, [P, G] bool."""
    return _table(groups, lambda sample: sample.finish_reason == "length", torch.bool)


def truncation_penalties(groups: list[Group], penalty: float) -> Tensor:
    """Return -penalty for truncated completions and 0 for others, [P, G] float64."""
    return -penalty * truncated(groups).double()


def _table(groups: list[Group], value: Callable[[Completion], float], dtype: torch.dtype) -> Tensor:
    """Return the values as [P, G]; [0, 1] without groups, which can be concatenated with any G."""
    table = torch.tensor([[value(sample) for sample in group] for group in groups], dtype=dtype)
    return table.reshape(len(groups), -1 if groups else 1)


def measure_groups(
    meter: Meter,
    groups: list[Group],
    rewards_PG: Tensor,
    named_rewards: dict[str, Tensor],
    warn: bool = False,
) -> None:
    """Measure rewards and lengths of this rank's groups; a reward of NaN is missing. If
    `warn`, for the first rollout of a run, rank 0 prints warnings; then collective."""
    if warn:
        finish_reasons = [[sample.finish_reason for sample in group] for group in groups]
        pairs = [
            list(zip(rewards_G, reasons_G, strict=True))
            for rewards_G, reasons_G in zip(rewards_PG.tolist(), finish_reasons, strict=True)
        ]
        ranks = distributed.gather_objects(pairs)
        for warning in warnings(list(chain(*ranks)), bool(named_rewards)):
            distributed.say(f"warning: in the first rollout {warning}")
    valid_PG = ~rewards_PG.isnan()
    std_P = group_std(rewards_PG)[:, 0]
    meter.mean("reward", rewards_PG.nansum(), valid_PG.sum())
    meter.mean("reward_std", std_P.sum(), len(std_P))
    meter.mean("frac_reward_zero_std", (std_P == 0).sum(), len(std_P))
    for group, valid_G, rewards_G in zip(groups, valid_PG, rewards_PG, strict=True):
        if name := group[0].row.get("_dataset"):
            meter.mean(f"reward/{name}", rewards_G.nansum(), valid_G.sum())
    for name, named_PG in named_rewards.items():
        meter.mean(f"rewards/{name}/mean", named_PG.nansum(), (~named_PG.isnan()).sum())
    for sample in chain(*groups):
        length = sum(len(sequence.completion_ids) for sequence in sample.sequences)
        meter.mean("completions/mean_length", length)
        meter.mean("completions/clipped_ratio", sample.finish_reason == "length")
        if sample.transcript:
            turns = sum(sequence.turns for sequence in sample.sequences)
            meter.mean("completions/mean_turns", turns)
        if sample.requests is not None:
            meter.mean("agent/requests", sample.requests)
            meter.mean("agent/branches", len(sample.sequences))
        for name, count in (sample.tool_counts or {}).items():
            meter.mean(f"tools/{name}", count)


def warnings(groups: list[list[tuple[float, str]]], has_rewards: bool = True) -> list[str]:
    """Return the problems of a rollout with the flags that may solve them. `groups`: (reward or
    NaN, finish_reason); `has_rewards`: whether the run has rewards."""
    reasons = [reason for group in groups for _, reason in group]
    problems = []
    if (cut_off := reasons.count("length")) == len(reasons) > 0:
        problems.append(
            "no completion ended with an EOS: see --chat_template, --prompt_format and"
            " --max_new_tokens"
        )
    elif cut_off > len(reasons) / 2:
        problems.append(
            f"{cut_off} of {len(reasons)} completions were truncated: see --max_new_tokens"
        )
    rewards = [[reward for reward, _ in group if not math.isnan(reward)] for group in groups]
    equal = [len(set(group)) == 1 for group in rewards if len(group) > 1]
    all_rewards = list(chain(*rewards))
    advice = "see --reward, the answer format in the prompt, and --temperature"
    if has_rewards and reasons and not all_rewards:
        problems.append(
            "no completion has a reward: does the function of --reward return a number for each?"
        )
    elif len(all_rewards) > 1 and len(set(all_rewards)) == 1:
        problems.append(f"all {len(all_rewards)} rewards are {all_rewards[0]:g}: {advice}")
    elif equal and sum(equal) >= 0.9 * len(equal):
        problems.append(f"in {sum(equal)} of {len(equal)} groups all rewards are equal: {advice}")
    return problems
