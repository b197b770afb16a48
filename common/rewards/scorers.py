"""The kinds of rewards, and how each is computed for the completions of a prompt.

A scorer runs in the event loop of `Rewards`, beside those of other prompts: built-in functions are
called there, `math` and a user's functions in processes. A built-in function may have a
`make_scorer` of its own."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from common.config.online import SamplingArgs
from common.data.sample import Group
from common.rewards.processes import Pool
from common.rewards.registry import load_reward
from common.rewards.thoughts import Thoughts
from common.rewards.user_code import reward_form
from common.rewards.worker import Result


class Scorer(NamedTuple):
    """One reward of `--reward` that needs no other rank."""

    score: Callable[[Group], Awaitable[list[Result]]]
    """a result for each completion of a prompt; its value is not checked yet"""
    pool: Pool | None = None
    """processes in which it runs; the caller closes them"""


def make_scorer(name: str, columns: list[str], args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that is not a model. Raises `ValueError` for an unknown
    name."""
    if name == "environment":
        return Scorer(of_environment)
    function = load_reward(name)
    if hasattr(function, "make_scorer"):
        return function.make_scorer(name, args, thoughts)
    if name == "math":
        return of_math(args, thoughts)
    if ":" in name:
        return of_user(name, function, columns, args)

    async def score(group: Group) -> list[Result]:
        return [Result(function(thoughts.read_by(function, each), each.row)) for each in group]

    return Scorer(score)


async def of_environment(group: Group) -> list[Result]:
    """The sum of the rewards of all turns. `Rewards` counts the errors of episodes."""
    return [Result(sum(reward for _, reward in sample.turn_rewards)) for sample in group]


def of_math(args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """An answer that exceeds the time or memory limit is wrong and not an error: otherwise it would
    go unpunished. A gold answer that cannot be parsed is an error, and so is a process that cannot
    start."""
    target = "common.rewards.math_reward:math"
    pool = Pool(target, args.reward_workers, args.reward_timeout, shared=True)

    async def score_one(sample) -> Result:
        result = await pool.call(thoughts.answer(sample), sample.row)
        faults = "ValueError: ", f"{target} cannot be loaded: "
        if result.error is None or result.error.startswith(faults):
            return result
        return result._replace(value=0.0, error=None)

    async def score(group: Group) -> list[Result]:
        return await asyncio.gather(*map(score_one, group))

    return Scorer(score, pool)


def of_user(name: str, function: Callable, columns: list[str], args: SamplingArgs) -> Scorer:
    """A user's function, of all text of a completion or, if it takes `completions`, of a group. A
    call for a group has the time limit times the number of its completions."""
    of_group, with_ids = reward_form(name, function, columns)
    is_async = inspect.iscoroutinefunction(function)
    pool = Pool(name, args.reward_workers, args.reward_timeout, is_async=is_async)

    async def score_samples(group: Group) -> list[Result]:
        calls = [(s.text, s.row, s.completion_ids)[: 2 + with_ids] for s in group]
        return await asyncio.gather(*(pool.call(*call) for call in calls))

    async def score_group(group: Group) -> list[Result]:
        texts = [sample.text for sample in group]
        ids = [sample.completion_ids for sample in group]
        call = (texts, group[0].row, ids)[: 2 + with_ids]
        result = await pool.call(*call, seconds=len(group) * pool.seconds)
        if result.error is None:
            values = result.value
            is_list = isinstance(values, list | tuple)
            if is_list and len(values) == len(group):
                return [Result(value) for value in values]
            found = f"{len(values)} values" if is_list else f"{type(values).__name__}, not a list,"
            result = Result(error=f"returned {found} for {len(group)} completions")
        return [result] * len(group)

    return Scorer(score_group if of_group else score_samples, pool)


def for_rows_of(name: str, scorer: Scorer) -> Scorer:
    """With by_row: the scorer for the rows whose column `reward` is `name`. The others get empty
    results."""

    async def score(group: Group) -> list[Result]:
        applies = group[0].row["reward"] == name
        return await scorer.score(group) if applies else [Result()] * len(group)

    return scorer._replace(score=score)
