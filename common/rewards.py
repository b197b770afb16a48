"""Reward functions: `(completion text, example row) -> float`, and the scoring of a rollout with several at once.

A function may name the columns it reads in an attribute `columns`; a dataset without them is refused at start.
"""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from common import distributed
from common.models import ScalarModel
from common.packing import Sample, pack

Reward = Callable[[str, dict], float]

NUMBER = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"  # without sign
FINAL_ANSWER = re.compile(rf"(?:####|\bA:)[\s*]*([-+]?)\s*\$?\s*({NUMBER})(?!\d|\s*/\s*\d)")
FORMAT = re.compile(rf"(?:^|\n)(?:####|A:) *[-+]?\$?{NUMBER}\s*$")


def to_number(text: str) -> Fraction | None:
    """`-1,234.50` -> Fraction(-2469, 2); None if it is not one number. Exact: 0.1 + 0.2 problems do not arise."""
    if len(text) > 100:  # no answer, and Python refuses to convert integers of thousands of digits
        return None
    text = text.strip().rstrip(".%").lstrip("$").replace(",", "")
    return Fraction(text) if re.fullmatch(r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)", text) else None


def exact_match(completion: str, row: dict) -> float:
    """1 if the completion is the `answer` column, white space at the ends aside."""
    return float(completion.strip() == str(row["answer"]).strip())


def gsm8k(completion: str, row: dict) -> float:
    """1 if the last `#### n` or `A: n` of the completion equals that of the `answer` column (or the column itself) as a
    number: commas, signs, a dollar sign and trailing zeros do not matter."""
    found, gold = final_answers(completion), final_answers(str(row["answer"])) or [str(row["answer"])]
    return float(bool(found) and to_number(found[-1]) is not None and to_number(found[-1]) == to_number(gold[-1]))


def final_answers(text: str) -> list[str]:
    """Every number that `####` or `A:` announces, sign and digits only."""
    return [sign + number for sign, number in FINAL_ANSWER.findall(text)]


def boxed(completion: str, row: dict) -> float:
    """1 if the last \\boxed{...} of the completion equals the `answer` column (or its \\boxed{...}): as numbers if both
    are, else as text without white space."""
    found, gold = last_boxed(completion), last_boxed(str(row["answer"])) or str(row["answer"])
    if found is None:
        return 0.0
    if to_number(found) is not None:
        return float(to_number(found) == to_number(gold))
    return float("".join(found.split()) == "".join(gold.split()))


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}, with balanced braces; None without one."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + len("\\boxed{") - 1, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return None


def format(completion: str, row: dict) -> float:
    """1 if the completion ends with a line `#### n` (or `A: n`), whatever the number."""
    return float(FORMAT.search(completion) is not None)


exact_match.columns = gsm8k.columns = boxed.columns = ("answer",)
REWARDS: dict[str, Reward] = {f.__name__: f for f in (exact_match, gsm8k, boxed, format)}


def load_reward(name: str) -> Reward:
    """A built-in reward, or `path/to/file.py:function`. Raises `ValueError` naming what is wrong."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function = name.rpartition(":")
    if not colon:
        raise ValueError(f"--reward {name}: unknown; there are {', '.join(REWARDS)}, or path/to/file.py:function")
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


class Rewards:
    """The weighted sum of `--reward`. Call it with groups of samples; it is collective."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], max_errors: float, rows: list[dict]):
        self.functions = {name.rpartition(":")[2]: load_reward(name) for name in names}
        if len(self.functions) != len(names):
            raise ValueError(f"--reward {' '.join(names)}: the names must differ")
        self.weights = torch.tensor(weights or [1.0] * len(names), dtype=torch.float64)
        self.max_errors = max_errors
        for name, function in self.functions.items():
            for column in getattr(function, "columns", ()):
                if column not in rows[0]:
                    found = ", ".join(c for c in rows[0] if c != "_source")
                    raise ValueError(f"--reward {name} reads column {column}; the dataset has {found}")
                if bad := next((row for row in rows if row.get(column) is None), None):
                    raise ValueError(f"{bad['_source']}: column {column} is missing, --reward {name} reads it")

    def __call__(self, groups: list[list[Sample]]) -> tuple[Tensor, dict[str, Tensor]]:
        """`(rewards_PG, {name: rewards_PG})`, float64. A function that raises, or returns no finite number, leaves NaN:
        the sample has no reward and its group does without it.

        Raises `RunError` when more than `--max_reward_errors` of all ranks' rewards could not be computed.
        """
        errors: list[str] = []
        parts = {
            name: torch.tensor([[self._call(name, s, errors) for s in group] for group in groups], dtype=torch.float64)
            for name in self.functions
        }
        all_errors = [error for errors_of_rank in distributed.gather_objects(errors) for error in errors_of_rank]
        total = int(distributed.all_sum(sum(part.numel() for part in parts.values())))
        if len(all_errors) > self.max_errors * total:
            raise distributed.RunError(
                f"{len(all_errors)} of {total} rewards could not be computed (--max_reward_errors {self.max_errors}); "
                f"the first: {all_errors[0]}"
            )
        rewards_PG = sum(weight * part for weight, part in zip(self.weights, parts.values(), strict=True))
        return rewards_PG, parts

    def _call(self, name: str, sample: Sample, errors: list[str]) -> float:
        try:
            value = float(self.functions[name](sample.text, sample.row))
        except (Exception, SystemExit) as error:  # counted, reported and bounded by --max_reward_errors
            what = f"{type(error).__name__}: {distributed.first_line(error)}"
            errors.append(f"{name} on {sample.row['_source']}: {what}")
            return math.nan
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
    """The reward model's number for each of this rank's sequences of token ids (prompt and completion). Collective."""
    samples, scores = [at_end(ids) for ids in sequences], {}
    for mb in pack(samples, pack_tokens, device):
        scores |= zip(map(id, mb.samples), mb.sequence_sums(model(mb)).tolist(), strict=True)
    return [scores[id(sample)] for sample in samples]
