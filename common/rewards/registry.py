"""The functions that `--reward` names, and the check that rows of data have the columns they need."""

import difflib
from collections.abc import Callable
from pathlib import Path

from common.config.groups import SamplingArgs
from common.parallel import distributed
from common.rewards import code_reward, math_reward
from common.rewards.functions import REWARDS, Reward
from common.rewards.user_code import load_callable, reward_form

BUILT_IN = REWARDS | dict(math=math_reward.math, code=code_reward.passes, code_fraction=code_reward.fraction)


def load_reward(name: str) -> Reward:
    """Return a built-in reward, or `path/to/file.py:function`. Raises `ValueError` for anything else."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise ValueError(f"--reward {name}: unknown; {intention(name)}")
    reward_form(name, function := load_callable("--reward", name))
    return function


def intention(name: str) -> str:
    """Return what an unknown name without a colon probably means."""
    file, dot, function = name.rpartition(".")
    near = difflib.get_close_matches(name, BUILT_IN, 1)
    if near:
        return f"did you mean {near[0]}?"
    if name.endswith(".py"):
        return f"name the function: {name}:..."
    if Path(f"{name}.py").is_file():
        return f"name the function: {name}.py:..."
    if dot and Path(f"{file}.py").is_file():
        return f"did you mean {file}.py:{function}?"
    if Path(name, "config.json").is_file():
        return f"did you mean model:{name}?"
    return f"there are {', '.join([*BUILT_IN, 'by_row', 'environment', 'path/to/file.py:function', 'model:PATH'])}"


def require_usable_rows(name: str, function: Reward, rows: list[dict]) -> None:
    """Raise `ValueError` if the rows lack a column that the function reads, or the function refuses one of them."""
    for column in getattr(function, "columns", ()):
        if not any(column in row for row in rows):
            found = ", ".join(c for c in rows[0] if not c.startswith("_"))
            raise ValueError(f"--reward {name} reads column {column}; the dataset has {found}")
    for row in rows:
        require_usable_row(name, function, row)


def require_usable_row(name: str, function: Reward, row: dict) -> None:
    """Raise `ValueError` naming the row if it lacks a column, or the function refuses it."""
    for column in getattr(function, "columns", ()):
        if row.get(column) is None:
            raise ValueError(f"{row['_source']}: column {column} is missing, --reward {name} reads it")
    if hasattr(function, "check"):
        try:
            function.check(row)
        except BaseException as error:  # perhaps a user's code, which may raise anything
            problem = distributed.first_line(error).removeprefix(f"{row['_source']}: ")
            raise ValueError(f"{row['_source']}: {problem} (--reward {name})") from error


def reward_of_row(row: dict) -> str:
    """Return the reward in the column `reward`. Raises `ValueError` unless it is built in."""
    name = row.get("reward")
    if not isinstance(name, str) or name not in BUILT_IN:
        problem = "is missing" if name is None else f"names {name!r}; there are {', '.join(BUILT_IN)}"
        raise ValueError(f"{row['_source']}: column reward {problem} (--reward by_row)")
    return name


def row_check(args: SamplingArgs) -> Callable[[dict], None]:
    """Return a function that raises `ValueError` for a row that one of `--reward` cannot use.

    Raises `ValueError` for a name that is unknown."""
    by_row = "by_row" in args.reward
    names = [name for name in args.reward if name not in ("by_row", "environment") and not name.startswith("model:")]
    functions = {name: load_reward(name) for name in names}

    def check(row: dict) -> None:
        of_row = {name: BUILT_IN[name] for name in [reward_of_row(row)]} if by_row else {}
        for name, function in (functions | of_row).items():
            require_usable_row(name, function, row)

    return check
