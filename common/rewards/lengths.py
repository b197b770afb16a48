"""Rewards by the length of right and wrong completions, computed from the first of `--reward`."""

import math

import torch
from torch import Tensor


def by_length(name: str, first_PG: Tensor, lengths_PG: Tensor, longest: int) -> Tensor:
    """Return the reward `name` of completions with these first rewards, which are right from 1, and
    lengths of at most `longest` tokens. NaN where the first reward is missing. [P, G], float64."""
    right_PG = first_PG >= 1
    share_PG = lengths_PG.double() / longest
    if name == "cosine_length":
        # arXiv:2502.03373 Sec. 4.2, values of its runs: right from 2 to 1, wrong from -10 to 0
        start_PG = torch.where(right_PG, 2.0, -10.0)
        end_PG = torch.where(right_PG, 1.0, 0.0)
        rewards_PG = start_PG + (end_PG - start_PG) * (1 - torch.cos(math.pi * share_PG)) / 2
        rewards_PG = torch.where(share_PG >= 1, -10.0, rewards_PG)
    else:  # adaptive_length: ALP (arXiv:2506.05256); its beta is the weight of this reward
        count_P1 = (~first_PG.isnan()).sum(-1, keepdim=True).clamp(min=1)
        pass_rate_P1 = right_PG.sum(-1, keepdim=True) / count_P1
        rewards_PG = -pass_rate_P1.clamp(min=1 / first_PG.shape[-1]) * share_PG
    return rewards_PG.masked_fill(first_PG.isnan(), math.nan)
