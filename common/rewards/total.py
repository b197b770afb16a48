"""`--reward`: the weighted sum of several rewards of a rollout. docs/rewards.md says what a reward
may be.

All rewards but those of models begin as soon as the completions of a prompt are sampled, in the
event loop of a thread, while others are sampled or trained on. Reward models and judges are
collective: all ranks call them at the same point.

Shapes: P prompts on this rank, G samples of each, K rewards.
"""

import asyncio
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from common.config.online import SamplingArgs
from common.config.sampling import MODEL_KINDS
from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.parallel import distributed
from common.parallel.process import fail_in_thread
from common.rewards.processes import Pool
from common.rewards.registry import reward_of_row, row_check, short_names
from common.rewards.result import Result
from common.rewards.reward_model import load_model
from common.rewards.scorers import Scorer, for_rows_of, make_scorer
from common.rewards.thoughts import Thoughts
from common.rewards.worker import one_line

LARGEST = 1e18  # of a reward: the square of a larger one is no float32


class Scored(NamedTuple):
    """Rewards of groups, float64, NaN where there is none."""

    rewards_PG: Tensor
    """weighted sum"""
    by_name: dict[str, Tensor]
    """[P, G] of each reward; NaN too where it does not apply to the row"""
    numbers: dict[str, Tensor]
    """[P, G] of each number that a function returned beside its reward, as `reward/number`"""


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Load what `--reward` names: functions, and reward models, frozen and sharded over the
        ranks.

        Raises `ValueError` for a name that is unknown or comes twice, a column that `rows` lack, a
        row that a reward cannot use, a model that is no reward model or does not fit these prompts.
        """
        check = row_check(args)
        for row in rows:
            check(row)
        columns = list(rows[0]) if rows else []
        self.args = args
        self.thoughts = Thoughts(tokenizer, cut=args.thoughts == "cut")
        self.scorers: dict[str, Scorer] = {}
        self.models: dict[str, Callable[[list[Group]], list[Result]]] = {}
        self.of_rows: list[str] = []  # names that come from the column of by_row
        weights: dict[str, float] = {}
        short = short_names(args.reward)
        reward_weights = args.reward_weights or [1.0] * len(args.reward)
        for name, weight in zip(args.reward, reward_weights, strict=True):
            added = [short[name]]
            if name == "by_row":
                added = self.of_rows = sorted({reward_of_row(row) for row in rows})
                for own in added:
                    scorer = make_scorer(own, columns, args, self.thoughts)
                    self.scorers[own] = for_rows_of(own, scorer)
            elif name.startswith(MODEL_KINDS):
                dry_run = getattr(args, "dry_run", False)  # which loads no model
                load_to = None if dry_run else device
                model = load_model("--reward", name, args, rows, tokenizer, load_to)
                if model is None:
                    continue
                self.models[short[name]] = model
            else:
                self.scorers[short[name]] = make_scorer(name, columns, args, self.thoughts)
            if weights.keys() & added:
                raise ValueError(f"--reward {' '.join(args.reward)}: the names must differ")
            weights |= dict.fromkeys(added, weight)
        self.names = list(weights)
        self.weights = torch.tensor(list(weights.values()), dtype=torch.float64)
        self.begun: dict[int, Future] = {}  # by prompt number
        self.loop = asyncio.new_event_loop()
        pools = [scorer.pool for scorer in self.scorers.values() if scorer.pool]
        # A daemon: a run that is stopped does not wait for rewards.
        threading.Thread(target=_run, args=(self.loop, pools), daemon=True).start()
        weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)

    def begin(self, number: int, group: Group) -> None:
        """Start computing the rewards of the prompt `number` that need no other rank, and return at
        once. They are kept until `self` is called with this group. From any thread; not
        collective."""
        for sample in group:
            sample.number = number
        self.begun[number] = self._start(group)

    def _start(self, group: Group) -> Future:
        return asyncio.run_coroutine_threadsafe(_score(self.scorers, group), self.loop)

    def __call__(self, groups: list[Group], meter: Meter) -> Scored:
        """Return the rewards of the groups. In the sum, rewards that do not apply count nothing; a
        sample with a reward that could not be computed, or with none that applies, has no reward,
        and its group does without it.

        The numbers beside the rewards are averaged in the meter too. Raises `RunError` when more
        than `--max_reward_errors` of the rewards of all ranks could not be computed."""
        begun = [self.begun.pop(group[0].number, None) or self._start(group) for group in groups]
        found = {name: model(groups) for name, model in self.models.items()}
        computed = [future.result() for future in begun]  # waits
        for name in self.scorers:
            found[name] = list(chain(*(of_group[name] for of_group in computed)))

        samples = list(chain(*groups))
        shape = (len(groups), len(groups[0]) if groups else 1)
        results: dict[str, list[Result]] = {}
        numbers: dict[str, Tensor] = {}
        for name in self.names:
            results[name] = []
            beside: list[dict[str, float]] = []
            for sample, (result, of_sample) in zip(samples, map(read, found[name]), strict=True):
                results[name].append(self._with_error(name, sample, result))
                beside.append(of_sample)
                sample.feedback = result.feedback or sample.feedback
            for key in dict.fromkeys(chain(*beside)):
                for of_sample in beside:
                    if key in of_sample:
                        meter.mean(f"rewards/{name}/{key}", of_sample[key])
                values = [of_sample.get(key, math.nan) for of_sample in beside]
                numbers[f"{name}/{key}"] = torch.tensor(values, dtype=torch.float64).reshape(shape)
        self._require_few_errors(results, samples, meter)
        all_results = list(chain(*results.values()))
        values = [math.nan if result.value is None else result.value for result in all_results]
        failed = [result.error is not None for result in all_results]
        # not stacked: there may be no reward
        rewards_KPG = torch.tensor(values, dtype=torch.float64).reshape(len(results), *shape)
        failed_KPG = torch.tensor(failed, dtype=torch.bool).reshape(len(results), *shape)
        rewards_PG = (self.weights[:, None, None] * rewards_KPG).nansum(0)
        rewards_PG[failed_KPG.any(0) | rewards_KPG.isnan().all(0)] = math.nan
        return Scored(rewards_PG, dict(zip(results, rewards_KPG, strict=True)), numbers)

    def _with_error(self, name: str, sample: Completion, result: Result) -> Result:
        """Return the error of an episode that failed, in each reward that applies to its row."""
        if "environment" in self.scorers or not sample.error:  # which reports it itself
            return result
        applies = name not in self.of_rows or sample.row["reward"] == name
        return Result(error=sample.error) if applies else result

    def weight_of(self, name: str) -> float:
        """Return the weight of a reward, 0 for one that is not in `--reward`."""
        return dict(zip(self.names, self.weights.tolist(), strict=True)).get(name, 0.0)

    def first(self, by_name: dict[str, Tensor]) -> Tensor:
        """Return the first of `--reward`, [P, G]; with by_row the one that applies. NaN where there
        is none."""
        names = self.of_rows if self.args.reward[0] == "by_row" else self.names[:1]
        return torch.stack([by_name[name] for name in names]).nanmean(0)

    def _require_few_errors(
        self, results: dict[str, list[Result]], samples: list[Completion], meter: Meter
    ) -> None:
        """Count rewards that could not be computed. Raises `RunError` if they are too many.
        Collective."""
        failures = []
        tried = 0
        timed_out = 0
        for name, results_of_reward in results.items():
            for sample, result in zip(samples, results_of_reward, strict=True):
                tried += result.value is not None or result.error is not None
                timed_out += result.timed_out
                if result.error is not None:
                    failures.append(f"{name} on {sample.row['_source']}: {result.error}")
        meter.mean("reward/error_fraction", len(failures), tried)
        meter.mean("reward/timeout_fraction", timed_out, tried)
        all_failures = list(chain(*distributed.gather_objects(failures)))
        total = int(distributed.all_sum(tried))
        if len(all_failures) > self.args.max_reward_errors * total:
            problem = f"{len(all_failures)} of {total} rewards could not be computed"
            limit = f"--max_reward_errors {self.args.max_reward_errors}"
            raise distributed.RunError(f"{problem} ({limit}); the first: {all_failures[0]}")


def _run(loop: asyncio.AbstractEventLoop, pools: list[Pool]) -> None:
    try:
        loop.run_forever()
    except BaseException as error:  # without this a run would wait for its rewards for ever
        fail_in_thread(error)
    for pool in pools:
        pool.close()


async def _score(scorers: dict[str, Scorer], group: Group) -> dict[str, list[Result]]:
    results = await asyncio.gather(*(scorer.score(group) for scorer in scorers.values()))
    return dict(zip(scorers, results, strict=True))


def read(result: Result) -> tuple[Result, dict[str, float]]:
    """Return a result with a finite float or None as its value, and the numbers that were returned
    beside the reward as `(reward, {"name": number})`; with an error if anything of it is no number
    of at most LARGEST. `feedback` is no number, but a text."""
    reward = result.value
    beside: dict = {}
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], dict):
        reward, beside = reward
    try:
        reward = None if reward is None else _number(reward)
        numbers = {str(k): _number(number) for k, number in beside.items() if k != "feedback"}
        feedback = str(beside.get("feedback", ""))
    except Exception as error:  # of values that a user's code returned
        return Result(error=one_line(error)), {}
    if reward is not None and not abs(reward) <= LARGEST:
        return Result(error=f"returned {reward}"), {}
    for key, number in numbers.items():
        if key == "mean":
            return Result(error="its number 'mean' is of a name that is taken"), {}
        if not abs(number) <= LARGEST:
            return Result(error=f"its number {key!r} is {number}"), {}
    return result._replace(value=reward, feedback=feedback), numbers


def _number(value: object) -> float:
    if isinstance(value, str | bytes):  # float would parse them
        raise TypeError(f"returned {value!r:.50}, not a number")
    return float(value)
