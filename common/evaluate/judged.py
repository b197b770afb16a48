"""Scores of stored completions by `--reward_model`: a reward model or a judge."""

from collections.abc import Callable
from functools import partial
from itertools import chain

from common.data.sample import Group
from common.rewards.worker import Result


def scores_of_outputs(
    model: Callable[[list[Group]], list[Result]],
    outputs: list[list[dict]],
    score_lines: Callable[[list[dict], Callable], list[list[float]]],
) -> list[list[list[float]]]:
    """Return the score of each completion of each output. A judge of pairs scores a completion by
    its probability to win against the one of the other output with the same index. Collective.
    Raises `ValueError` naming the row of a completion without score."""
    if not getattr(model, "ranks", False):
        return [score_lines(lines, partial(_scores, model)) for lines in outputs]

    def duels(groups: list[Group]) -> list[float]:
        halves = [len(group) // 2 for group in groups]
        orders = [[(k, n + k) for k in range(n)] + [(n + k, k) for k in range(n)] for n in halves]
        return _scores(lambda groups: model.duels(groups, orders), groups)

    pairs = zip(*outputs, strict=True)
    both = [dict(completions=one["completions"] + other["completions"]) for one, other in pairs]
    scores = score_lines(both, duels)
    count = len(outputs[0][0]["completions"])
    return [[group[:count] for group in scores], [group[count:] for group in scores]]


def _scores(model: Callable[[list[Group]], list[Result]], groups: list[Group]) -> list[float]:
    """Return the number of each sample, without those beside it."""
    results = model(groups)
    for sample, result in zip(chain(*groups), results, strict=True):
        if result.error:
            raise ValueError(f"{sample.row['_source']}: {result.error}")
    values = [result.value for result in results]
    return [value[0] if isinstance(value, tuple) else value for value in values]
