"""Scorers: functions that compute a reward of `--reward`, except reward models, for groups of samples."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from multiprocessing.pool import ThreadPool

from common.config.groups import SamplingArgs
from common.data.sample import Completion, Group
from common.parallel import distributed
from common.rewards.functions import REWARDS
from common.rewards.processes import Pool, Result
from common.rewards.registry import load_reward, require_usable_rows, reward_of_row
from common.rewards.thoughts import Thoughts
from common.rewards.user_code import reward_form
from common.sandbox import program

Scorer = Callable[[list[Group]], list[Result]]  # one result per sample, group by group; values are not checked yet


def scorers_by_row(rows: list[dict], args: SamplingArgs, pools: list[Pool], thoughts: Thoughts) -> dict[str, Scorer]:
    """Return a scorer for each name in the column `reward`. It applies to the rows with this name only."""
    of_name: dict[str, list[dict]] = {}
    for row in rows:
        of_name.setdefault(reward_of_row(row), []).append(row)
    return {
        name: partial(_only, name, make_scorer(name, its, args, pools, thoughts))
        for name, its in sorted(of_name.items())
    }


def make_scorer(name: str, rows: list[dict], args: SamplingArgs, pools: list[Pool], thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that is not a reward model, and append its pool of processes, if any, to `pools`.
    A user-defined function reads all text, a built-in one the text that `thoughts` selects.

    Raises `ValueError` for an unknown name and for rows that the reward cannot use.
    """
    if name == "environment":
        return partial(_each, _of_environment)
    require_usable_rows(name, function := load_reward(name), rows)
    if name in ("code", "code_fraction"):
        return _of_code(name, function, args, thoughts)
    if name in REWARDS:
        return partial(_each, lambda sample: Result(function(thoughts.read_by(function, sample), sample.row)))
    target = "common.rewards.math_reward:math" if name == "math" else name
    pools.append(pool := Pool(target, args.reward_workers, args.reward_timeout, shared=name == "math"))
    if name == "math":
        return partial(_of_math, pool, thoughts)
    of_group, with_ids = reward_form(name, function, chain(*rows[:1]))
    return partial(_of_groups if of_group else _of_samples, pool, with_ids)


def _each(function: Callable[[Completion], Result], groups: list[Group]) -> list[Result]:
    return [function(sample) for sample in chain(*groups)]


def _only(name: str, scorer: Scorer, groups: list[Group]) -> list[Result]:
    """Score the groups whose row names this reward; the others get empty results."""
    results = iter(scorer([group for group in groups if group[0].row["reward"] == name]))
    return [next(results) if group[0].row["reward"] == name else Result() for group in groups for _ in group]


def _of_environment(sample: Completion) -> Result:
    return Result(error=sample.error) if sample.error else Result(sum(reward for _, reward in sample.turn_rewards))


def _of_samples(pool: Pool, with_ids: bool, groups: list[Group]) -> list[Result]:
    return pool.map([(s.text, s.row, s.completion_ids)[: 2 + with_ids] for s in chain(*groups)])


def _of_groups(pool: Pool, with_ids: bool, groups: list[Group]) -> list[Result]:
    """Score with a function of whole groups. A call has the time limit times the number of completions in its group."""
    calls = [([s.text for s in group], group[0].row, [s.completion_ids for s in group]) for group in groups]
    returned = pool.map([call[: 2 + with_ids] for call in calls], [len(group) * pool.seconds for group in groups])
    return list(chain(*(_spread(result, len(group)) for result, group in zip(returned, groups, strict=True))))


def _spread(result: Result, size: int) -> list[Result]:
    """Return a result for each completion of a group from the result of the group."""
    if result.error is None:
        values = result.value
        if isinstance(values, list | tuple) and len(values) == size:
            return [Result(value) for value in values]
        what = f"{len(values)} values" if isinstance(values, list | tuple) else f"{type(values).__name__}, not a list,"
        result = Result(error=f"returned {what} for {size} completions")
    return [result] * size


def _of_math(pool: Pool, thoughts: Thoughts, groups: list[Group]) -> list[Result]:
    """Score with `math`. An answer that exceeds the time or memory limit is wrong and not an error: otherwise such an
    answer would go unpunished. Only a gold answer that cannot be parsed is an error."""
    results = pool.map([(thoughts.answer(sample), sample.row) for sample in chain(*groups)])
    return [
        r if r.error is None or r.error.startswith("ValueError: ") else r._replace(value=0.0, error=None)
        for r in results
    ]


def _of_code(name: str, function: Callable, args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    if (problem := program.problem()) and not args.unsafe_code_execution:
        raise ValueError(f"--reward {name}: {problem}; --unsafe_code_execution runs programs without this protection")
    limits = program.Limits(seconds=args.reward_timeout)

    def run(sample: Completion) -> Result:
        try:
            return Result(function(thoughts.answer(sample), sample.row, limits, args.unsafe_code_execution))
        except (ValueError, RuntimeError) as error:  # caused by bad tests or by the machine
            return Result(error=distributed.first_line(error))

    def score(groups: list[Group]) -> list[Result]:
        # The threads only wait for programs. Unlike those of `concurrent.futures`, they do not delay the end of a run.
        with ThreadPool(args.reward_workers) as threads:
            return threads.map(run, chain(*groups), chunksize=1)

    return score
