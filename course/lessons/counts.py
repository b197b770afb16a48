"""Rewards of the rows of rows.py, with numbers that a run logs beside them.

    python grpo.py --dataset runs/course/data/splits --reward course/lessons/counts.py:splits ...

The full commands are in 09_entropy.md.
"""

import re

SPLIT = re.compile(r"([1-9][0-9]{0,14})\+([1-9][0-9]{0,14})")


def split(completion: str, row: dict) -> float:
    """Return 1 if the completion is `a+b` with the sum `target`, for whole numbers a, b >= 1
    without leading zeros."""
    match = SPLIT.fullmatch(completion.strip())
    return float(match is not None and int(match[1]) + int(match[2]) == row["target"])


def splits(completions: list[str], row: dict) -> list[tuple[float, dict[str, float]]]:
    """Return the reward `split` of each completion of a prompt. The numbers: distinct right answers
    in the group, and whether there is one (pass@G for a group of G completions)."""
    rewards = [split(completion, row) for completion in completions]
    right = {completion for completion, reward in zip(completions, rewards, strict=True) if reward}
    numbers = dict(distinct=float(len(right)), any_right=float(bool(right)))
    return [(reward, numbers) for reward in rewards]
