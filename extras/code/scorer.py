"""The `code` rewards as scorers of a run, which judge many completions at the same time."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from common.config.online import ScoringArgs
from common.packs.sample import Completion, Group
from common.parallel import distributed
from common.rewards.registry import Scorer
from common.text.thoughts import Thoughts
from common.workers.worker import Result
from extras.code.reward import fraction, passes
from extras.code.sandbox import program


def make_scorer(function: Callable, name: str, args: ScoringArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that runs programs. Raises `ValueError` where they cannot be
    confined."""
    unsafe = args.unsafe_code_execution
    program.require_confinement(unsafe, f"--reward {name}")
    limits = program.Limits(seconds=args.reward_timeout)
    free = asyncio.Semaphore(args.reward_workers)

    def run(sample: Completion, future: Future) -> None:
        try:
            result = Result(function(thoughts.answer(sample), sample.row, limits, unsafe))
        except (ValueError, RuntimeError) as error:  # caused by bad tests or by the machine
            result = Result(error=distributed.first_line(error))
        except BaseException as error:
            return future.set_exception(error)
        future.set_result(result)

    async def score_one(sample: Completion) -> Result:
        async with free:
            future: Future = Future()
            # Unlike `asyncio.to_thread` this does not delay the end of a run.
            threading.Thread(target=run, args=(sample, future), daemon=True).start()
            return await asyncio.wrap_future(future)

    async def score(group: Group) -> list[Result]:
        return await asyncio.gather(*map(score_one, group))

    return score


passes.make_scorer = partial(make_scorer, passes)
fraction.make_scorer = partial(make_scorer, fraction)
