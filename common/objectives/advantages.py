"""Rewards -> advantages, as pure functions in float64. Equal rewards give exactly zero.

Statistics beyond a group need the groups of *all* ranks. A NaN reward is missing: it is excluded
from all statistics and has advantage 0. `ADVANTAGES` is the table of those by group.

Shapes: P prompts, B prompts of all ranks, G samples per prompt, K reward functions, T packed
tokens, N sequences.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6  # added to standard deviations
PASS_K = 4  # of `pass_at_k`: number of completions of which the best one counts

# ---- the table: one number per completion, from its group or from the batch ----


class Scores(NamedTuple):
    """Rewards of the completions of all ranks."""

    rewards_BG: Tensor
    """total reward"""
    each_KBG: Tensor | None = None
    """the K rewards that it adds up, times `weights_K`"""
    weights_K: Sequence[float] = ()
    tokens_BG: Tensor | None = None
    """number of trained tokens"""


def group(x: Scores) -> Tensor:
    """GRPO (arXiv:2402.03300): (r - mean) / std of the group."""
    return centre_groups(x.rewards_BG) / (group_std(x.rewards_BG) + EPSILON)


def group_mean(x: Scores) -> Tensor:
    """Dr. GRPO (arXiv:2503.20783): r - mean, because the std favours very easy and hard prompts."""
    return centre_groups(x.rewards_BG)


def group_ratio(x: Scores) -> Tensor:
    """MaxRL (arXiv:2602.02710): (r - mean) / mean, for rewards >= 0."""
    if (x.rewards_BG < 0).any():
        raise ValueError("--advantage group_ratio: a reward (or a penalty) is negative")
    centred_BG = centre_groups(x.rewards_BG)
    return (centred_BG / (x.rewards_BG - centred_BG + EPSILON)).nan_to_num()


def group_mean_by_length(x: Scores) -> Tensor:
    """OPO (arXiv:2505.23585): r - mean, where the mean is weighted by length."""
    return centre_groups(x.rewards_BG, x.tokens_BG)


def leave_one_out(x: Scores) -> Tensor:
    """RLOO (arXiv:2402.14740 Eq. 7): r - mean of the others, which is n / (n - 1) (r - mean)."""
    size_B1 = (~x.rewards_BG.isnan()).sum(-1, keepdim=True)
    return centre_groups(x.rewards_BG) * size_B1 / (size_B1 - 1).clamp(min=1)


def pass_at_k(x: Scores) -> Tensor:
    """PKPO (arXiv:2505.15201): `best_of_k` with k = 4."""
    return best_of_k(x.rewards_BG, PASS_K)


def group_mean_batch_std(x: Scores) -> Tensor:
    """LitePPO (arXiv:2508.08221): (r - mean of the group) / std of the whole batch."""
    known = x.rewards_BG[~x.rewards_BG.isnan()].double()
    return centre_groups(x.rewards_BG) / ((known.std() if len(known) > 1 else 0.0) + EPSILON)


def gdpo(x: Scores) -> Tensor:
    """arXiv:2601.05242: `group` of each reward; their weighted sum, whitened over the batch."""
    each_KBG = x.each_KBG.masked_fill(x.rewards_BG.isnan(), math.nan)
    each_K = [group(Scores(rewards_BG)) for rewards_BG in each_KBG]
    total_BG = sum(w * A_BG for w, A_BG in zip(x.weights_K, each_K, strict=True))
    return whiten(total_BG, (~each_KBG.isnan().all(0)).long())


def best_of_k(rewards_BG: Tensor, k: int) -> Tensor:
    """Return k times the gain of each completion: the expected best reward of it and k - 1 others
    of its group, less that of k others; 0 in a group of k or fewer (PKPO, arXiv:2505.15201 Eq. 29;
    docs/losses.md has the difference). With it the policy gradient is unbiased for the best of k
    samples. [B, G], float64. Notation: n completions of a group from the worst to the best."""
    out_BG = torch.zeros_like(rewards_BG, dtype=torch.float64)
    centred_BG = centre_groups(rewards_BG)
    for row, valid_G in enumerate(~rewards_BG.isnan()):
        n = int(valid_G.sum())
        if n <= k:
            continue
        r_n, order_n = centred_BG[row].masked_fill(~valid_G, torch.inf).sort()
        r_n = r_n[:n]
        # sets of k whose best completion is j; those of them that have a given worse one
        sets_n = torch.tensor([math.comb(j, k - 1) for j in range(n)]).double()
        with_worse_n = sets_n * (k - 1) / torch.arange(n).clamp(min=1)
        better_n = (with_worse_n * r_n).sum() - (with_worse_n * r_n).cumsum(0)
        best_n = (sets_n * r_n + better_n) / math.comb(n - 1, k - 1)
        best = (sets_n * r_n).sum() / math.comb(n, k)  # expected best reward of any k
        out_BG[row, order_n[:n]] = (best_n - best) * k * n / (n - k)
    return out_BG


ALL = (group, group_mean, group_ratio, group_mean_by_length, leave_one_out, pass_at_k,
       group_mean_batch_std, gdpo)  # fmt: skip
ADVANTAGES: dict[str, Callable[[Scores], Tensor]] = {each.__name__: each for each in ALL}

# ---- statistics of groups ----


def centre_groups(rewards_PG: Tensor, weights_PG: Tensor | None = None) -> Tensor:
    """Return A = r - mean_G r for each completion (Dr. GRPO, arXiv:2503.20783); the mean may be
    weighted. Groups with equal rewards, or a single reward, get exactly 0. Shape [P, G],
    float64."""
    rewards_PG = rewards_PG.double()
    valid_PG = ~rewards_PG.isnan()
    weights_PG = valid_PG if weights_PG is None else weights_PG * valid_PG
    total_P1 = (weights_PG * rewards_PG).nansum(-1, keepdim=True)
    mean_P1 = total_P1 / weights_PG.sum(-1, keepdim=True).clamp(min=1)
    # The mean of equal rewards may be rounded, so the comparison is between the rewards.
    return torch.where(valid_PG & unequal(rewards_PG)[:, None], rewards_PG - mean_P1, 0.0)


def group_std(rewards_PG: Tensor) -> Tensor:
    """Return the sample standard deviation (division by n - 1) of the rewards of each group;
    exactly 0 for equal rewards or a single one. Shape [P, 1], float64."""
    size_P1 = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    squares_P1 = centre_groups(rewards_PG).square().sum(-1, keepdim=True)
    return (squares_P1 / (size_P1 - 1).clamp(min=1)).sqrt()


def unequal(rewards_PG: Tensor) -> Tensor:
    """Return which groups have at least two different rewards; the others have zero gradient. Bool,
    [P]."""
    highest_P = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1)
    return highest_P > rewards_PG.nan_to_num(nan=torch.inf).amin(-1)


def whiten(x: Tensor, counts: Tensor) -> Tensor:
    """Return (x - mean) / (std + eps), where x[i] has the weight `counts[i]`; 0 where the weight is
    0, and everywhere if all counted x are equal. Float64."""
    x = x.double()
    counted = counts > 0
    if not counted.any() or (x[counted] == x[counted][0]).all():
        return torch.zeros_like(x)
    total = counts.sum()
    centred = torch.where(counted, x - (x * counts).sum() / total, 0.0)
    std = ((centred.square() * counts).sum() / (total - 1).clamp(min=1)).sqrt()
    return centred / (std + EPSILON)


# ---- one number per token ----


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor,
    gae_lambda: float, gamma: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return generalised advantage estimates (arXiv:1506.02438 Eq. 16) of the trained tokens of
    each packed sequence.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, where t + 1 is the
    sequence's next trained token and V = A = 0 after its last one, also for a truncated sequence.
    Other tokens (prompts, tool output) are skipped and get 0. `values_T[t]` is the value before
    targets[t] is emitted. Shape [T], float64, on the device of `mask_T`."""
    device = mask_T.device  # on the host: a device would run several tiny kernels per position
    trained = mask_T.cpu().nonzero()[:, 0]
    out_T = torch.zeros(len(mask_T), dtype=torch.float64)
    if len(trained) == 0:
        return out_T.to(device)
    row = sequence_ids_T.cpu()[trained]
    counts_N = row.bincount()
    column = torch.arange(len(trained)) - (counts_N.cumsum(0) - counts_N)[row]
    # A right-padded rectangle of trained tokens: one vectorised step per position instead of one
    # per token.
    rewards_NL = torch.zeros(len(counts_N), int(counts_N.max()) + 1, dtype=torch.float64)
    values_NL = torch.zeros_like(rewards_NL)
    advantages_NL = torch.zeros_like(rewards_NL)
    rewards_NL[row, column] = rewards_T.cpu()[trained].double()
    values_NL[row, column] = values_T.cpu()[trained].double()
    decay = gamma * gae_lambda
    for t in range(values_NL.shape[1] - 2, -1, -1):
        delta_N = rewards_NL[:, t] + gamma * values_NL[:, t + 1] - values_NL[:, t]
        advantages_NL[:, t] = delta_N + decay * advantages_NL[:, t + 1]
    out_T[trained] = advantages_NL[row, column]
    return out_T.to(device)
