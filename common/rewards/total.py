"""`--reward`: the weighted sum of several rewards of a rollout. docs/rewards.md says what a reward
may be.

All rewards but those of models begin as soon as the completions of a prompt are sampled, in the
event loop of a thread, while others are sampled or trained on. Reward models and judges are
collective: all ranks call them at the same point.

Shapes: P prompts on this rank, G samples of each.
"""

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
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
from common.rewards.registry import Scorer, make_scorer, reward_of_row
from common.rewards.reward_model import load_model
from common.rewards.thoughts import Thoughts
from common.workers.worker import Result, one_line

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
        ranks. `rows`: of all prompts, checked by `row_check`.

        Raises `ValueError` for a name that is unknown or comes twice, a model that is no reward
        model or does not fit these prompts."""
        columns = list(rows[0]) if rows else []
        self.args = args
        self.scorers: dict[str, Scorer] = {}
        self.models: dict[str, Callable[[list[Group]], list[Result]]] = {}
        self.row_rewards: list[str] = []  # names in the column of by_row
        self.weights: dict[str, float] = {}
        self.thoughts = Thoughts(tokenizer, cut=args.thoughts == "cut")
        weights = args.reward_weights or [1.0] * len(args.reward)
        for name, weight in zip(args.reward, weights, strict=True):
            added = {metric_name(name, args.reward): name}
            if name == "by_row":
                self.row_rewards = sorted({reward_of_row(row) for row in rows})
                added = {own: own for own in self.row_rewards}
            if self.weights.keys() & added:
                raise ValueError(f"--reward {' '.join(args.reward)}: the names must differ")
            if name.startswith(MODEL_KINDS):
                load_to = None if getattr(args, "dry_run", False) else device
                model = load_model("--reward", name, args, rows, tokenizer, load_to)
                if model is None:
                    continue
                self.models |= dict.fromkeys(added, model)
            else:
                for short, own in added.items():
                    self.scorers[short] = make_scorer(own, columns, args, self.thoughts)
            self.weights |= dict.fromkeys(added, weight)
        self.begun: dict[int, Future] = {}  # by prompt number
        self.loop = asyncio.new_event_loop()
        # A daemon: a run that is stopped does not wait for rewards.
        threading.Thread(target=_run, args=(self.loop,), daemon=True).start()
        weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)

    def begin(self, group: Group) -> None:
        """Start computing the rewards of a prompt that need no other rank, and return at once. A
        call of `self` with this group waits for them. From any thread; not collective."""
        self.begun[group[0].number] = self._start(group)

    def _start(self, group: Group) -> Future:
        return asyncio.run_coroutine_threadsafe(
            _score(self.scorers, self.row_rewards, group), self.loop
        )

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

        def table(values: Iterable[float | None]) -> Tensor:
            numbers = [math.nan if value is None else value for value in values]
            return torch.tensor(numbers, dtype=torch.float64).reshape(shape)

        results: dict[str, list[Result]] = {}
        by_name: dict[str, Tensor] = {}
        numbers: dict[str, Tensor] = {}
        rewards_PG = torch.zeros(shape, dtype=torch.float64)
        applies_PG = torch.zeros(shape, dtype=torch.bool)
        failed_PG = torch.zeros(shape, dtype=torch.bool)
        for name, weight in self.weights.items():
            pairs = [checked(result) for result in found[name]]
            for key in dict.fromkeys(chain(*(beside for _, beside in pairs))):
                numbers[f"{name}/{key}"] = x_PG = table(beside.get(key) for _, beside in pairs)
                meter.mean(f"rewards/{name}/{key}", x_PG.nansum(), (~x_PG.isnan()).sum())
            results[name] = []
            for sample, (result, _) in zip(samples, pairs, strict=True):
                if sample.error and result != Result():  # it applies to the row
                    result = Result(error=sample.error)
                results[name].append(result)
                sample.feedback = result.feedback or sample.feedback
            by_name[name] = table(result.value for result in results[name])
            rewards_PG += weight * by_name[name].nan_to_num()
            applies_PG |= ~by_name[name].isnan()
            failed_PG |= table(result.error is not None for result in results[name]).bool()
        self._require_few_errors(results, samples, meter)
        rewards_PG[~applies_PG | failed_PG] = math.nan
        return Scored(rewards_PG, by_name, numbers)

    def first(self, by_name: dict[str, Tensor]) -> Tensor:
        """Return the first of `--reward`, [P, G]; with by_row the one that applies. NaN where there
        is none."""
        names = self.row_rewards if self.args.reward[0] == "by_row" else list(self.weights)[:1]
        return torch.stack([by_name[name] for name in names]).nanmean(0)

    def _require_few_errors(
        self, results: dict[str, list[Result]], samples: list[Completion], meter: Meter
    ) -> None:
        """Count rewards that could not be computed. Raises `RunError` if they are too many.
        Collective."""
        failures = [
            f"{name} on {sample.row['_source']}: {result.error}"
            for name, of_reward in results.items()
            for sample, result in zip(samples, of_reward, strict=True)
            if result.error is not None
        ]
        every = list(chain(*results.values()))
        tried = len(failures) + sum(result.value is not None for result in every)
        meter.mean("reward/error_fraction", len(failures), tried)
        meter.mean("reward/timeout_fraction", sum(result.timed_out for result in every), tried)
        all_failures = list(chain(*distributed.gather_objects(failures)))
        total = int(distributed.all_sum(tried))
        if len(all_failures) > self.args.max_reward_errors * total:
            problem = f"{len(all_failures)} of {total} rewards could not be computed"
            limit = f"--max_reward_errors {self.args.max_reward_errors}"
            raise distributed.RunError(f"{problem} ({limit}); the first: {all_failures[0]}")


def metric_name(name: str, rewards: Sequence[str]) -> str:
    """Return the name of one of `--reward` in metrics: a function's own name; `model`, `judge` or
    `rank` for a model, and of several `model`, `model2`, in the order of `--reward`."""
    if not name.startswith(MODEL_KINDS):
        return name.rpartition(":")[2]
    kind = name.partition(":")[0]
    number = [other for other in rewards if other.startswith(f"{kind}:")].index(name) + 1
    return f"{kind}{number}" if number > 1 else kind


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    except BaseException as error:  # without this a run would wait for its rewards for ever
        fail_in_thread(error)


async def _score(
    scorers: dict[str, Scorer], row_rewards: list[str], group: Group
) -> dict[str, list[Result]]:
    """Return the results of each scorer; of `row_rewards` all are empty but those of the row's."""
    results = {name: [Result()] * len(group) for name in row_rewards}
    names = [name for name in scorers if name not in results or name == group[0].row["reward"]]
    found = await asyncio.gather(*(scorers[name](group) for name in names))
    return results | dict(zip(names, found, strict=True))


def checked(result: Result) -> tuple[Result, dict[str, float]]:
    """Return a result with a finite float or None as its value, and the numbers that were returned
    beside the reward as `(reward, {"name": number})`; with an error if anything of it is no number
    of at most LARGEST. `feedback` is no number, but a text."""
    reward, beside = result.value, {}
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], dict):
        reward, beside = reward[0], dict(reward[1])
    try:
        feedback = str(beside.pop("feedback", ""))
        if "mean" in beside:
            raise ValueError("its number 'mean' is of a name that is taken")
        numbers = {str(key): _number(x, f"its number {key!r} is") for key, x in beside.items()}
        reward = None if reward is None else _number(reward, "returned")
        return result._replace(value=reward, feedback=feedback), numbers
    except Exception as error:  # of values that a user's code returned
        return Result(error=one_line(error).removeprefix("ValueError: ")), {}


def _number(value: object, what: str) -> float:
    if isinstance(value, str | bytes):  # float would parse them
        raise TypeError(f"{what} {value!r:.50}, not a number")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{what} {number}")
    return number
