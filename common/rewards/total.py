"""`--reward`: the weighted sum of several rewards of a rollout. docs/rewards.md says what a reward
may be.

A thread computes all rewards but those of reward models, as soon as samples are complete, while
others are sampled or trained on. Reward models are collective: all ranks call them at the same
point.

Shapes: P prompts on this rank, G samples of each, K rewards.
"""

import math
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, count
from queue import PriorityQueue
from typing import NamedTuple

import torch
from torch import Tensor

from common.config.online import SamplingArgs
from common.config.sampling import MODEL_KINDS
from common.data.sample import Completion, Group
from common.metrics.meter import Meter
from common.parallel import distributed
from common.rewards.kinds import Scorer, make_scorer, make_scorers_by_row
from common.rewards.lengths import by_length
from common.rewards.models import make_model_scorer
from common.rewards.registry import BY_LENGTH, short_names
from common.rewards.result import Result
from common.rewards.thoughts import Thoughts
from common.rewards.worker import one_line

SAMPLES_AT_ONCE = 64  # that the thread scores together, at least


class Scored(NamedTuple):
    """Rewards of groups, float64, NaN where there is none."""

    rewards_PG: Tensor
    """weighted sum"""
    by_name: dict[str, Tensor]
    """[P, G] of each reward; NaN too where it does not apply to the row"""
    numbers: dict[str, Tensor]
    """[P, G] of each number that a function returned beside its reward, as `reward/number`"""


@dataclass(eq=False)
class BegunGroup:
    """A group whose rewards are being computed. `Rewards` finds it by the id of its first sample,
    which is unique because the group holds the sample."""

    samples: Group
    results: dict[str, list[Result]] = field(default_factory=dict)
    """results of the samples by reward, as far as they are computed"""
    functions_done: Future = field(default_factory=Future)
    """done when all rewards but those of reward models are computed"""


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Load what `--reward` names: functions, and reward models, frozen and sharded over the
        ranks.

        Raises `ValueError` for a name that is unknown or comes twice, a column that `rows` lack, a
        row that a reward cannot use, a model that is no reward model or does not fit these prompts.
        """
        if args.reward[:1] and args.reward[0] in BY_LENGTH:
            raise ValueError(
                f"--reward {args.reward[0]}: name a reward for right answers before it"
            )
        self.args = args
        self.thoughts = Thoughts(tokenizer, cut=args.thoughts == "cut")
        self.scorers: dict[str, Scorer] = {}
        self.first_names: list[str] = []  # several with by_row
        weights: list[float] = []
        reward_weights = args.reward_weights or [1.0] * len(args.reward)
        short = short_names(args.reward)
        for name, weight in zip(args.reward, reward_weights, strict=True):
            if name == "by_row":
                added = make_scorers_by_row(rows, args, self.thoughts)
            elif name.startswith(MODEL_KINDS):
                scorer = make_model_scorer(name, args, rows, tokenizer, device)
                added = {short[name]: scorer} if scorer else {}
            else:
                added = {short[name]: make_scorer(name, rows, args, self.thoughts)}
            if added.keys() & self.scorers:
                raise ValueError(f"--reward {' '.join(args.reward)}: the names must differ")
            self.scorers |= added
            self.first_names = self.first_names or list(added)
            weights += [weight] * len(added)
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.pools = [scorer.pool for scorer in self.scorers.values() if scorer.pool]
        self.begun: dict[int, BegunGroup] = {}
        self.queue: PriorityQueue = PriorityQueue()  # (order, arrival, list of BegunGroup)
        self.arrivals = count()
        self.collective = {name: s for name, s in self.scorers.items() if s.is_collective}
        functions = {name: s for name, s in self.scorers.items() if not s.is_collective}
        at_once = max(SAMPLES_AT_ONCE, 8 * args.reward_workers)
        # One thread, because it owns the pools. A daemon: a run that is stopped does not wait for
        # rewards.
        work = (self.queue, functions, self.pools, at_once)
        threading.Thread(target=_score_in_order, args=work, daemon=True).start()
        weakref.finalize(self, self.queue.put, (-math.inf, -1, None))

    def begin(self, groups: list[Group], order: int = 0) -> None:
        """Start computing the rewards that need no other rank, those of a smaller `order` first,
        and return at once. The results are kept until `self` is called with these groups. From any
        thread; not collective."""
        begun = list(map(BegunGroup, groups))
        for group in begun:
            assert id(group.samples[0]) not in self.begun, "begun twice"
            self.begun[id(group.samples[0])] = group
        self.queue.put((order, next(self.arrivals), begun))

    def ask_models(self, groups: list[Group]) -> None:
        """Call the reward models for those of the groups, begun before, that they have not seen,
        and keep the results until `self` is called with them. Collective; a rank may have no
        groups."""
        begun = [self.begun[id(group[0])] for group in groups]
        new = [group for group in begun if not self.collective.keys() <= group.results.keys()]
        _score(new, self.collective)

    def __call__(self, groups: list[Group], meter: Meter) -> Scored:
        """Return the rewards of the groups. In the sum, rewards that do not apply count nothing; a
        sample with a reward that could not be computed, or with none that applies, has no reward,
        and its group does without it.

        The numbers beside the rewards are averaged in the meter too. Raises `RunError` when more
        than `--max_reward_errors` of the rewards of all ranks could not be computed."""
        self.begin([group for group in groups if id(group[0]) not in self.begun])
        self.ask_models(groups)  # while the thread computes the others
        begun = [self.begun.pop(id(group[0])) for group in groups]
        assert [group.samples for group in begun] == list(groups), "begun as other groups"
        for group in begun:
            group.functions_done.result()  # waits
        shape = (len(groups), len(groups[0]) if groups else 1)
        results: dict[str, list[Result]] = {}
        numbers: dict[str, Tensor] = {}
        for name in self.scorers:
            pairs = [read(result) for result in chain(*(group.results[name] for group in begun))]
            results[name] = [result for result, _ in pairs]
            if "environment" not in self.scorers:  # which reports the errors of agents
                results[name] = _with_errors(results[name], [*chain(*groups)])
            for sample, result in zip(chain(*groups), results[name], strict=True):
                sample.feedback = result.feedback or sample.feedback
            for key in dict.fromkeys(chain(*(beside for _, beside in pairs))):
                for _, beside in pairs:
                    if key in beside:
                        meter.mean(f"rewards/{name}/{key}", beside[key])
                values = [beside.get(key, math.nan) for _, beside in pairs]
                numbers[f"{name}/{key}"] = torch.tensor(values, dtype=torch.float64).reshape(shape)
        self._require_few_errors(results, list(chain(*groups)), meter)
        all_results = list(chain(*results.values()))
        values = [math.nan if result.value is None else result.value for result in all_results]
        failed = [result.error is not None for result in all_results]
        # not stacked: there may be no reward
        rewards_KPG = torch.tensor(values, dtype=torch.float64).reshape(len(results), *shape)
        failed_KPG = torch.tensor(failed, dtype=torch.bool).reshape(len(results), *shape)
        by_name = dict(zip(results, rewards_KPG, strict=True))
        for name in by_name.keys() & set(BY_LENGTH):
            lengths = [sample.longest for sample in chain(*groups)]
            lengths_PG = torch.tensor(lengths).reshape(shape)
            first_PG = self.first(by_name)
            by_name[name][:] = by_length(name, first_PG, lengths_PG, self.args.max_new_tokens)
        rewards_PG = (self.weights[:, None, None] * rewards_KPG).nansum(0)
        rewards_PG[failed_KPG.any(0) | rewards_KPG.isnan().all(0)] = math.nan
        return Scored(rewards_PG, by_name, numbers)

    def weight_of(self, name: str) -> float:
        """Return the weight of a reward, 0 for one that is not in `--reward`."""
        return dict(zip(self.scorers, self.weights.tolist(), strict=True)).get(name, 0.0)

    def first(self, by_name: dict[str, Tensor]) -> Tensor:
        """Return the first of `--reward`, [P, G]; with by_row the one that applies. NaN where there
        is none."""
        return torch.stack([by_name[name] for name in self.first_names]).nanmean(0)

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


def _score_in_order(
    queue: PriorityQueue, functions: dict[str, Scorer], pools: list, at_once: int
) -> None:
    """Compute the begun rewards in the order of the queue, until it contains None.

    A turn takes groups from the queue until it has `at_once` samples. More would delay groups of a
    smaller order that come during the turn."""
    while True:
        taken: list[BegunGroup] = []
        while not taken or (sum(len(g.samples) for g in taken) < at_once and not queue.empty()):
            *_, begun = queue.get()
            if begun is None:
                for pool in pools:
                    pool.close()
                return
            taken += begun
        try:
            _score(taken, functions)
            for group in taken:
                group.functions_done.set_result(None)
        except BaseException as error:  # a bug: raised where the rewards are needed
            for group in taken:
                group.functions_done.set_exception(error)


def _score(begun: list[BegunGroup], scorers: dict[str, Scorer]) -> None:
    """Compute these rewards of the groups, and keep the results with each group."""
    groups = [group.samples for group in begun]
    for name, scorer in scorers.items():
        results = iter(scorer.score(groups))
        for group in begun:
            group.results[name] = [next(results) for _ in group.samples]


def _with_errors(results: list[Result], samples: list[Completion]) -> list[Result]:
    """Return the results of one reward, with the error of each episode that failed."""
    pairs = zip(results, samples, strict=True)
    return [Result(error=sample.error) if sample.error else result for result, sample in pairs]


def read(result: Result) -> tuple[Result, dict[str, float]]:
    """Return a result with a finite float or None as its value, and the numbers that were returned
    beside the reward as `(reward, {"name": number})`; with an error if anything of it is no finite
    number. `feedback` is no number, but a text."""
    reward = result.value
    beside: dict = {}
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], dict):
        reward, beside = reward
    try:
        reward = None if reward is None else _number(reward)
        numbers = {str(k): _number(number) for k, number in beside.items() if k != "feedback"}
    except Exception as error:  # of values that a user's code returned
        return Result(error=one_line(error)), {}
    if reward is not None and not math.isfinite(reward):
        return Result(error=f"returned {reward}"), {}
    for key, number in numbers.items():
        if key == "mean":
            return Result(error="its number 'mean' is of a name that is taken"), {}
        if not math.isfinite(number):
            return Result(error=f"its number {key!r} is {number}"), {}
    return result._replace(value=reward, feedback=str(beside.get("feedback", ""))), numbers


def _number(value: object) -> float:
    if isinstance(value, str | bytes):  # float would parse them
        raise TypeError(f"returned {value!r:.50}, not a number")
    return float(value)
