"""Naive code for an advantage of mine.py, here that of new-advantage.patch, with plain numbers.

python course/changes/naive_advantage.py
"""

import importlib
import math
import statistics
import sys

sys.path.insert(0, "tests")
sys.path.insert(0, ".")

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ADVANTAGES = importlib.import_module("mine").ADVANTAGES
ADVANTAGE = "median"
NAN = math.nan  # a reward that failed
groups = st.lists(st.lists(st.floats(-9, 9) | st.just(NAN), min_size=4, max_size=4), min_size=1)


def naive(group: list[float]) -> list[float]:
    """Return the advantages of one group, 0 where the reward is missing."""
    known = [reward for reward in group if not math.isnan(reward)]
    return [0.0 if math.isnan(r) else r - statistics.median_low(known) for r in group]


@settings(deadline=None)
@given(groups)
def test_advantage_equals_naive_code(rewards) -> None:
    found = ADVANTAGES[ADVANTAGE](torch.tensor(rewards, dtype=torch.float64))
    for group, advantages in zip(rewards, found.tolist(), strict=True):
        assert advantages == pytest.approx(naive(group), abs=1e-9), group


if __name__ == "__main__":
    if ADVANTAGE not in ADVANTAGES:
        raise SystemExit(f"mine.ADVANTAGES has no {ADVANTAGE!r}: {', '.join(ADVANTAGES)}")
    test_advantage_equals_naive_code()
    print(f"{ADVANTAGE}: advantages equal those of naive code")
