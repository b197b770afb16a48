"""Rewards by the length of a completion, for right and wrong ones: a completion is right if the
first of `--reward` is at least 1.

Shapes: P prompts, G completions per prompt. NaN, where the first reward is missing, stays NaN."""

import math

import torch
from torch import Tensor


def cosine_length(right_PG: Tensor, lengths_PG: Tensor, longest: int) -> Tensor:
    """Return the cosine reward (arXiv:2502.03373 Sec. 4.2) with the values of its authors' runs:
    from 2 to 1 for a right completion and from -10 to 0 for a wrong one, as its length goes from 0
    to `longest` tokens; -10 at `longest`. [P, G], float64."""
    start_PG = torch.where(right_PG > 0, 2.0, -10.0).masked_fill(right_PG.isnan(), math.nan)
    end_PG = torch.where(right_PG > 0, 1.0, 0.0)
    fall_PG = (1 - torch.cos(math.pi * lengths_PG.double() / longest)) / 2
    rewards_PG = start_PG + (end_PG - start_PG) * fall_PG
    return torch.where((lengths_PG >= longest) & ~right_PG.isnan(), -10.0, rewards_PG)


def adaptive_length(right_PG: Tensor, lengths_PG: Tensor, longest: int) -> Tensor:
    """Return the adaptive length penalty (ALP, arXiv:2506.05256): minus the length, as a fraction
    of `longest`, times the fraction of right completions in the group, which counts as 1 / G at
    least. Its beta is the weight of this reward. [P, G], float64."""
    rate_P1 = right_PG.nanmean(-1, keepdim=True).clamp(min=1 / right_PG.shape[-1])
    return (-rate_P1 * lengths_PG / longest).masked_fill(right_PG.isnan(), math.nan)
