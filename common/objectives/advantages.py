"""From rewards to advantages, as pure functions in float64. Where all rewards of a group are equal,
the advantages are exactly zero.

Statistics over more than a group need the groups of *all* ranks. A NaN reward is a missing one: it
is left out of all statistics and gets advantage 0.

Shapes: P prompts, B prompts of all ranks, G samples per prompt, T packed tokens, N sequences."""

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-6  # added to standard deviations
ROUNDING = 1e-10  # relative differences below this are none

# ---- statistics of groups ----


def centre_groups(rewards_PG: Tensor) -> Tensor:
    """Return each completion's reward minus the mean of its group. A group with equal rewards, or
    with a single one, gets exactly 0. Shape [P, G], float64."""
    rewards_PG = rewards_PG.double()
    valid_PG = ~rewards_PG.isnan()
    mean_P1 = rewards_PG.nansum(-1, keepdim=True) / valid_PG.sum(-1, keepdim=True).clamp(min=1)
    # The mean of equal rewards may be rounded, so the comparison is between the rewards.
    return torch.where(valid_PG & unequal(rewards_PG)[:, None], rewards_PG - mean_P1, 0.0)


def group_std(rewards_PG: Tensor) -> Tensor:
    """Return the sample standard deviation (division by n - 1) of the rewards of each group;
    exactly 0 for equal rewards or a single one. Shape [P, 1], float64."""
    size_P1 = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    squares_P1 = centre_groups(rewards_PG).square().sum(-1, keepdim=True)
    return (squares_P1 / (size_P1 - 1).clamp(min=1)).sqrt()


def without_rounding(rewards_PG: Tensor) -> Tensor:
    """Return rewards that can be compared within their group: rewards that differ only by rounding,
    such as 0.1 + 0.2 and 0.3, become equal. Float64."""
    rewards_PG = rewards_PG.double()
    largest_P1 = rewards_PG.nan_to_num(nan=0.0).abs().amax(-1, keepdim=True)
    step_P1 = (ROUNDING * largest_P1).clamp(min=1e-15)
    return (rewards_PG / step_P1).round() * step_P1


def unequal(rewards_PG: Tensor) -> Tensor:
    """Return which groups have at least two different rewards. Others give no gradient. Bool,
    [P]."""
    rewards_PG = without_rounding(rewards_PG)
    highest_P = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1)
    return highest_P > rewards_PG.nan_to_num(nan=torch.inf).amin(-1)


# ---- one number per completion, from the rewards of all ranks, [B, G] float64 ----


def group_mean(rewards_BG: Tensor) -> Tensor:
    """Dr. GRPO (arXiv:2503.20783): r - mean, without division by the std, which would favour
    prompts that are very easy or very hard."""
    return centre_groups(rewards_BG)


def group_ratio(rewards_BG: Tensor) -> Tensor:
    """MaxRL (arXiv:2602.02710): (r - mean) / mean, for rewards >= 0."""
    if (rewards_BG < 0).any():
        raise ValueError("--advantage group_ratio: a reward (or a penalty) is negative")
    centred_BG = centre_groups(rewards_BG)
    return (centred_BG / (rewards_BG - centred_BG + EPSILON)).nan_to_num()


def group_mean_batch_std(rewards_BG: Tensor) -> Tensor:
    """LitePPO (arXiv:2508.08221): (r - mean of the group) / std of the whole batch."""
    known = rewards_BG[~rewards_BG.isnan()].double()
    return centre_groups(rewards_BG) / ((known.std() if len(known) > 1 else 0.0) + EPSILON)


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = dict(  # further values of --advantage
    group_mean=group_mean, group_ratio=group_ratio, group_mean_batch_std=group_mean_batch_std
)


# ---- one number per token ----


def gae(
    rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, sequence_ids_T: Tensor,
    gae_lambda: float, gamma: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return generalised advantage estimates (arXiv:1506.02438 Eq. 16) for the trained tokens of
    each packed sequence.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}. Here t + 1 is the
    next trained token of the sequence, and after its last one V = A = 0, also if the sequence was
    truncated. Other tokens (prompts, tool output) are skipped and get 0. `values_T[t]` is the value
    before targets[t] is sampled. Shape [T], float64, on the device of `mask_T`."""
    trained = mask_T.cpu().nonzero()[:, 0]  # on the host: a device would wait at every token
    streams = rewards_T.double(), values_T.double(), sequence_ids_T
    tokens = zip(*(x_T.cpu()[trained].tolist() for x_T in streams), strict=True)
    advantages = []
    sequence, A, V_next = None, 0.0, 0.0
    for r, V, n in reversed([*tokens]):
        if n != sequence:  # the last token of this one
            sequence, A, V_next = n, 0.0, 0.0
        delta = r + gamma * V_next - V
        A = delta + gamma * gae_lambda * A
        V_next = V
        advantages.append(A)
    out_T = torch.zeros(len(mask_T), dtype=torch.float64)
    out_T[trained] = torch.tensor(advantages[::-1], dtype=torch.float64)
    return out_T.to(mask_T.device)
