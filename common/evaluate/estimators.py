"""Estimators of eval.py as pure functions: unbiased pass@k, majority votes, means with bootstrap
intervals."""

import math
import re
from collections import Counter

import numpy as np

from common.parallel import distributed
from common.rewards.functions import final_answers, last_boxed, plain, value_of

STATED = re.compile(r"(?:\banswer(?: is\b|:)|答案(?:是|为|:))[ :*]*([^\n]+)", re.IGNORECASE)
PERMUTATIONS = 64  # random orders of the samples over which a majority vote is averaged


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k samples, drawn without replacement from n with c right ones,
    include a right one: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374 Eq. 1). Raises `ValueError`
    unless 1 <= k <= n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples: k must be between 1 and {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def shown_ks(n: int) -> list[int]:
    """Return the k of pass@k that are shown for n samples: 1, 2, 4, ... up to n."""
    return [1 << i for i in range(n.bit_length()) if 1 << i <= n]


def final_answer(text: str) -> str | None:
    """Return the vote of a completion: its last boxed answer, else its last `####` number, else the
    rest of the line after the last "answer is" or "answer:", else all of it; None if that is
    empty. Numbers are in canonical form, other answers without whitespace and cut to 200
    characters."""
    found = final_answers(text) or STATED.findall(plain(text)) or [text]
    answer = last_boxed(text) or found[-1].strip(" *`").rstrip(" *`.")
    return str(value_of(answer))[:200] or None


def majority_at_k(
    answers: list[str | None], right: list[bool], rng: np.random.Generator
) -> list[float]:
    """Return, for k = 1..S, the fraction of random choices of k samples in which the most frequent
    answer is right. The first of equally frequent answers wins. A sample without an answer does not
    vote."""
    totals = np.zeros(len(answers))
    for _ in range(PERMUTATIONS):
        votes: Counter = Counter()
        is_right = {None: False}
        leader = None
        for k, i in enumerate(rng.permutation(len(answers))):
            answer = answers[i]
            if answer is not None:
                votes[answer] += 1
                is_right.setdefault(answer, right[i])
                if votes[answer] > votes[leader]:
                    leader = answer
            totals[k] += is_right[leader]
    return (totals / PERMUTATIONS).tolist()


def mean_and_interval(
    totals_P: list[float], counts_P: list[float], seed: int, draws: int = 1000
) -> dict[str, float]:
    """Return sum of totals / sum of counts with its 95% interval by bootstrap over the prompts; {}
    for zero counts."""
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
) -> tuple[list[float], list[float]]:
    """Return, per prompt, the number of completions whose score is higher than the score against
    them with the same index, and the number of compared pairs. A tie is half a win; pairs with a
    missing score (None) are excluded."""
    points = []
    counts = []
    for group, group_against in zip(scores, scores_against, strict=True):
        pairs = [pair for pair in zip(group, group_against, strict=True) if None not in pair]
        points.append(sum((a > b) + 0.5 * (a == b) for a, b in pairs))
        counts.append(len(pairs))
    return points, counts
