"""Reward functions: `(completion text, example row) -> float`, reward models, and the scoring of a rollout with several
of them at once.

A function may name the columns it reads in an attribute `columns`; a dataset without them is refused at start.
"""

import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from common import distributed
from common.config import RolloutArgs
from common.hub import require_same_tokenizer, resolve_model
from common.models import ScalarModel, load_scalar_model
from common.packing import Sample, pack
from common.reward_functions import REWARDS, Reward


def load_reward(name: str) -> Reward:
    """A built-in reward, or `path/to/file.py:function`. Raises `ValueError` naming what is wrong."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function = name.rpartition(":")
    if not colon:
        raise ValueError(
            f"--reward {name}: unknown; there are {', '.join(REWARDS)}, path/to/file.py:function, model:PATH"
        )
    if not Path(path).is_file():
        raise ValueError(f"--reward {name}: no file {path}")
    spec = importlib.util.spec_from_file_location(f"user_reward_{Path(path).stem}", path)
    if spec is None:
        raise ValueError(f"--reward {name}: {path} is not a Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises, it is named and the run stops
        what = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"--reward {name}: {path} fails to import: {what}") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"--reward {name}: {path} has no function {function}")
    return getattr(module, function)


def require_reward_columns(name: str, function: Reward, rows: list[dict]) -> None:
    """Raises `ValueError` if `rows` lack a column that the function says it reads."""
    for column in getattr(function, "columns", ()):
        if column not in rows[0]:
            found = ", ".join(c for c in rows[0] if c != "_source")
            raise ValueError(f"--reward {name} reads column {column}; the dataset has {found}")
        if bad := next((row for row in rows if row.get(column) is None), None):
            raise ValueError(f"{bad['_source']}: column {column} is missing, --reward {name} reads it")


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, args: RolloutArgs, rows: list[dict], tokenizer, device: torch.device):
        """Loads what `--reward` names: functions, and reward models, frozen and sharded over the ranks.

        Raises `ValueError` for a name that is unknown or comes twice, a column that `rows` lack, a model with another
        tokenizer.
        """
        self.args, self.device = args, device
        self.weights = torch.tensor(args.reward_weights or [1.0] * len(args.reward), dtype=torch.float64)
        self.scorers: dict[str, Reward | ScalarModel] = {}
        for name in args.reward:
            short = name.rpartition(":")[2] if not name.startswith("model:") else "model"
            if short in self.scorers:
                raise ValueError(
                    f"--reward {' '.join(args.reward)}: the names must differ, and one may be a model:PATH"
                )
            if name.startswith("model:"):
                path = resolve_model(name.removeprefix("model:"), "--reward")
                require_same_tokenizer("--reward", path, tokenizer)
                self.scorers[short] = load_scalar_model(path, args, device, trainable=False, flag="--reward")
            else:
                self.scorers[short] = load_reward(name)
                require_reward_columns(short, self.scorers[short], rows)

    def __call__(self, groups: list[list[Sample]]) -> tuple[Tensor, dict[str, Tensor]]:
        """`(rewards_PG, {name: rewards_PG})`, float64. A function that raises, or returns no finite number, leaves NaN:
        the sample has no reward and its group does without it.

        Raises `RunError` when more than `--max_reward_errors` of all ranks' rewards could not be computed.
        """
        errors: list[str] = []
        parts = {name: self._part(name, groups, errors) for name in self.scorers}
        all_errors = [error for errors_of_rank in distributed.gather_objects(errors) for error in errors_of_rank]
        total = int(distributed.all_sum(sum(part.numel() for part in parts.values())))
        if len(all_errors) > self.args.max_reward_errors * total:
            raise distributed.RunError(
                f"{len(all_errors)} of {total} rewards could not be computed (--max_reward_errors "
                f"{self.args.max_reward_errors}); the first: {all_errors[0]}"
            )
        rewards_PG = sum(weight * part for weight, part in zip(self.weights, parts.values(), strict=True))
        return rewards_PG, parts

    def _part(self, name: str, groups: list[list[Sample]], errors: list[str]) -> Tensor:
        scorer, samples = self.scorers[name], [sample for group in groups for sample in group]
        if isinstance(scorer, ScalarModel):
            numbers = score(scorer, [sample.ids for sample in samples], self.args.pack_tokens, self.device)
            values = [
                self._finite(name, sample, number, errors) for sample, number in zip(samples, numbers, strict=True)
            ]
        else:
            values = [self._call(name, sample, errors) for sample in samples]
        return torch.tensor(values, dtype=torch.float64).reshape(len(groups), -1 if groups else 0)

    def _call(self, name: str, sample: Sample, errors: list[str]) -> float:
        try:
            value = float(self.scorers[name](sample.text, sample.row))
        except (Exception, SystemExit) as error:  # counted, reported and bounded by --max_reward_errors
            what = f"{type(error).__name__}: {distributed.first_line(error)}"
            errors.append(f"{name} on {sample.row['_source']}: {what}")
            return math.nan
        return self._finite(name, sample, value, errors)

    def _finite(self, name: str, sample: Sample, value: float, errors: list[str]) -> float:
        if not math.isfinite(value):
            errors.append(f"{name} on {sample.row['_source']}: returned {value}")
            return math.nan
        return value


# ---- reward models ----


def at_end(ids: list[int], row: dict | None = None) -> Sample:
    """A sample of which a scalar model is read once, having seen all of `ids`. Streams follow the targets and the last
    token has none, so one is put behind it; which one does not matter, it is never an input."""
    return Sample(ids + ids[-1:], [False] * len(ids) + [True], row=row or {})


@torch.no_grad()
def score(model: ScalarModel, sequences: list[list[int]], pack_tokens: int, device: torch.device) -> list[float]:
    """The reward model's number for each of this rank's sequences of token ids (prompt and completion). Collective.

    Raises `ValueError` for a sequence that is longer than the model's context.
    """
    longest = max(map(len, sequences), default=0)
    context = getattr(model.hf.config.get_text_config(), "max_position_embeddings", longest)
    if longest > context:
        raise ValueError(f"{model.path}: a sequence of {longest} tokens is longer than its context of {context}")
    samples, scores = [at_end(ids) for ids in sequences], {}
    for mb in pack(samples, pack_tokens, device):
        scores |= zip(map(id, mb.samples), mb.sequence_sums(model(mb)).tolist(), strict=True)
    return [scores[id(sample)] for sample in samples]
