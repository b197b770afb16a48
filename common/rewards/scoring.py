"""`--reward`: scoring a rollout by functions, programs' tests, reward models and the environment, several at once.

A reward is a function `(completion text, row) -> float`, or None where it does not apply to the row. It may have two
attributes: `columns`, those it reads (a dataset without them is refused at start), and `check`, which is called with
every row at start and raises `ValueError` for one it cannot use. What may hang runs in processes of its own, with a
deadline for each completion: math, code, and the user's own functions, which may be `async`, look at the completions of
a prompt together, and give numbers of their own beside the reward (user_code.py has their forms).

All but reward models is computed in a thread: of samples that are complete, while others are sampled or trained on.
Reward models are collective, and are asked where all ranks do at once.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import chain, count
from queue import PriorityQueue

import torch
from torch import Tensor

from common.config.groups import SamplingArgs
from common.data.packing import Sample
from common.metrics.meter import Meter
from common.model.hub import resolve_model
from common.parallel import distributed
from common.rewards.background import Background
from common.rewards.functions import REWARDS, Failure, Value
from common.rewards.pool import CONCURRENT, Pool, Result
from common.rewards.registry import load_reward, require_usable_rows, reward_of_row
from common.rewards.reward_model import RewardModel, short_names
from common.rewards.user_code import reward_form
from common.sandbox import program

Group = list[Sample]
Scorer = Callable[[list[Group]], list]  # what was returned for each sample, group by group: `_read` makes Values of it


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Loads what `--reward` names: functions, and reward models, frozen and sharded over the ranks.

        Raises `ValueError` for a name that is unknown or comes twice, a column that `rows` lack, a row that a reward
        cannot use, a model that is no reward model or cannot be asked about these prompts.
        """
        self.args, self.tokenizer, self.device = args, tokenizer, device
        self.pool = Pool(args.reward_workers, args.reward_timeout)
        self.scorers: dict[str, Scorer] = {}
        self.first_names: list[str] = []
        weights: list[float] = []
        shorts = short_names(args.reward)
        for name, weight in zip(args.reward, args.reward_weights or [1.0] * len(args.reward), strict=True):
            new = self._by_row(rows) if name == "by_row" else {shorts[name]: self._scorer(name, rows)}
            if new.keys() & self.scorers:
                raise ValueError(f"--reward {' '.join(args.reward)}: the names must differ")
            self.scorers |= new
            self.first_names = self.first_names or list(new)
            weights += [weight] * len(new)
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.collective = [name for name, scorer in self.scorers.items() if isinstance(scorer, RewardModel)]
        self.begun: PriorityQueue[tuple[int, int, Group, list[Future]]] = PriorityQueue()
        self.count = count()
        self.background = Background(1)  # one thread: it owns the pool

    def begin(self, groups: list[Group], order: int = 0) -> None:
        """Starts on what needs no other rank, and returns at once; on those of a smaller `order` first. From any
        thread; not collective. The samples keep what comes of it until they are called with, and cannot be pickled
        meanwhile."""
        for group in groups:
            assert all(sample.scores is None for sample in group), "begun twice"
            for sample in group:
                sample.scores = Future()
            self.begun.put((order, next(self.count), group, [sample.scores for sample in group]))
        for _ in groups:  # all are there when the thread takes the first: those that fit go to the pool in one go
            self.background.submit(self._score)

    def ask_models(self, groups: list[Group]) -> None:
        """What reward models say of those groups that they were not asked about: it is kept until `self` is called with
        them. Collective; a rank may have none."""
        new = [group for group in groups if group[0].model_scores is None]
        values = {name: self.scorers[name](new) for name in self.collective}
        for i, sample in enumerate(chain(*new)):
            sample.model_scores = {name: of_name[i] for name, of_name in values.items()}

    def _score(self) -> None:
        """The first of all that is begun by now: in one go as many as give the pool enough to do, and no more, since
        what comes meanwhile may have to go before the others. But groups of unequal size apart: a function of a group
        has the time of as many calls as the group has samples."""
        enough = CONCURRENT if any(self.pool.is_async.values()) else 8 * self.args.reward_workers
        taken: list[tuple[Group, list[Future]]] = []
        while not self.begun.empty() and sum(len(group) for group, _ in taken) < enough:
            taken.append(self.begun.get()[2:])
        for size in dict.fromkeys(len(group) for group, _ in taken):
            groups = [group for group, _ in taken if len(group) == size]
            futures = [future for group, of_group in taken if len(group) == size for future in of_group]
            try:
                each = {name: scorer(groups) for name, scorer in self.scorers.items() if name not in self.collective}
                results = [{name: values[i] for name, values in each.items()} for i in range(len(futures))]
            except BaseException as error:  # a bug: whoever waits for a score is to see it
                for future in futures:
                    future.set_exception(error)
                continue
            for future, result in zip(futures, results, strict=True):
                future.set_result(result)

    def __call__(self, groups: list[list[Sample]], meter: Meter) -> tuple[Tensor, dict[str, Tensor]]:
        """`(rewards_PG, {name: rewards_PG})`, float64. NaN among the latter: the reward does not apply to the row, or
        could not be computed. In the sum those that do not apply count nothing; a sample with one that could not be
        computed, or with none that applies, has no reward (NaN) and its group does without it.

        What functions measured beside the reward goes to each sample's `numbers` and, averaged, to the meter.

        Raises `RunError` when more than `--max_reward_errors` of all ranks' rewards could not be computed.
        """
        samples, shape = list(chain(*groups)), (len(groups), -1 if groups else 1)
        self.begin([group for group in groups if group[0].scores is None])
        self.ask_models(groups)  # while the thread is at the others
        returned = [sample.scores.result() | sample.model_scores for sample in samples]
        for sample in samples:
            sample.scores = sample.model_scores = None
        read = {name: [_read(of_sample[name]) for of_sample in returned] for name in self.scorers}
        for name, of_name in read.items():
            for sample, (_, numbers) in zip(samples, of_name, strict=True):
                for key, number in numbers.items():
                    sample.numbers[f"{name}/{key}"] = number
                    meter.mean(f"rewards/{name}/{key}", number)
        values = {name: [value for value, _ in of_name] for name, of_name in read.items()}
        late = sum(isinstance(v, Failure) and v.timed_out for of_name in values.values() for v in of_name)
        values = {name: [_instead(v) for v in of_name] for name, of_name in values.items()}
        failures = [
            f"{name} on {sample.row['_source']}: {value.what}"
            for name, of_name in values.items()
            for sample, value in zip(samples, of_name, strict=True)
            if isinstance(value, Failure)
        ]
        tried = sum(value is not None for of_name in values.values() for value in of_name)
        meter.mean("reward/error_fraction", len(failures), tried)
        meter.mean("reward/timeout_fraction", late, tried)
        all_failures = [failure for of_rank in distributed.gather_objects(failures) for failure in of_rank]
        total = int(distributed.all_sum(tried))
        if len(all_failures) > self.args.max_reward_errors * total:
            raise distributed.RunError(
                f"{len(all_failures)} of {total} rewards could not be computed (--max_reward_errors "
                f"{self.args.max_reward_errors}); the first: {all_failures[0]}"
            )
        failed_KN = torch.tensor([[isinstance(v, Failure) for v in of_name] for of_name in values.values()])
        parts_KN = torch.tensor(
            [[v if isinstance(v, float) else math.nan for v in of_name] for of_name in values.values()],
            dtype=torch.float64,
        )
        failed_KN, parts_KN = (x.reshape(len(values), len(samples)) for x in (failed_KN.bool(), parts_KN))  # K may be 0
        rewards_N = (self.weights[:, None] * parts_KN).nansum(0)
        rewards_N[failed_KN.any(0) | parts_KN.isnan().all(0)] = math.nan
        return rewards_N.reshape(shape), {
            name: part_N.reshape(shape) for name, part_N in zip(values, parts_KN, strict=True)
        }

    def weight_of(self, name: str) -> float:
        """Of one of the rewards; 0 if it is not among them."""
        return dict(zip(self.scorers, self.weights.tolist(), strict=True)).get(name, 0.0)

    def first(self, parts: dict[str, Tensor]) -> Tensor:
        """The first of `--reward`, [P, G]: with by_row the one that applies. NaN without any."""
        return torch.stack([parts[name] for name in self.first_names]).nanmean(0)

    # ---- scorers ----

    def _scorer(self, name: str, rows: list[dict]) -> Scorer:
        if name == "environment":
            return _each(lambda s: Failure(s.error) if s.error else float(sum(reward for _, reward in s.turn_rewards)))
        if name.startswith("model:"):
            path = resolve_model(name.removeprefix("model:"), "--reward")
            return RewardModel("--reward", path, self.args, rows, self.tokenizer, self.device)
        require_usable_rows(name, function := load_reward(name), rows)
        if name in ("code", "code_fraction"):
            return self._code(name, function)
        if name == "math":
            return self._math
        if name in REWARDS:
            return _each(lambda sample: function(sample.text, sample.row))
        return partial(self._in_pool, name, *reward_form(name, function))

    def _by_row(self, rows: list[dict]) -> dict[str, Scorer]:
        """A scorer for each reward that the column `reward` names; it does not apply to the other rows."""
        of_name: dict[str, list[dict]] = {}
        for row in rows:
            of_name.setdefault(reward_of_row(row), []).append(row)

        def only(name: str, scorer: Scorer, groups: list[Group]) -> list[Value]:
            values = iter(scorer([group for group in groups if group[0].row["reward"] == name]))
            return [next(values) if group[0].row["reward"] == name else None for group in groups for _ in group]

        return {name: partial(only, name, self._scorer(name, its)) for name, its in sorted(of_name.items())}

    def _in_pool(self, target: str, of_group: bool, with_ids: bool, groups: list[Group]) -> list:
        """A function of one completion, or of all completions of a prompt, which has the time of as many."""
        size = len(groups[0]) if of_group and groups else 1
        if of_group:
            calls = [([s.text for s in group], group[0].row, [s.completion_ids for s in group]) for group in groups]
        else:
            calls = [(s.text, s.row, s.completion_ids) for s in chain(*groups)]
        results = self.pool.map(target, [call[: 2 + with_ids] for call in calls], size * self.args.reward_timeout)
        return [value for result in results for value in (_spread(result, size) if of_group else [_value(result)])]

    def _math(self, groups: list[Group]) -> list[Value]:
        """An answer that is not understood in time, or in the memory there is, is wrong: models come up with such, and
        may not be spared for it. Only the row's own answer can be an error."""
        values = self._in_pool("common.rewards.math_reward:math", False, False, groups)
        for value in values:
            if isinstance(value, Failure) and not value.what.startswith("ValueError: "):
                value.instead = 0.0
        return values

    def _code(self, name: str, function: Callable) -> Scorer:
        if (problem := program.problem()) and not self.args.unsafe_code_execution:
            raise ValueError(f"--reward {name}: {problem}; --unsafe_code_execution runs programs all the same")
        limits = program.Limits(seconds=self.args.reward_timeout)
        threads = Background(self.args.reward_workers)  # they only wait for the processes

        def run(sample: Sample) -> Value:
            try:
                return function(sample.text, sample.row, limits, self.args.unsafe_code_execution)
            except (ValueError, RuntimeError) as error:  # the tests' own fault, or the machine's
                return Failure(distributed.first_line(error))

        def scorer(groups: list[Group]) -> list[Value]:
            return [future.result() for future in [threads.submit(run, sample) for sample in chain(*groups)]]

        return scorer


def _each(function: Callable[[Sample], Value]) -> Scorer:
    return lambda groups: [function(sample) for sample in chain(*groups)]


def _value(result: Result) -> object:
    return result.value if result.error is None else Failure(result.error, result.timed_out)


def _spread(result: Result, size: int) -> list:
    """What a function of a group said of each of its completions."""
    values = _value(result)
    if isinstance(values, list | tuple) and len(values) == size:
        return list(values)
    if not isinstance(values, Failure):
        what = f"{len(values)} values" if isinstance(values, list | tuple) else f"{type(values).__name__}, not a list,"
        values = Failure(f"returned {what} for {size} completions")
    return [values] * size


def _instead(value: Value) -> Value:
    return value.instead if isinstance(value, Failure) and value.instead is not None else value


def _read(returned: object) -> tuple[Value, dict[str, float]]:
    """A reward as a float, and what `(reward, {"name": number})` has beside it; a failure if anything of it is no
    finite number."""
    if isinstance(returned, Failure):
        return returned, {}
    reward, beside = returned, {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        reward, beside = returned
    try:
        reward = None if reward is None else float(reward)
        numbers = {str(key): float(number) for key, number in beside.items()}
    except Exception as error:  # of values that a user's code returned
        return Failure(f"{type(error).__name__}: {distributed.first_line(error)}"), {}
    if reward is not None and not math.isfinite(reward):
        return Failure(f"returned {reward}"), {}
    for key, number in numbers.items():
        if key == "mean" or not math.isfinite(number):
            return Failure(f"its number {key!r} is {'of a name that is taken' if key == 'mean' else number}"), {}
    return reward, numbers
