"""The sum of |A| over a group of 16 completions of which k are right, by the function of grpo.py.

    python course/lessons/06_sums.py

The last column is the factor that the division by the standard deviation adds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

import grpo
from common.objectives.advantages import group_mean

print("   k   group   group_mean   ratio")
for right in (1, 2, 4, 8, 12, 15):
    rewards_BG = (torch.arange(16) < right).double()[None]
    group, mean = (A(rewards_BG).abs().sum() for A in (grpo.advantages, group_mean))
    print(f"{right:4} {group:7.2f} {mean:12.2f} {group / mean:7.2f}")
