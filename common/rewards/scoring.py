"""`--reward`: scoring a rollout by functions, programs' tests, reward models and the environment, several at once.

A reward is a function `(completion text, row) -> float`, or None where it does not apply to the row. It may have two
attributes: `columns`, those it reads (a dataset without them is refused at start), and `check`, which is called with
every row at start and raises `ValueError` for one it cannot use. What may hang runs in processes of its own, with a
deadline for each completion: math, code, and the user's own functions, which may be `async`.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from common import distributed
from common.config import SamplingArgs
from common.hub import require_same_tokenizer, resolve_model
from common.metrics import Meter
from common.models import PackedModel, ScalarModel, load_scalar_model
from common.packing import Sample, pack
from common.rewards import code_reward, math_reward
from common.rewards.functions import REWARDS, Reward
from common.rewards.pool import Pool
from common.rewards.user_code import load_callable
from common.sandbox import program

BUILT_IN = REWARDS | dict(math=math_reward.math, code=code_reward.passes, code_fraction=code_reward.fraction)


@dataclass
class Failure:
    """Why a reward could not be computed, or what is taken for it."""

    what: str
    timed_out: bool = False
    instead: float | None = None


Value = float | None | Failure
Scorer = Callable[[list[Sample]], list[Value]]


def load_reward(name: str) -> Reward:
    """A built-in reward, or `path/to/file.py:function`. Raises `ValueError` naming what is wrong."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        known = ", ".join([*BUILT_IN, "by_row", "environment", "path/to/file.py:function", "model:PATH"])
        raise ValueError(f"--reward {name}: unknown; there are {known}")
    return load_callable("--reward", name)


def require_usable_rows(name: str, function: Reward, rows: list[dict]) -> None:
    """Raises `ValueError` if `rows` lack a column that the function says it reads, or one is not as it must be."""
    for column in getattr(function, "columns", ()):
        if column not in rows[0]:
            found = ", ".join(c for c in rows[0] if not c.startswith("_"))
            raise ValueError(f"--reward {name} reads column {column}; the dataset has {found}")
        if bad := next((row for row in rows if row.get(column) is None), None):
            raise ValueError(f"{bad['_source']}: column {column} is missing, --reward {name} reads it")
    for row in rows if hasattr(function, "check") else ():
        try:
            function.check(row)
        except (Exception, SystemExit) as error:  # perhaps a user's code: whatever it raises, the run stops
            what = distributed.first_line(error).removeprefix(f"{row['_source']}: ")
            raise ValueError(f"{row['_source']}: {what} (--reward {name})") from error


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device):
        """Loads what `--reward` names: functions, and reward models, frozen and sharded over the ranks.

        Raises `ValueError` for a name that is unknown or comes twice, a column that `rows` lack, a row that a reward
        cannot use, a model with another tokenizer.
        """
        self.args, self.tokenizer, self.device = args, tokenizer, device
        self.pool = Pool(args.reward_workers, args.reward_timeout)
        self.scorers: dict[str, Scorer] = {}
        self.first_names: list[str] = []
        weights: list[float] = []
        for name, weight in zip(args.reward, args.reward_weights or [1.0] * len(args.reward), strict=True):
            new = self._by_row(rows) if name == "by_row" else {_short(name): self._scorer(name, rows)}
            if new.keys() & self.scorers:
                raise ValueError(
                    f"--reward {' '.join(args.reward)}: the names must differ, and one may be a model:PATH"
                )
            self.scorers |= new
            self.first_names = self.first_names or list(new)
            weights += [weight] * len(new)
        self.weights = torch.tensor(weights, dtype=torch.float64)

    def __call__(self, groups: list[list[Sample]], meter: Meter) -> tuple[Tensor, dict[str, Tensor]]:
        """`(rewards_PG, {name: rewards_PG})`, float64. NaN among the latter: the reward does not apply to the row, or
        could not be computed. In the sum those that do not apply count nothing; a sample with one that could not be
        computed, or with none that applies, has no reward (NaN) and its group does without it.

        Raises `RunError` when more than `--max_reward_errors` of all ranks' rewards could not be computed.
        """
        samples, shape = [sample for group in groups for sample in group], (len(groups), -1 if groups else 0)
        values = {name: [_finite(v) for v in scorer(samples)] for name, scorer in self.scorers.items()}
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
        failed_N = torch.tensor([any(isinstance(v, Failure) for v in of) for of in zip(*values.values(), strict=True)])
        parts_KN = torch.tensor(
            [[v if isinstance(v, float) else math.nan for v in of_name] for of_name in values.values()],
            dtype=torch.float64,
        )
        rewards_N = (self.weights[:, None] * parts_KN).nansum(0)
        rewards_N[failed_N.bool() | parts_KN.isnan().all(0)] = math.nan
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
            return lambda samples: [
                Failure(s.error) if s.error else float(sum(reward for _, reward in s.turn_rewards)) for s in samples
            ]
        if name.startswith("model:"):
            path = resolve_model(name.removeprefix("model:"), "--reward")
            require_same_tokenizer("--reward", path, self.tokenizer)
            model = load_scalar_model(path, self.args, self.device, trainable=False, flag="--reward")
            return lambda samples: score(model, [s.ids for s in samples], self.args.pack_tokens, self.device)
        require_usable_rows(name, function := load_reward(name), rows)
        if name in ("code", "code_fraction"):
            return self._code(name, function)
        if name == "math":
            return self._math
        if name in REWARDS:
            return lambda samples: [function(sample.text, sample.row) for sample in samples]
        return partial(self._in_pool, name)

    def _by_row(self, rows: list[dict]) -> dict[str, Scorer]:
        """A scorer for each reward that the column `reward` names; it does not apply to the other rows."""
        of_name: dict[str, list[dict]] = {}
        for row in rows:
            name = row.get("reward")
            if not isinstance(name, str) or name not in BUILT_IN:
                what = "is missing" if name is None else f"names {name!r}; there are {', '.join(BUILT_IN)}"
                raise ValueError(f"{row['_source']}: column reward {what} (--reward by_row)")
            of_name.setdefault(name, []).append(row)

        def only(name: str, scorer: Scorer, samples: list[Sample]) -> list[Value]:
            values = iter(scorer([sample for sample in samples if sample.row["reward"] == name]))
            return [next(values) if sample.row["reward"] == name else None for sample in samples]

        return {name: partial(only, name, self._scorer(name, its)) for name, its in sorted(of_name.items())}

    def _in_pool(self, target: str, samples: list[Sample]) -> list[Value]:
        results = self.pool.map(target, [(sample.text, sample.row) for sample in samples])
        return [r.value if r.error is None else Failure(r.error, r.timed_out) for r in results]

    def _math(self, samples: list[Sample]) -> list[Value]:
        """An answer that is not understood in time, or in the memory there is, is wrong: models come up with such, and
        may not be spared for it. Only the row's own answer can be an error."""
        values = self._in_pool("common.rewards.math_reward:math", samples)
        for value in values:
            if isinstance(value, Failure) and not value.what.startswith("ValueError: "):
                value.instead = 0.0
        return values

    def _code(self, name: str, function: Callable) -> Scorer:
        if (problem := program.problem()) and not self.args.unsafe_code_execution:
            raise ValueError(f"--reward {name}: {problem}; --unsafe_code_execution runs programs all the same")
        limits = program.Limits(seconds=self.args.reward_timeout)

        def run(sample: Sample) -> Value:
            try:
                return function(sample.text, sample.row, limits, self.args.unsafe_code_execution)
            except (ValueError, RuntimeError) as error:  # the tests' own fault, or the machine's
                return Failure(distributed.first_line(error))

        def scorer(samples: list[Sample]) -> list[Value]:
            with ThreadPoolExecutor(self.args.reward_workers) as threads:  # they only wait for the processes
                return list(threads.map(run, samples))

        return scorer


def _short(name: str) -> str:
    return "model" if name.startswith("model:") else name.rpartition(":")[2]


def _instead(value: Value) -> Value:
    return value.instead if isinstance(value, Failure) and value.instead is not None else value


def _finite(value: Value) -> Value:
    """As a float, or a failure if it is not a finite number."""
    if value is None or isinstance(value, Failure):
        return value
    try:
        number = float(value)
    except Exception as error:  # of a value that a user's code returned
        return Failure(f"{type(error).__name__}: {distributed.first_line(error)}")
    return number if math.isfinite(number) else Failure(f"returned {number}")


# ---- reward models ----


def at_end(ids: list[int], row: dict | None = None) -> Sample:
    """A sample of which a scalar model is read once, having seen all of `ids`. Streams follow the targets and the last
    token has none, so one is put behind it; which one does not matter, it is never an input."""
    return Sample(ids + ids[-1:], [False] * len(ids) + [True], row=row or {})


def require_context(model: PackedModel, longest: int) -> None:
    """Raises `ValueError` if the longest sequence is longer than the model's context."""
    context = getattr(model.hf.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        raise ValueError(f"{model.path}: a sequence of {longest} tokens is longer than its context of {context}")


@torch.no_grad()
def score(model: ScalarModel, sequences: list[list[int]], pack_tokens: int, device: torch.device) -> list[float]:
    """The reward model's number for each of this rank's sequences of token ids (prompt and completion). Collective.

    Raises `ValueError` for a sequence that is longer than the model's context.
    """
    require_context(model, max(map(len, sequences), default=0))
    samples = [at_end(ids) for ids in sequences]
    for mb in pack(samples, pack_tokens, device):
        mb.to_samples(score=mb.sequence_sums(model(mb)))
    return [sample.score for sample in samples]
