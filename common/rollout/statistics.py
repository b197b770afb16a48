"""Measurements of a rollout: agreement of engine and trainer, rewards and lengths, held-out scores.

Shapes: P prompts on this rank, G samples per prompt, T packed tokens in one micro-batch.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain, product

import torch
from torch import Tensor

from common.config.groups import OnlineArgs
from common.data.packing import Minibatches, PackedBatch, pack_minibatches
from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.model.policy import Policy, compute_dtype
from common.model.scoring import with_logprobs
from common.objectives.advantages import centre_groups
from common.parallel import distributed
from common.rewards.scoring import Rewards
from common.rollout.prompts import Prompts
from common.rollout.sampler import Sampler


def gather_groups(x_PG: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the rows [P, ...] of all ranks, sorted by the positions of their groups in the step. Results computed from
    them do not depend on the number of ranks. A rank may have no groups. Collective."""
    ranks = distributed.gather_objects((list(positions), x_PG))
    order = torch.tensor([position for positions_of_rank, _ in ranks for position in positions_of_rank]).argsort()
    return torch.cat([x for _, x in ranks if len(x)])[order]


def lengths(groups: list[Group]) -> Tensor:
    """Return the number of tokens of each completion, including those of an environment, [P, G] int64."""
    return _table(groups, lambda sample: len(sample.completion_ids), torch.int64)


def trained_counts(groups: list[Group]) -> Tensor:
    """Return the number of trained tokens of each completion, [P, G] int64."""
    return _table(groups, lambda sample: sum(sample.loss_mask), torch.int64)


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


def count_trained(minibatch: list[PackedBatch]) -> tuple[Tensor, Tensor]:
    """Count the trained tokens of a *global* minibatch and the sequences with any: int64, at least 1. Collective."""
    tokens = distributed.all_sum(sum(mb.loss_mask_T.sum() for mb in minibatch))
    sequences = distributed.all_sum(sum(any(sample.loss_mask) for mb in minibatch for sample in mb.samples))
    return tokens.clamp(min=1), sequences.clamp(min=1)


# ---- engine against trainer ----


def check_agreement(minibatches: Minibatches, step: int, args: OnlineArgs, device: torch.device) -> None:
    """Compare the log-probs of engine and trainer on all tokens that were sampled from the weights after `step` steps.
    Collective.

    This detects a wrong temperature, a stale head or a missing weight before the update. Rounding passes: in bfloat16
    the largest difference of many tokens is large, but the mean and the 99.9th percentile are small. Raises `RunError`
    if the 99.9th percentile is above `--max_logprob_difference`, or the mean above a tenth of it.
    """
    limit = args.max_logprob_difference or (1e-3 if compute_dtype(args, device) == torch.float32 else 0.5)
    mine = [torch.zeros(0)]
    for mb in chain(*minibatches):
        if mb.samples:
            assert mb.versions_T is not None, "samples without the version of their weights"
            fresh_T = mb.loss_mask_T & (mb.versions_T == step)
            mine.append((mb.old_logprobs_T - mb.rollout_logprobs_T)[fresh_T].abs().cpu())
    differences = torch.cat(distributed.gather_objects(torch.cat(mine))).nan_to_num(nan=torch.inf).sort().values
    if not (count := len(differences)):  # all samples are from older weights
        return
    mean, high = differences.mean().item(), differences[math.ceil(0.999 * count) - 1].item()
    if high > limit or mean > limit / 10:
        found = f"mean {mean:.2g} nats, 99.9th percentile {high:.2g} (--max_logprob_difference {limit:g})"
        raise distributed.RunError(f"engine and trainer log-probs differ: {found}; see docs/troubleshooting.md")


def check_rollout(model: Policy, groups: list[Group], step: int, args: OnlineArgs) -> None:
    """Run `check_agreement` on whole groups, for a script that trains on some of the samples only. Collective."""
    minibatches = pack_minibatches(groups, 1, args.pack_tokens, model.device)
    minibatches = with_logprobs(minibatches, args.temperature, old=model)
    check_agreement(minibatches, step, args, model.device)


def measure_mismatch(meter: Meter, old_logprobs_T: Tensor, mb: PackedBatch) -> None:
    """Measure how far the probabilities of engine and trainer differ on the sampled tokens of a micro-batch: log-probs,
    importance ratios and their effective sample size."""
    if not mb.samples:  # an empty pack, perhaps without rollout_logprobs_T
        return
    mask_T, name = mb.loss_mask_T, "sampling/importance_sampling_ratio"
    difference_T = torch.where(mask_T, old_logprobs_T - mb.rollout_logprobs_T, 0.0)
    ratio_T = difference_T.exp()
    meter.masked_mean("sampling/sampling_logp_difference/mean", difference_T.abs(), mask_T)
    meter.max("sampling/sampling_logp_difference/max", difference_T.abs().max())
    meter.masked_mean(f"{name}/mean", ratio_T, mask_T)
    meter.min(f"{name}/min", ratio_T.masked_fill(~mask_T, math.inf).min())
    meter.max(f"{name}/max", ratio_T.masked_fill(~mask_T, -math.inf).max())
    meter.effective_fraction("sampling/ess", ratio_T, mask_T)


# ---- rewards ----


def measure_groups(
    meter: Meter, groups: list[Group], rewards_PG: Tensor, parts: dict[str, Tensor], first: bool = False
) -> None:
    """Measure rewards and lengths of this rank's groups; a reward of NaN is missing. For the `first` rollout of a run,
    rank 0 prints warnings; then collective."""
    if first:
        finish_reasons = [[sample.finish_reason for sample in group] for group in groups]
        pairs = [list(zip(*both, strict=True)) for both in zip(rewards_PG.tolist(), finish_reasons, strict=True)]
        ranks = distributed.gather_objects(pairs)
        for warning in warnings(list(chain(*ranks)), bool(parts)):
            distributed.say(f"warning: in the first rollout {warning}")
    valid_PG = ~rewards_PG.isnan()
    squares_P = centre_groups(rewards_PG).square().sum(-1)
    std_P = (squares_P / (valid_PG.sum(-1) - 1).clamp(min=1)).sqrt()
    meter.mean("reward", rewards_PG.nansum(), valid_PG.sum())
    meter.mean("reward_std", std_P.sum(), len(std_P))
    meter.mean("frac_reward_zero_std", (std_P == 0).sum(), len(std_P))
    for group, valid_G, rewards_G in zip(groups, valid_PG, rewards_PG, strict=True):
        if name := group[0].row.get("_dataset"):
            meter.mean(f"reward/{name}", rewards_G.nansum(), valid_G.sum())
    for name, part_PG in parts.items():
        meter.mean(f"rewards/{name}/mean", part_PG.nansum(), (~part_PG.isnan()).sum())
    for sample in chain(*groups):
        meter.mean("completions/mean_length", len(sample.completion_ids))
        meter.mean("completions/clipped_ratio", sample.finish_reason == "length")
        if sample.transcript:
            meter.mean("completions/mean_turns", sample.turns)


def warnings(groups: list[list[tuple[float, str]]], rewarded: bool = True) -> list[str]:
    """Return the problems of a rollout with the flags that may solve them. `groups`: (reward or NaN, finish_reason);
    `rewarded`: whether the run has rewards."""
    reasons, found = [reason for group in groups for _, reason in group], []
    if (cut_off := reasons.count("length")) == len(reasons) > 0:
        found.append("no completion ended with an EOS: see --chat_template, --prompt_format and --max_new_tokens")
    elif cut_off > len(reasons) / 2:
        found.append(f"{cut_off} of {len(reasons)} completions were truncated: see --max_new_tokens")
    rewards = [[reward for reward, _ in group if not math.isnan(reward)] for group in groups]
    equal = [len(set(group)) == 1 for group in rewards if len(group) > 1]
    everything = list(chain(*rewards))
    what = "see --reward, the answer format in the prompt, and --temperature"
    if rewarded and reasons and not everything:
        found.append("no completion has a reward: does the function of --reward return a number for each?")
    elif len(everything) > 1 and len(set(everything)) == 1:
        found.append(f"all {len(everything)} rewards are {everything[0]:g}: {what}")
    elif equal and sum(equal) >= 0.9 * len(equal):
        found.append(f"in {sum(equal)} of {len(equal)} groups all rewards are equal: {what}")
    return found


def evaluate(rollouts: Sampler, step: int, held_out: Prompts, rewards: Rewards) -> dict[str, float]:
    """Return the metrics of greedy completions of all held-out prompts after `step` steps; {} without prompts.

    `eval/solved` is the fraction of completions whose first reward is at least 1, `eval/reward` the mean weighted sum.
    If rows name their data set, `metric/name` is the metric of that set alone. Collective."""
    if not held_out:
        return {}
    meter = Meter()
    groups = rollouts.sample_now(step, held_out, [0] * len(held_out), n=1, temperature=0.0)
    rewards_PG, parts, numbers = rewards(groups, Meter())
    first_PG = rewards.first(parts)
    means = {"eval/solved": first_PG.ge(1).double().masked_fill(first_PG.isnan(), math.nan), "eval/reward": rewards_PG}
    means |= {f"eval/rewards/{name}/mean": part_PG for name, part_PG in parts.items()}
    means |= {f"eval/rewards/{name}": number_PG for name, number_PG in numbers.items()}
    for i, (sample,) in enumerate(groups):
        ends = ["", f"/{sample.row['_dataset']}"] if "_dataset" in sample.row else [""]
        for end, (name, values_PG) in product(ends, means.items()):
            meter.mean(f"{name}{end}", values_PG[i].nansum(), (~values_PG[i].isnan()).sum())
    return meter.reduce()
