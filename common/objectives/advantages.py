"""Rewards -> advantages, pure functions. In float64 and in two passes, so that equal rewards give exactly zero.

Functions of `rewards_PG` that look beyond a group want the groups of *all* ranks. NaN rewards mean "no reward": they
count in no statistic and get advantage 0.

Shapes: P prompts, G samples per prompt, K reward functions, T packed tokens, N sequences.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

EPSILON = 1e-6  # added to standard deviations

# ---- one number per completion ----


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """A = (r - mean_G r) / (std_G r + eps), one per completion (GRPO, arXiv:2402.03300 section 4.1.2).

    The standard deviation is the sample one (G - 1), of the whole group. Groups that are all equal, or have one reward
    left, get exactly 0. Returns float64, shape [P, G].
    """
    centred_PG, count_P1 = group_mean(rewards_PG), (~rewards_PG.isnan()).sum(-1, keepdim=True)
    std_P1 = (centred_PG.square().sum(-1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()
    return centred_PG / (std_P1 + EPSILON)


def group_mean(rewards_PG: Tensor) -> Tensor:
    """A = r - mean_G r, one per completion (Dr. GRPO, arXiv:2503.20783). Groups that are all equal, or have one reward
    left, get exactly 0. Returns float64, shape [P, G]."""
    rewards_PG = rewards_PG.double()
    valid_PG = ~rewards_PG.isnan()
    mean_P1 = rewards_PG.nansum(-1, keepdim=True) / valid_PG.sum(-1, keepdim=True).clamp(min=1)
    # The mean of equal rewards can round, so whether they are equal is asked of the rewards themselves.
    return torch.where(valid_PG & unequal(rewards_PG)[:, None], rewards_PG - mean_P1, 0.0)


def unequal(rewards_PG: Tensor) -> Tensor:
    """Which groups have at least two different rewards, bool without the last dimension: the others teach nothing."""
    highest_P = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1)
    return highest_P > rewards_PG.nan_to_num(nan=torch.inf).amin(-1)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' r in its group, one per completion (RLOO, arXiv:2402.14740 Eq. 7).

    Equal to n / (n - 1) times r_i - mean_G r, which is how it is computed. A sample that is left alone gets 0. Returns
    float64, shape [P, G].
    """
    count_P1 = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    return group_mean(rewards_PG) * count_P1 / (count_P1 - 1).clamp(min=1)


def group_mean_batch_std(rewards_PG: Tensor) -> Tensor:
    """A = (r - mean_G r) / (std r + eps), the standard deviation of the rewards of the whole batch (LitePPO,
    arXiv:2508.08221). Returns float64, shape [P, G]."""
    rewards = rewards_PG[~rewards_PG.isnan()].double()
    std = rewards.std() if len(rewards) > 1 else 0.0
    return group_mean(rewards_PG) / (std + EPSILON)


def reinforce_plus_plus(rewards_PG: Tensor, trained_PG: Tensor) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262): rewards whitened over all trained tokens of the whole batch, where a completion's
    reward stands on each of its `trained_PG`.

    Those are counts of what the loss is over: the model's own tokens, without what an environment said between its
    turns, and 0 for a completion that is masked. Such a completion counts in no statistic and gets 0. Returns float64,
    shape [P, G].
    """
    return whiten(rewards_PG.nan_to_num(nan=0.0), torch.where(rewards_PG.isnan(), 0, trained_PG))


def reinforce_plus_plus_baseline(rewards_PG: Tensor, trained_PG: Tensor) -> Tensor:
    """`reinforce_plus_plus` of r - mean_G r; a completion without trained tokens is part of its group's mean."""
    return whiten(group_mean(rewards_PG), torch.where(rewards_PG.isnan(), 0, trained_PG))


def gdpo(parts_KPG: Tensor, weights_K: Tensor | Sequence[float]) -> Tensor:
    """GDPO (arXiv:2601.05242): each reward is normalised in its group, so that none is drowned by a larger one; their
    weighted sum is whitened over the completions of the whole batch. A reward that is NaN for some completions counts
    among the others of the group; a completion that has none at all gets 0. Returns float64, shape [P, G]."""
    missing_PG = parts_KPG.isnan().all(0)
    sums_PG = sum(w * group_advantages(part_PG) for w, part_PG in zip(weights_K, parts_KPG, strict=True))
    return whiten(sums_PG, (~missing_PG).long())


def whiten(x: Tensor, counts: Tensor) -> Tensor:
    """(x - mean) / (std + eps), where x[i] counts `counts[i]` times; 0 where that is 0. Exactly 0 if all are equal.
    Returns float64."""
    x, counted = x.double(), counts > 0
    if not counted.any() or (x[counted] == x[counted][0]).all():
        return torch.zeros_like(x)
    total = counts.sum()
    centred = torch.where(counted, x - (x * counts).sum() / total, 0.0)
    std = ((centred.square() * counts).sum() / (total - 1).clamp(min=1)).sqrt()
    return centred / (std + EPSILON)


# ---- one number per token ----


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor, gamma: float, lambda_N: Tensor
) -> Tensor:
    """Generalised advantage estimation (arXiv:1506.02438 Eq. 16) over the trained tokens of each packed sequence.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, where t + 1 is the sequence's next
    trained token and V = A = 0 behind its last one, whether an EOS or the length ended it. Tokens that are not trained
    (prompts, tool output) are passed over and get 0. `values_T[t]` is the value before targets[t] is
    emitted; `lambda_N` has one lambda per sequence. Returns float64, shape [T], on the device of `mask_T`.
    """
    device = mask_T.device  # on the host: on a device every position would be a handful of tiny kernels
    rewards_T, values_T, mask_T, sequence_ids_T, lambda_N = (
        x.cpu() for x in (rewards_T, values_T, mask_T, sequence_ids_T, lambda_N)
    )
    trained = mask_T.nonzero()[:, 0]
    out_T = torch.zeros(len(mask_T), dtype=torch.float64)
    if len(trained) == 0:
        return out_T.to(device)
    row = sequence_ids_T[trained]
    counts_N = row.bincount(minlength=len(lambda_N))
    column = torch.arange(len(trained)) - (counts_N.cumsum(0) - counts_N)[row]
    # A right-padded rectangle of trained tokens: one vectorised step per position instead of one per token.
    rewards_NL, values_NL = torch.zeros(2, len(counts_N), int(counts_N.max()) + 1, dtype=torch.float64)
    rewards_NL[row, column], values_NL[row, column] = rewards_T[trained].double(), values_T[trained].double()
    advantages_NL, decay_N = torch.zeros_like(values_NL), gamma * lambda_N.double()
    for t in range(values_NL.shape[1] - 2, -1, -1):
        delta_N = rewards_NL[:, t] + gamma * values_NL[:, t + 1] - values_NL[:, t]
        advantages_NL[:, t] = delta_N + decay_N * advantages_NL[:, t + 1]
    out_T[trained] = advantages_NL[row, column]
    return out_T.to(device)


def length_adaptive_lambda(lengths_N: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1 / (alpha length), not below 0 (VAPO, arXiv:2504.05118): the longer the completion, the further a
    reward at its end is carried back. Returns float64, shape [N]."""
    return (1 - 1 / (alpha * lengths_N.double())).clamp(min=0)


# ---- which tokens ----


def top_entropy_threshold(entropies: Tensor, fraction: float) -> float:
    """The entropy that the top `fraction` of them reaches, rounded up to whole tokens: of 100 tokens and 0.07, the
    seventh highest (arXiv:2506.01939). `entropies` is 1-D, in nats: trained tokens only, of all ranks. -inf for a
    fraction of 1, inf without tokens."""
    if fraction == 1:
        return -math.inf
    if len(entropies) == 0:
        return math.inf
    kept = math.ceil(Fraction(str(fraction)) * len(entropies))  # of the decimal: 0.07 * 100 is a little above 7
    return float(entropies.sort(descending=True).values[kept - 1])
