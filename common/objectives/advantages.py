"""Rewards -> advantages, as pure functions in float64. Equal rewards give exactly zero.

Statistics beyond a group need the groups of *all* ranks. A NaN reward is missing: it is excluded
from all statistics and has advantage 0.

Shapes: P prompts, G samples per prompt, K reward functions, T packed tokens, N sequences.
"""

import torch
from torch import Tensor

EPSILON = 1e-6  # added to standard deviations

# ---- one number per completion ----


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
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    sequence_ids_T: Tensor,
    gamma: float,
    lambda_N: Tensor,
) -> Tensor:
    """Return generalised advantage estimates (arXiv:1506.02438 Eq. 16) of the trained tokens of
    each packed sequence.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, where t + 1 is the
    sequence's next trained token and V = A = 0 after its last one, also for a truncated sequence.
    Other tokens (prompts, tool output) are skipped and get 0. `values_T[t]` is the value before
    targets[t] is emitted; `lambda_N` has one lambda per sequence. Shape [T], float64, on the device
    of `mask_T`."""
    device = mask_T.device  # on the host: a device would run several tiny kernels per position
    trained = mask_T.cpu().nonzero()[:, 0]
    out_T = torch.zeros(len(mask_T), dtype=torch.float64)
    if len(trained) == 0:
        return out_T.to(device)
    row = sequence_ids_T.cpu()[trained]
    counts_N = row.bincount(minlength=len(lambda_N))
    column = torch.arange(len(trained)) - (counts_N.cumsum(0) - counts_N)[row]
    # A right-padded rectangle of trained tokens: one vectorised step per position instead of one
    # per token.
    rewards_NL = torch.zeros(len(counts_N), int(counts_N.max()) + 1, dtype=torch.float64)
    values_NL = torch.zeros_like(rewards_NL)
    advantages_NL = torch.zeros_like(rewards_NL)
    rewards_NL[row, column] = rewards_T.cpu()[trained].double()
    values_NL[row, column] = values_T.cpu()[trained].double()
    decay_N = gamma * lambda_N.cpu().double()
    for t in range(values_NL.shape[1] - 2, -1, -1):
        delta_N = rewards_NL[:, t] + gamma * values_NL[:, t + 1] - values_NL[:, t]
        advantages_NL[:, t] = delta_N + decay_N * advantages_NL[:, t + 1]
    out_T[trained] = advantages_NL[row, column]
    return out_T.to(device)
