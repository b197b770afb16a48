"""Measurements of a rollout that scripts log or subtract: lengths, truncation and rewards.

Shapes: P prompts on this rank, G samples per prompt."""

import math
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from common.metrics.meter import Meter
from common.objectives.advantages import group_std, unequal
from common.packs.sample import Completion, Group
from common.parallel import distributed


def lengths(groups: list[Group]) -> Tensor:
    """Return the number of tokens of each completion, [P, G] int64. An environment's answers count
    too. If an agent's completion has several branches, this is the length of the longest."""
    return _table(groups, lambda sample: sample.longest, torch.int64)


def trained_counts(groups: list[Group]) -> Tensor:
    """Return the number of trained tokens of each completion, with its branches, [P, G] int64."""
    return _table(groups, lambda x: sum(sum(each.loss_mask) for each in x.sequences), torch.int64)


def truncation_penalties(groups: list[Group], penalty: float) -> Tensor:
    """Return -penalty for truncated completions and 0 for others, [P, G] float64."""
    return _table(groups, lambda x: -penalty if x.finish_reason == "length" else 0, torch.float64)


def _table(groups: list[Group], value: Callable[[Completion], float], dtype: torch.dtype) -> Tensor:
    """Return `value` of each sample, [P, G]. Without groups the shape is [0, 1], since this rank
    does not know G; `distributed.join_rows` accepts that."""
    table = torch.tensor([[value(sample) for sample in group] for group in groups], dtype=dtype)
    return table.reshape(len(groups), -1 if groups else 1)


def measure_groups(
    meter: Meter,
    groups: list[Group],
    rewards_PG: Tensor,
    named_rewards: dict[str, Tensor],
    warn: bool = False,
) -> None:
    """Log rewards and lengths of this rank's groups. A reward of NaN is missing and not counted.
    `warn`: rank 0 prints `first_rollout_warnings`; then collective."""
    if warn:
        for warning in first_rollout_warnings(groups, rewards_PG, bool(named_rewards)):
            distributed.say(f"warning: in the first rollout {warning}")
    valid_PG = ~rewards_PG.isnan()
    std_P = group_std(rewards_PG)[:, 0]
    meter.mean("reward", rewards_PG.nansum(), valid_PG.sum())
    meter.mean("reward_std", std_P.sum(), len(std_P))
    meter.mean("frac_reward_zero_std", (~unequal(rewards_PG)).sum(), len(std_P))
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


def first_rollout_warnings(
    groups: list[Group], rewards_PG: Tensor, has_rewards: bool = True
) -> list[str]:
    """Return what looks wrong in a rollout of all ranks, with the flags that may solve it.
    `has_rewards`: whether the run has rewards. Collective."""
    ends = [sample.finish_reason for sample in chain(*groups)]
    cut_off = int(distributed.all_sum(ends.count("length")))
    samples = int(distributed.all_sum(len(ends)))
    rewards = [x for x in chain(*distributed.gather_objects(rewards_PG.flatten().tolist()))]
    rewards = [x for x in rewards if not math.isnan(x)]
    problems = []
    if samples and cut_off == samples:
        flags = "--chat_template, --prompt_format and --max_new_tokens"
        problems.append(f"no completion ended with an EOS: see {flags}")
    elif cut_off > samples / 2:
        problems.append(f"{cut_off} of {samples} completions were truncated: see --max_new_tokens")
    if has_rewards and samples and not rewards:
        problems.append("no completion has a reward: does --reward return a number for each?")
    elif len(rewards) > 1 and not unequal(torch.tensor([rewards], dtype=torch.float64)).any():
        advice = "see --reward, the answer format in the prompt, and --temperature"
        problems.append(f"all {len(rewards)} rewards are {rewards[0]:g}: {advice}")
    return problems
