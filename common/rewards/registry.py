"""The names of `--reward`: the functions behind them, imported when they are named, and the check
that rows of data have the columns they need."""

import importlib
from collections.abc import Callable, Sequence

from common.config.extra import extra
from common.config.online import SamplingArgs
from common.config.sampling import JUDGE_KINDS, MODEL_KINDS
from common.parallel import distributed
from common.rewards.functions import REWARDS, Reward
from common.rewards.user_code import load_callable, reward_form

OTHERS = dict(
    math="common.rewards.math_reward:math",
    countdown="extras.graders.puzzles:countdown",
    choice="extras.graders.choice:choice",
    stated="extras.graders.choice:stated",
    ifeval="extras.graders.ifeval:ifeval",
    code="extras.code.scorer:passes",
    code_fraction="extras.code.scorer:fraction",
)  # module and function
BUILT_IN = (*REWARDS, *OTHERS)
FORMS = ("by_row", "environment", "path/to/file.py:function", *(f"{k}PATH" for k in MODEL_KINDS))


def load_reward(name: str) -> Reward:
    """Return a built-in reward, or `path/to/file.py:function`. Raises `ValueError` for anything
    else."""
    if name in REWARDS:
        return REWARDS[name]
    if name in OTHERS:
        module, function = OTHERS[name].split(":")
        with extra(module.split(".")[1], f"--reward {name}"):
            return getattr(importlib.import_module(module), function)
    if ":" not in name:
        raise ValueError(f"--reward {name}: unknown; there are {', '.join(BUILT_IN + FORMS)}")
    function = load_callable("--reward", name)
    reward_form(name, function)
    return function


def short_names(rewards: Sequence[str]) -> dict[str, str]:
    """Return the name of each of `--reward` in metrics: a function's own name; `model`, `judge` or
    `rank` for a model, and of several `model`, `model2`, in the order of `--reward`."""
    names = {}
    for name in rewards:
        names[name] = name.rpartition(":")[2]
        if name.startswith(MODEL_KINDS):
            kind = name.partition(":")[0]
            number = [other for other in rewards if other.startswith(f"{kind}:")].index(name) + 1
            names[name] = f"{kind}{number}" if number > 1 else kind
    return names


def require_usable_row(name: str, function: Reward, row: dict) -> None:
    """Raise `ValueError` naming the row if it lacks a column, or the function refuses it."""
    source = row.get("_source")
    for column in getattr(function, "columns", ()):
        if row.get(column) is None:
            there = ", ".join(key for key, value in row.items() if value and key[:1] != "_")
            problem = f"--reward {name} reads column {column}; the row has {there}"
            raise ValueError(f"{source}: {problem}")
    try:
        if hasattr(function, "check"):
            function.check(row)
    except BaseException as error:  # perhaps a user's code, which may raise anything
        problem = distributed.first_line(error).removeprefix(f"{source}: ")
        raise ValueError(f"{source}: {problem} (--reward {name})") from error


def load_judges(flag: str):
    """Return the module of rewards that ask a chat model."""
    with extra("judges", flag):
        from extras.judges import judges
    return judges


def reward_of_row(row: dict) -> str:
    """Return the reward in the column `reward`. Raises `ValueError` unless it is built in."""
    name = row.get("reward")
    if isinstance(name, str) and name in BUILT_IN:
        return name
    problem = f"is {name!r:.80}, and there are {', '.join(BUILT_IN)}"
    raise ValueError(f"{row['_source']}: column reward {problem} (--reward by_row)")


def row_check(args: SamplingArgs) -> Callable[[dict], None]:
    """Return a function that raises `ValueError` for a row that one of `--reward` cannot use.

    Raises `ValueError` for a name that is unknown."""
    functions = {
        name: load_reward(name)
        for name in args.reward
        if name not in ("by_row", "environment") and not name.startswith(MODEL_KINDS)
    }
    judges = [name for name in args.reward if name.startswith(JUDGE_KINDS)]

    def check(row: dict) -> None:
        if judges:
            load_judges(f"--reward {judges[0]}").criteria_of(row, args)
        for name, function in functions.items():
            require_usable_row(name, function, row)
        if "by_row" in args.reward:
            name = reward_of_row(row)
            require_usable_row(name, load_reward(name), row)

    return check
