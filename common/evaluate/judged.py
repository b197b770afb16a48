"""Scores of stored completions by `--reward_model`: a reward model or a judge."""

from collections.abc import Callable
from itertools import chain

from common.data.sample import Group
from common.evaluate.completions_file import score_stored
from common.rollout.prompts import Prompts
from common.workers.worker import Result


def scores_of_outputs(
    model: Callable[[list[Group]], list[Result]], outputs: list[list[dict]], prompts: Prompts
) -> list[list[list[float]]]:
    """Return the score of each completion of each output. A judge of pairs scores a completion by
    its probability to win against the one of the other output with the same index. Collective.
    Raises `ValueError` naming the row of a completion without score."""

    def scores(groups: list[Group], results: list[Result]) -> list[float]:
        for sample, result in zip(chain(*groups), results, strict=True):
            if result.error:
                raise ValueError(f"{sample.row['_source']}: {result.error}")
        values = [result.value for result in results]
        # without the numbers beside a score
        return [value[0] if isinstance(value, tuple) else value for value in values]

    if not getattr(model, "ranks", False):
        return [score_stored(lines, lambda x: scores(x, model(x)), prompts) for lines in outputs]

    def duels(groups: list[Group]) -> list[float]:
        halves = [len(group) // 2 for group in groups]
        orders = [[(k, n + k) for k in range(n)] + [(n + k, k) for k in range(n)] for n in halves]
        return scores(groups, model.duels(groups, orders))

    pairs = zip(*outputs, strict=True)
    both = [dict(completions=one["completions"] + other["completions"]) for one, other in pairs]
    count = len(outputs[0][0]["completions"])
    found = score_stored(both, duels, prompts)
    return [[group[:count] for group in found], [group[count:] for group in found]]
