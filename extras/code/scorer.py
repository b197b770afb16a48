"""The `code` rewards in a run: programs of many completions at once."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from common.config.online import SamplingArgs
from common.data.sample import Completion, Group
from common.parallel import distributed
from common.rewards.result import Result
from common.rewards.scorers import Scorer
from common.rewards.thoughts import Thoughts
from extras.code.reward import fraction, passes
from extras.code.sandbox import program


def make_scorer(function: Callable, name: str, args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that runs programs. Raises `ValueError` where they cannot be
    confined."""
    problem = program.problem()
    if problem and not args.unsafe_code_execution:
        hint = "--unsafe_code_execution runs programs without this protection"
        raise ValueError(f"--reward {name}: {problem}; {hint}")
    limits = program.Limits(seconds=args.reward_timeout)

    def run(sample: Completion) -> Result:
        answer = thoughts.answer(sample)
        try:
            return Result(function(answer, sample.row, limits, args.unsafe_code_execution))
        except (ValueError, RuntimeError) as error:  # caused by bad tests or by the machine
            return Result(error=distributed.first_line(error))

    free = asyncio.Semaphore(args.reward_workers)

    async def score_one(sample: Completion) -> Result:
        async with free:
            return await in_thread(run, sample)

    async def score(group: Group) -> list[Result]:
        return await asyncio.gather(*map(score_one, group))

    return Scorer(score)


async def in_thread(function: Callable, *arguments: object) -> object:
    """Return what a function returns that waits for something. Unlike `asyncio.to_thread` it does
    not delay the end of a run."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)


passes.make_scorer = partial(make_scorer, passes)
fraction.make_scorer = partial(make_scorer, fraction)
