"""The kinds of rewards, and how each is computed for groups of samples: built-in functions here,
`math` and a user's functions in processes. A function may have a `make_scorer` of its own."""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from common.config.online import SamplingArgs
from common.data.sample import Completion, Group
from common.rewards.old_processes import Pool
from common.rewards.registry import BY_LENGTH, load_reward, require_usable_rows, reward_of_row
from common.rewards.result import Result
from common.rewards.thoughts import Thoughts
from common.rewards.user_code import reward_form


class Scorer(NamedTuple):
    """One reward of `--reward`."""

    score: Callable[[list[Group]], list[Result]]
    """one result per sample, group by group; values are not checked yet"""
    pool: Pool | None = None
    """processes in which it runs; the caller closes them"""
    is_collective: bool = False
    """whether all ranks must call it at the same point"""


def make_scorers_by_row(
    rows: list[dict], args: SamplingArgs, thoughts: Thoughts
) -> dict[str, Scorer]:
    """Return a scorer for each name in the column `reward`. It applies to the rows with this name
    only."""
    rows_of: dict[str, list[dict]] = {}
    for row in rows:
        rows_of.setdefault(reward_of_row(row), []).append(row)
    return {
        name: _for_rows_of(name, make_scorer(name, rows_of[name], args, thoughts))
        for name in sorted(rows_of)
    }


def _for_rows_of(name: str, scorer: Scorer) -> Scorer:
    """Return a scorer of the groups whose row names this reward; the others get empty results."""

    def score(groups: list[Group]) -> list[Result]:
        results = iter(scorer.score([group for group in groups if group[0].row["reward"] == name]))
        return [
            next(results) if sample.row["reward"] == name else Result() for sample in chain(*groups)
        ]

    return scorer._replace(score=score)


def make_scorer(name: str, rows: list[dict], args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that is not a reward model. A user-defined function reads all
    text, a built-in one the text that `thoughts` selects.

    Raises `ValueError` for an unknown name and for rows that the reward cannot use.
    """
    if name == "environment":
        return _for_each_sample(_environment_result)
    if name in BY_LENGTH:  # `Rewards` computes it
        return _for_each_sample(lambda sample: Result())
    function = load_reward(name)
    require_usable_rows(name, function, rows)
    if hasattr(function, "make_scorer"):
        return function.make_scorer(name, args, thoughts)
    if name == "math":
        return _math_scorer(args, thoughts)
    if ":" in name:
        return _user_scorer(name, function, list(rows[0]) if rows else [], args)
    return _for_each_sample(
        lambda sample: Result(function(thoughts.read_by(function, sample), sample.row))
    )


def _for_each_sample(result_of: Callable[[Completion], Result]) -> Scorer:
    return Scorer(lambda groups: [result_of(sample) for sample in chain(*groups)])


def _environment_result(sample: Completion) -> Result:
    if sample.error:
        return Result(error=sample.error)
    return Result(sum(reward for _, reward in sample.turn_rewards))


def _user_scorer(name: str, function: Callable, columns: list[str], args: SamplingArgs) -> Scorer:
    """Return the scorer of a user's function of samples or, if it takes `completions`, of groups. A
    call for a group has the time limit times the number of its completions."""
    of_group, with_ids = reward_form(name, function, columns)
    pool = Pool(name, args.reward_workers, args.reward_timeout)

    def score_samples(groups: list[Group]) -> list[Result]:
        calls = [(s.text, s.row, s.completion_ids) for s in chain(*groups)]
        return pool.map([call[: 2 + with_ids] for call in calls])

    def score_groups(groups: list[Group]) -> list[Result]:
        calls = []
        for group in groups:
            texts = [sample.text for sample in group]
            ids = [sample.completion_ids for sample in group]
            calls.append((texts, group[0].row, ids)[: 2 + with_ids])
        results = pool.map(calls, [len(group) * pool.seconds for group in groups])
        pairs = zip(results, groups, strict=True)
        return list(chain(*(_divided(result, len(group)) for result, group in pairs)))

    return Scorer(score_groups if of_group else score_samples, pool)


def _divided(result: Result, size: int) -> list[Result]:
    """Return a result for each completion of a group from the result of the group."""
    values = result.value
    if result.error is not None:
        return [result] * size
    if not isinstance(values, list | tuple):
        returned = f"{type(values).__name__}, not a list,"
    elif len(values) != size:
        returned = f"{len(values)} values"
    else:
        return [Result(value) for value in values]
    return [Result(error=f"returned {returned} for {size} completions")] * size


def _math_scorer(args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of `math`. An answer that exceeds the time or memory limit is wrong and not
    an error: otherwise such an answer would go unpunished. Only a gold answer that cannot be parsed
    is an error."""
    target = "common.rewards.math_reward:math"
    pool = Pool(target, args.reward_workers, args.reward_timeout, shared=True)

    def score(groups: list[Group]) -> list[Result]:
        results = pool.map([(thoughts.answer(sample), sample.row) for sample in chain(*groups)])
        return [
            result._replace(value=0.0, error=None)
            if result.error is not None and not result.error.startswith("ValueError: ")
            else result
            for result in results
        ]

    return Scorer(score, pool)
