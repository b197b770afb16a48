"""`--reward`: the weighted sum of several rewards of a rollout. docs/rewards.md says what a reward
may be.

    rewards.begin(group)                          from any thread, when a prompt is complete
    rewards_PG, by_name, _ = rewards.wait(groups, meter)             waits for what has begun

Functions begin as soon as the completions of a prompt are sampled, in the event loop of a thread,
while others are sampled or trained on. Reward models and judges are collective: all ranks call them
at the same point.

Shapes: P prompts on this rank, G samples of each."""

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from common.config.flags import MODEL_KINDS, pairs_of
from common.config.online import SamplingArgs
from common.metrics.meter import Meter
from common.packs.sample import Completion, Group
from common.parallel import distributed
from common.parallel.process import fail_in_thread
from common.rewards.functions import SCORES, described, plain_value
from common.rewards.registry import Scorer, make_scorer, reward_of_row
from common.text.thoughts import Thoughts
from common.workers.worker import Result, one_line

LARGEST = 1e18  # the square of a larger reward is no float32
WANTED = 'return a number, None, (number, {"name": number}) or {"score": number}'


class Scored(NamedTuple):
    """Rewards of groups, float64, NaN where there is none."""

    rewards_PG: Tensor
    """weighted sum"""
    by_name: dict[str, Tensor]
    """[P, G] of each reward; NaN too where it does not apply to the row"""
    numbers: dict[str, Tensor]
    """[P, G] of each number that a function returned beside its reward, as `reward/number`"""


def without_unscored(groups: list[Group], rewards_PG: Tensor) -> list[Group]:
    """Return the groups to train on: completions without a reward (NaN) have no trained tokens."""
    return [
        [c.untrained() if missing else c for c, missing in zip(group, missing_G, strict=True)]
        for group, missing_G in zip(groups, rewards_PG.isnan().tolist(), strict=True)
    ]


class Rewards:
    """The weighted sum of `--reward`."""

    def __init__(
        self, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device,
        dry_run: bool | str = False,
    ):  # fmt: skip
        """Load what `--reward` names: functions, and reward models, frozen and sharded over the
        ranks; a `dry_run` loads no model. `rows`: the data rows of all prompts, which `row_check`
        has checked.

        Raises `ValueError` for a name that is unknown or comes twice, a model that is no reward
        model or does not fit these prompts."""
        self.args = args
        self.scorers: dict[str, Scorer] = {}
        self.models: dict[str, Callable[[list[Group]], list[Result]]] = {}
        self.weights: dict[str, float] = {}
        self.thoughts = Thoughts(tokenizer, cut=args.thoughts == "cut")
        self.has_warned = False  # of rewards that failed
        # The rewards that the rows name in their column; each row has one of them.
        by_row = "by_row" in args.reward
        self.row_rewards = sorted({reward_of_row(row) for row in rows}) if by_row else []
        columns = list(rows[0]) if rows else []
        load_to = None if dry_run else device
        weights = args.reward_weights or [1.0] * len(args.reward)
        for flag, weight in zip(args.reward, weights, strict=True):
            for name in self.row_rewards if flag == "by_row" else [flag]:
                short = metric_name(name, args.reward)
                if short in self.weights:
                    raise ValueError(f"--reward {' '.join(args.reward)}: the names must differ")
                if not name.startswith(MODEL_KINDS):
                    self.scorers[short] = make_scorer(name, columns, args, self.thoughts)
                else:
                    from common.rewards.reward_model import load_model

                    model = load_model("--reward", name, args, rows, tokenizer, load_to)
                    if model is None:  # a dry run computes no models
                        continue
                    self.models[short] = model
                self.weights[short] = weight
        self.begun: dict[int | None, Future] = {}  # what `begin` has started, by prompt
        self.loop = asyncio.new_event_loop()
        # A daemon: a run that is stopped does not wait for rewards.
        threading.Thread(target=_run, args=(self.loop,), daemon=True).start()
        weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)

    def begin(self, group: Group) -> None:
        """Start computing the rewards of a prompt that need no other rank, and return at once;
        `wait` has them. From any thread; not collective."""
        self.begun[group[0].number] = self._start(group)

    def _start(self, group: Group) -> Future:
        # Not a method: a coroutine that refers to `self` would keep the thread alive.
        coroutine = _score(self.scorers, self.row_rewards, group)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait(self, groups: list[Group], meter: Meter) -> Scored:
        """Wait for the rewards of the groups, whether they have begun or not, and return them. A
        reward that does not apply adds 0. A sample gets NaN if one of its rewards failed or none
        applies, and the statistics of its group skip it; `reward_errors` says why.

        The numbers beside the rewards are averaged in the meter too. Raises `RunError` if more than
        `--max_reward_errors` of this step's rewards failed, over all ranks. Collective."""
        samples = list(chain(*groups))
        found_by_name = self._collect(groups)
        results = {
            name: [_or_error_of_episode(*pair) for pair in zip(found, samples, strict=True)]
            for name, found in found_by_name.items()
        }
        _note(samples, results)
        scored = weigh(results, self.weights, (len(groups), len(groups[0]) if groups else 1))
        for name, x_PG in scored.numbers.items():
            meter.mean(f"rewards/{name}", x_PG.nansum(), (~x_PG.isnan()).sum())
        self._require_few_errors(results, samples, meter)
        return scored

    def _collect(self, groups: list[Group]) -> dict[str, list[Result]]:
        """Return what each reward has returned for each sample, in the order of `--reward`."""
        begun = [self.begun.pop(group[0].number, None) or self._start(group) for group in groups]
        found = {name: model(groups) for name, model in self.models.items()}
        computed = [future.result() for future in begun]
        for name in self.scorers:
            found[name] = list(chain(*(of_group[name] for of_group in computed)))
        return {name: found[name] for name in self.weights}

    def first(self, by_name: dict[str, Tensor]) -> Tensor:
        """Return the first of `--reward`, [P, G]; with by_row the one that applies. NaN where there
        is none."""
        names = self.row_rewards if self.args.reward[0] == "by_row" else list(self.weights)[:1]
        return torch.stack([by_name[name] for name in names]).nanmean(0)

    def _require_few_errors(
        self, results: dict[str, list[Result]], samples: list[Completion], meter: Meter
    ) -> None:
        """Count rewards that could not be computed, and warn once. Raises `RunError` if too many.
        Collective."""
        failures = [
            f"{name} on {sample.row['_source']}: {result.error}"
            for name, found in results.items()
            for sample, result in zip(samples, found, strict=True)
            if result.error is not None
        ]
        every = list(chain(*results.values()))
        tried = len(failures) + sum(result.value is not None for result in every)
        meter.mean("reward/error_fraction", len(failures), tried)
        meter.mean("reward/timeout_fraction", sum(result.timed_out for result in every), tried)
        # Of the step so far: dapo.py may draw a few prompts more.
        failed, total = map(int, distributed.all_sum(meter.total("reward/error_fraction")))
        are_many = failed > self.args.max_reward_errors * total
        if are_many or failed and not self.has_warned:
            first, *_ = chain(*distributed.gather_objects(failures[:1]))
            problem = f"{failed} of {total} rewards could not be computed"
            for new, old in pairs_of("columns", self.args.columns).items():
                if repr(old) in first:
                    first += f"; --columns renames {old} to {new}"
            limit = f"--max_reward_errors {self.args.max_reward_errors}"
            if are_many:
                raise distributed.RunError(f"{problem} ({limit}); the first: {first}")
            distributed.say(f"warning: {problem} ({limit} tolerates some); the first: {first}")
            self.has_warned = True


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
    """Return the results of each scorer. Of `row_rewards` only the row's own has any."""
    results = {name: [Result()] * len(group) for name in row_rewards}
    names = [name for name in scorers if name not in results or name == group[0].row["reward"]]
    found = await asyncio.gather(*(scorers[name](group) for name in names))
    return results | dict(zip(names, found, strict=True))


def _or_error_of_episode(result: Result, sample: Completion) -> Result:
    """Return the `checked` result, with the error of the episode if that failed and the reward
    applies."""
    result = checked(result)
    if sample.error and (result.error or result.value is not None):
        return Result(error=sample.error, numbers=result.numbers)
    return result


def _note(samples: list[Completion], results: dict[str, list[Result]]) -> None:
    """Write the feedback and the errors of rewards into the samples."""
    for i, sample in enumerate(samples):
        own = {name: found[i] for name, found in results.items()}
        for result in own.values():
            sample.feedback = result.feedback or sample.feedback
        sample.reward_errors = {name: result.error for name, result in own.items() if result.error}


def weigh(
    results: dict[str, list[Result]], weights: dict[str, float], shape: tuple[int, int]
) -> Scored:
    """Return the weighted sum of the results, NaN for a sample with an error or without a value."""
    by_name = {name: table([x.value for x in found], shape) for name, found in results.items()}
    numbers = {
        f"{name}/{key}": table([x.numbers.get(key) for x in found], shape)
        for name, found in results.items()
        for key in dict.fromkeys(chain(*(result.numbers for result in found)))
    }
    rewards_PG = torch.zeros(shape, dtype=torch.float64)
    applies_PG = torch.zeros(shape, dtype=torch.bool)
    failed_PG = torch.zeros(shape, dtype=torch.bool)
    for name, reward_PG in by_name.items():
        rewards_PG += weights[name] * reward_PG.nan_to_num()
        applies_PG |= ~reward_PG.isnan()
        failed_PG |= table([x.error is not None for x in results[name]], shape).bool()
    rewards_PG[~applies_PG | failed_PG] = math.nan
    return Scored(rewards_PG, by_name, numbers)


def table(values: Sequence[float | None], shape: tuple[int, int]) -> Tensor:
    """Return the values of the samples as a table, NaN for None."""
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float64).reshape(shape)


def checked(result: Result) -> Result:
    """Return a result whose value is a finite float or None. What was returned beside a reward, as
    `(reward, {"name": number, "feedback": text})` or `{"score": reward, "name": number}`, is in
    `numbers` and `feedback`. The result is an error if anything else is no number of at most
    LARGEST."""
    try:
        value, beside = result.value, {}
        form = plain_value(value)
        if isinstance(form, tuple | list) and len(form) == 2 and isinstance(form[1], dict):
            value, beside = form[0], dict(form[1])
        elif isinstance(form, dict) and sum(name in form for name in SCORES) == 1:
            (name,) = form.keys() & set(SCORES)
            value = form[name]
            others = {key: x for key, x in form.items() if key != name}
            beside = {key: x for key, x in others.items() if key == "feedback" or _is_number(x)}
        feedback = str(beside.pop("feedback", ""))
        if "mean" in beside:
            raise ValueError("the name of its number 'mean' is reserved; rename it")
        numbers = {str(key): _number(x, f"its number {key!r} is") for key, x in beside.items()}
        value = None if plain_value(value) is None else _number(value, "returned")
        return result._replace(value=value, feedback=feedback, numbers=numbers)
    except Exception as error:  # a user's code may return anything
        return Result(error=one_line(error).removeprefix("ValueError: "))


def _is_number(value: object) -> bool:
    return isinstance(plain_value(value), int | float)


def _number(value: object, what: str) -> float:
    number = plain_value(value)
    if isinstance(number, str | bytes) or not hasattr(number, "__float__"):  # float parses texts
        raise TypeError(f"{what} {described(value)}, not a number; {WANTED}")
    number = float(number)
    if not abs(number) <= LARGEST:
        raise ValueError(f"{what} {number}")
    return number
