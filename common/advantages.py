"""Rewards -> advantages. In float64 and in two passes, so that equal rewards give exactly zero.

Shapes: P prompts, G samples per prompt.
"""

import torch
from torch import Tensor


def group_advantages(rewards_PG: Tensor, scale_by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """A = (r - mean_G r) / (std_G r + eps), one per completion (GRPO, arXiv:2402.03300 section 4.1.2).

    With `scale_by_std=False` the mean is subtracted only (Dr. GRPO, arXiv:2503.20783). The standard deviation is the
    sample one (G - 1). NaN rewards mean "no reward": they count in no mean or std and get advantage 0. Groups that are
    all equal, or have one reward left, get exactly 0. Returns float64, shape [P, G].
    """
    rewards_PG = rewards_PG.double()
    valid_PG = ~rewards_PG.isnan()
    count_P1 = valid_PG.sum(-1, keepdim=True)
    mean_P1 = rewards_PG.nansum(-1, keepdim=True) / count_P1.clamp(min=1)
    centred_PG = torch.where(valid_PG, rewards_PG - mean_P1, 0.0)
    # The mean of equal rewards can round: compare the rewards themselves, not their centred values.
    equal_P1 = rewards_PG.nan_to_num(nan=-torch.inf).amax(-1, True) == rewards_PG.nan_to_num(nan=torch.inf).amin(
        -1, True
    )
    centred_PG = torch.where(equal_P1 | (count_P1 < 2), 0.0, centred_PG)
    if not scale_by_std:
        return centred_PG
    std_P1 = (centred_PG.square().sum(-1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()
    return centred_PG / (std_P1 + eps)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """A_i = r_i - mean of the others' r in its group, one per completion (RLOO, arXiv:2402.14740 Eq. 7).

    Equal to n / (n - 1) times r_i - mean_G r, which is how it is computed. NaN rewards mean "no reward": they count in
    no baseline and get advantage 0, as does a sample that is left alone. Returns float64, shape [P, G].
    """
    count_P1 = (~rewards_PG.isnan()).sum(-1, keepdim=True)
    return group_advantages(rewards_PG, scale_by_std=False) * count_P1 / (count_P1 - 1).clamp(min=1)
