"""Rewards that are models, by their names: reward models and judges, which all ranks compute
together."""

from collections.abc import Callable

import torch

from common.config.online import SamplingArgs
from common.config.sampling import MODEL_KINDS
from common.data.sample import Group
from common.model.hub import resolve_model
from common.model.loading import load_config
from common.rewards.kinds import Scorer
from common.rewards.registry import load_judges
from common.rewards.result import Result
from common.rewards.reward_model import RewardModel


def make_model_scorer(
    name: str, args: SamplingArgs, rows: list[dict], tokenizer, device: torch.device
) -> Scorer | None:
    """Return the scorer of a reward model or a judge; None in a dry run, which loads no model.
    Collective. Raises as `load_model` does."""
    dry_run = bool(getattr(args, "dry_run", False))  # eval.py has no dry run
    model = load_model("--reward", name, args, rows, tokenizer, None if dry_run else device)
    return Scorer(model, is_collective=True) if model else None


def load_model(
    flag: str, name: str, args: SamplingArgs, rows: list[dict], tokenizer,
    device: torch.device | None,
) -> Callable[[list[Group]], list[Result]] | None:  # fmt: skip
    """Return the reward model `model:PATH`, or the judge `judge:PATH` or `rank:PATH`. Without a
    device only check the flags, and return None. Collective. Raises `ValueError` as `RewardModel`
    and `Judge` do, and for a model of the other kind."""
    kind = name.partition(":")[0] if name.startswith(MODEL_KINDS) else "model"
    path = path_of(name)
    folder = resolve_model(path, flag, weights=device is not None)
    heads = " ".join(load_config(folder).architectures or ())
    if kind != "model" and heads.endswith("ForSequenceClassification"):
        raise ValueError(f"{flag} {name}: a reward model; did you mean model:{path}?")
    if kind != "model":
        judge = load_judges(f"{flag} {name}").Judge(
            flag, kind, folder, args, rows, tokenizer, device
        )
        return judge if device is not None else None
    if device is None:
        return None
    try:
        return RewardModel(flag, folder, args, rows, tokenizer, device)
    except ValueError as error:
        is_causal = str(error).endswith("a language model without a reward head")
        hint = f"; did you mean judge:{path}?" if is_causal else ""
        raise ValueError(f"{error}{hint}") from error


def path_of(name: str | None) -> str | None:
    """Return the name of a reward model or a judge without its kind."""
    return name.partition(":")[2] if name and name.startswith(MODEL_KINDS) else name
