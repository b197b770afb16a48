"""`--reward`: the weighted sum of several rewards of a rollout. docs/rewards.md says what a reward may be.

A thread computes all rewards but those of reward models, as soon as samples are complete, while others are sampled or
trained on. Reward models are collective: all ranks call them at the same point.

Shapes: P prompts on this rank, G samples of each, N = P x G, K rewards.
"""

import math
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count
from queue import PriorityQueue
from typing import NamedTuple

import torch
from torch import Tensor

from common.config.groups import SamplingArgs, TrainArgs
from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.model.hub import resolve_model
from common.parallel import distributed
from common.rewards.processes import CONCURRENT, Pool, Result
from common.rewards.reward_model import RewardModel, short_names
from common.rewards.scorers import Scorer, make_scorer, scorers_by_row
from common.rewards.thoughts import Thoughts
from common.rewards.worker import one_line


class Scored(NamedTuple):
    """Rewards of groups, float64, NaN where there is none."""

    rewards_PG: Tensor
    """weighted sum"""
    parts: dict[str, Tensor]
    """[P, G] of each reward; NaN too where it does not apply to the row"""
    numbers: dict[str, Tensor]
    """[P, G] of each number that a function returned beside its reward, as `reward/number`"""


@dataclass(eq=False)
class _Begun:
    """A sample whose rewards are being computed."""

    sample: Completion  # a reference: nothing else gets its id
    results: Future  # {name: Result} of the functions
    of_models: dict[str, Result] | None = None


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Load what `--reward` names: functions, and reward models, frozen and sharded over the ranks.

        Raises `ValueError` for a name that is unknown or comes twice, a column that `rows` lack, a row that a reward
        cannot use, a model that is no reward model or does not fit these prompts.
        """
        self.args, self.pools = args, []
        self.thoughts = Thoughts(tokenizer, cut=args.thoughts == "cut")
        self.scorers: dict[str, Scorer] = {}
        self.first_names: list[str] = []
        weights: list[float] = []
        shorts = short_names(args.reward)
        for name, weight in zip(args.reward, args.reward_weights or [1.0] * len(args.reward), strict=True):
            if name == "by_row":
                new = scorers_by_row(rows, args, self.pools, self.thoughts)
            elif name.startswith("model:"):
                dry = isinstance(args, TrainArgs) and bool(args.dry_run)
                path = resolve_model(name.removeprefix("model:"), "--reward", not dry)
                new = {} if dry else {shorts[name]: RewardModel("--reward", path, args, rows, tokenizer, device)}
            else:
                new = {shorts[name]: make_scorer(name, rows, args, self.pools, self.thoughts)}
            if new.keys() & self.scorers:
                raise ValueError(f"--reward {' '.join(args.reward)}: the names must differ")
            self.scorers |= new
            self.first_names = self.first_names or list(new)
            weights += [weight] * len(new)
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.collective = {name: model for name, model in self.scorers.items() if isinstance(model, RewardModel)}
        self.begun: dict[int, _Begun] = {}  # by the id of the sample
        self.queue: PriorityQueue = PriorityQueue()  # of (order, when it came, groups of _Begun)
        self.count = count()
        functions = {name: scorer for name, scorer in self.scorers.items() if name not in self.collective}
        work = (self.queue, functions, self.pools, max(CONCURRENT, 8 * args.reward_workers))
        # One thread, because it owns the pools. A daemon: a run that is stopped does not wait for rewards.
        threading.Thread(target=_score_in_order, args=work, daemon=True).start()
        weakref.finalize(self, self.queue.put, (-math.inf, -1, None))

    def begin(self, groups: list[Group], order: int = 0) -> None:
        """Start computing the rewards that need no other rank, those of a smaller `order` first, and return at once.
        The results are kept until `self` is called with these samples. From any thread; not collective."""
        begun = [[_Begun(sample, Future()) for sample in group] for group in groups]
        for one in chain(*begun):
            assert id(one.sample) not in self.begun, "begun twice"
            self.begun[id(one.sample)] = one
        self.queue.put((order, next(self.count), begun))

    def ask_models(self, groups: list[Group]) -> None:
        """Call the reward models for those of the groups, begun before, that they have not seen, and keep the results
        until `self` is called with them. Collective; a rank may have no groups."""
        new = [group for group in groups if self.begun[id(group[0])].of_models is None]
        results = {name: model(new) for name, model in self.collective.items()}
        for i, sample in enumerate(chain(*new)):
            self.begun[id(sample)].of_models = {name: of_model[i] for name, of_model in results.items()}

    def __call__(self, groups: list[Group], meter: Meter) -> Scored:
        """Return the rewards of the groups. In the sum, rewards that do not apply count nothing; a sample with a reward
        that could not be computed, or with none that applies, has no reward, and its group does without it.

        The numbers beside the rewards are averaged in the meter too. Raises `RunError` when more than
        `--max_reward_errors` of the rewards of all ranks could not be computed.
        """
        samples, shape = list(chain(*groups)), (len(groups), len(groups[0]) if groups else 1)
        self.begin([group for group in groups if id(group[0]) not in self.begun])
        self.ask_models(groups)  # while the thread computes the others
        begun = [self.begun.pop(id(sample)) for sample in samples]
        returned = [one.results.result() | one.of_models for one in begun]
        results: dict[str, list[Result]] = {name: [] for name in self.scorers}
        numbers: dict[str, Tensor] = {}
        for name, of_name in results.items():
            for i in range(len(samples)):
                result, beside = _read(returned[i][name])
                of_name.append(result)
                for key, number in beside.items():
                    meter.mean(f"rewards/{name}/{key}", number)
                    number_PG = numbers.setdefault(f"{name}/{key}", torch.full(shape, math.nan, dtype=torch.float64))
                    number_PG.view(-1)[i] = number
        self._require_few_errors(results, samples, meter)
        values = [math.nan if result.value is None else result.value for result in chain(*results.values())]
        failed = [result.error is not None for result in chain(*results.values())]
        parts_KPG = torch.tensor(values, dtype=torch.float64).reshape(len(results), *shape)  # K may be 0
        failed_KPG = torch.tensor(failed, dtype=torch.bool).reshape(len(results), *shape)
        rewards_PG = (self.weights[:, None, None] * parts_KPG).nansum(0)
        rewards_PG[failed_KPG.any(0) | parts_KPG.isnan().all(0)] = math.nan
        return Scored(rewards_PG, dict(zip(results, parts_KPG, strict=True)), numbers)

    def weight_of(self, name: str) -> float:
        """Return the weight of a reward, 0 for one that is not in `--reward`."""
        return dict(zip(self.scorers, self.weights.tolist(), strict=True)).get(name, 0.0)

    def first(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the first of `--reward`, [P, G]; with by_row the one that applies. NaN where there is none."""
        return torch.stack([parts[name] for name in self.first_names]).nanmean(0)

    def _require_few_errors(self, results: dict[str, list[Result]], samples: list[Completion], meter: Meter) -> None:
        """Count what could not be computed. Raises `RunError` if it is too much. Collective."""
        failures = [
            f"{name} on {sample.row['_source']}: {result.error}"
            for name, of_name in results.items()
            for sample, result in zip(samples, of_name, strict=True)
            if result.error is not None
        ]
        everything = list(chain(*results.values()))
        tried = sum(result.value is not None or result.error is not None for result in everything)
        meter.mean("reward/error_fraction", len(failures), tried)
        meter.mean("reward/timeout_fraction", sum(result.timed_out for result in everything), tried)
        all_failures = list(chain(*distributed.gather_objects(failures)))
        total = int(distributed.all_sum(tried))
        if len(all_failures) > self.args.max_reward_errors * total:
            what = f"{len(all_failures)} of {total} rewards could not be computed"
            limit = f"--max_reward_errors {self.args.max_reward_errors}"
            raise distributed.RunError(f"{what} ({limit}); the first: {all_failures[0]}")


def _score_in_order(queue: PriorityQueue, functions: dict[str, Scorer], pools: list[Pool], enough: int) -> None:
    """Compute the rewards that are begun, until None comes: of so many samples at a time, and no more, because samples
    that come meanwhile may have to go before the others."""
    while True:
        taken: list[list[_Begun]] = []
        while not taken or (sum(map(len, taken)) < enough and not queue.empty()):
            *_, begun = queue.get()
            if begun is None:
                for pool in pools:
                    pool.close()
                return
            taken += begun
        _score(taken, functions)


def _score(taken: list[list[_Begun]], functions: dict[str, Scorer]) -> None:
    groups = [[one.sample for one in group] for group in taken]
    try:
        each = {name: scorer(groups) for name, scorer in functions.items()}
        for i, one in enumerate(chain(*taken)):
            one.results.set_result({name: results[i] for name, results in each.items()})
    except BaseException as error:  # a bug: raised where the rewards are needed
        for one in chain(*taken):
            one.results.set_exception(error)


def _number(value: object) -> float:
    if isinstance(value, str | bytes):  # float would parse them
        raise TypeError(f"returned {value!r:.50}, not a number")
    return float(value)


def _read(result: Result) -> tuple[Result, dict[str, float]]:
    """Return a result with a finite float or None as its value, and the numbers that were returned beside the reward as
    `(reward, {"name": number})`; with an error if anything of it is no finite number."""
    reward, beside = result.value, {}
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], dict):
        reward, beside = reward
    try:
        reward = None if reward is None else _number(reward)
        numbers = {str(key): _number(number) for key, number in beside.items()}
    except Exception as error:  # of values that a user's code returned
        return Result(error=one_line(error)), {}
    if reward is not None and not math.isfinite(reward):
        return Result(error=f"returned {reward}"), {}
    for key, number in numbers.items():
        if key == "mean" or not math.isfinite(number):
            return Result(error=f"its number {key!r} is {'of a name that is taken' if key == 'mean' else number}"), {}
    return result._replace(value=reward), numbers
