"""The statistics of eval.py as pure functions: unbiased pass@k, majority votes, bootstrap intervals
of means, and win rates."""

import math
import re
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from common.objectives.advantages import ROUNDING
from common.packs.sample import Group
from common.parallel import distributed
from common.rewards.answers import final_answers, last_boxed, plain, value_of

STATED = re.compile(r"(?:\banswer(?: is\b|:)|答案(?:是|为|:))[ :*]*([^\n]+)", re.IGNORECASE)
SOLVED = 1 - 1e-6  # counts as a reward of 1, because sum([0.1] * 10) is less than 1
PERMUTATIONS = 64  # random orders of the samples over which a majority vote is averaged


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of k samples is right, if they are drawn without
    replacement from n samples with c right ones: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374 Eq.
    1). Raises `ValueError` unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be between 1 and {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def shown_ks(n: int) -> list[int]:
    """Return the values of k for which pass@k is reported with n samples: 1, 2, 4, ... up to n."""
    return [1 << i for i in range(n.bit_length()) if 1 << i <= n]


def solved(first_PG: Tensor, groups: list[Group]) -> Tensor:
    """Return 1 for completions whose first reward is at least 1 (up to rounding) and 0 for the
    others: 0 too if their reward failed, NaN if no reward applies. Shape [P, G], float64."""
    failed = [[bool(sample.reward_errors) for sample in group] for group in groups]
    failed_PG = torch.tensor(failed, dtype=torch.bool).reshape(first_PG.shape)
    solved_PG = first_PG.ge(SOLVED).double().masked_fill(first_PG.isnan(), math.nan)
    return solved_PG.masked_fill(first_PG.isnan() & failed_PG, 0.0)


def final_answer(text: str) -> str | None:
    """Return the vote of a completion: its last boxed answer, else its last `####` number, else
    what follows the last "answer is" or "answer:" in its line, else its whole text; None if that is
    empty. Numbers are written in one form (1.0 and 1 are the same vote). Other answers lose their
    white space and are cut to 200 characters."""
    found = final_answers(text) or STATED.findall(plain(text)) or [text]
    answer = last_boxed(text) or found[-1].strip(" *`").rstrip(" *`.")
    return str(value_of(answer))[:200] or None


def majority_at_k(
    answers: list[str | None], right: list[bool | None], rng: np.random.Generator
) -> list[float]:
    """Return, for k = 1 up to the number of samples, how often the most frequent answer among k
    randomly chosen samples is right. Of equally frequent answers the one that got there first wins.
    A sample without an answer does not vote. A sample whose reward failed (`right` is None) votes,
    but only other samples with the same answer can tell whether it is right."""
    totals = np.zeros(len(answers))
    for _ in range(PERMUTATIONS):
        votes: Counter = Counter()
        is_right = {None: False}
        leader = None
        for k, i in enumerate(rng.permutation(len(answers))):
            answer = answers[i]
            if answer is not None:
                votes[answer] += 1
                if right[i] is not None:
                    is_right.setdefault(answer, right[i])
                if votes[answer] > votes[leader]:
                    leader = answer
            totals[k] += is_right.get(leader, False)
    return (totals / PERMUTATIONS).tolist()


def mean_and_interval(
    totals_P: list[float], counts_P: list[float], seed: int, draws: int = 1000
) -> dict[str, float]:
    """Return the mean sum of totals / sum of counts with its 95% interval by bootstrap over the
    prompts; {} if all counts are zero."""
    totals = np.array(totals_P, dtype=float)
    counts = np.array(counts_P, dtype=float)
    if not counts.sum():
        return {}
    rng = np.random.default_rng(distributed.fold_seed(seed))
    means = []
    for _ in range(draws):
        chosen = rng.integers(0, len(totals), len(totals))
        if counts[chosen].sum():
            means.append(totals[chosen].sum() / counts[chosen].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    return dict(mean=float(totals.sum() / counts.sum()), low=float(low), high=float(high))


def wins(
    scores: list[list[float]], scores_against: list[list[float]]
) -> tuple[list[float], list[int]]:
    """Compare completion i of each prompt with completion i of the other model. Return, per prompt,
    the number of wins and the number of compared pairs. A tie is half a win. A pair with a missing
    score (None) is left out."""
    points: list[float] = []
    counts = []
    for group, group_against in zip(scores, scores_against, strict=True):
        pairs = [pair for pair in zip(group, group_against, strict=True) if None not in pair]
        ties = [math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-15) for a, b in pairs]
        points.append(sum(0.5 if tie else a > b for tie, (a, b) in zip(ties, pairs, strict=True)))
        counts.append(len(pairs))
    return points, counts
