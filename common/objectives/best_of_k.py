"""Advantages for the best reward of k samples.

Shapes: B prompts, G completions per prompt, n completions of a group from the worst to the best."""

import math

import torch
from torch import Tensor


def best_of_k(rewards_BG: Tensor, valid_BG: Tensor, k: int) -> Tensor:
    """Return k times the gain of each completion: the expected best reward of it and k - 1 others
    of its group, less that of k others; 0 in a group of k or fewer (PKPO, arXiv:2505.15201 Eq. 29).
    With it the policy gradient is unbiased for the best of k samples. [B, G], float64."""
    out_BG = torch.zeros_like(rewards_BG, dtype=torch.float64)
    for row, valid_G in enumerate(valid_BG):
        n = int(valid_G.sum())
        if n <= k:
            continue
        r_n, order_n = rewards_BG[row].masked_fill(~valid_G, torch.inf).double().sort()
        r_n = r_n[:n]
        # sets of k whose best completion is j; those of them that have a given worse one
        sets_n = torch.tensor([math.comb(j, k - 1) for j in range(n)]).double()
        with_worse_n = sets_n * (k - 1) / torch.arange(n).clamp(min=1)
        better_n = (with_worse_n * r_n).sum() - (with_worse_n * r_n).cumsum(0)
        best_n = (sets_n * r_n + better_n) / math.comb(n - 1, k - 1)
        best = (sets_n * r_n).sum() / math.comb(n, k)  # expected best reward of any k
        out_BG[row, order_n[:n]] = (best_n - best) * k * n / (n - k)
    return out_BG
