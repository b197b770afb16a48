"""What each name of `--reward` stands for: a function, the rows that it can score, and a scorer,
which computes it for the completions of a prompt. `Rewards` (total.py) runs the scorers.

They share its event loop. Built-in functions are fast and run in this loop; `math` and a user's
functions are awaited from processes (in_processes.py). A function may bring a scorer of its own, as
its attribute `make_scorer`."""

from collections.abc import Awaitable, Callable, Iterable
from importlib.util import find_spec

from common.config.extra import extra, load_named
from common.config.flags import JUDGE_KINDS, MODEL_KINDS
from common.config.online import ScoringArgs
from common.packs.sample import Group
from common.parallel import distributed
from common.rewards.functions import REWARDS, Reward
from common.text.thoughts import Thoughts
from common.workers.worker import Result

OTHERS = dict(
    math="common.rewards.math_reward:math",
    countdown="extras.graders.puzzles:countdown",
    choice="extras.graders.choice:choice",
    stated="extras.graders.choice:stated",
    ifeval="extras.graders.ifeval:ifeval",
    code="extras.code.scorer:passes",
    code_fraction="extras.code.scorer:fraction",
)  # each module is imported when --reward or a row names its function
BUILT_IN = (*REWARDS, *OTHERS)
FORMS = ("by_row", "environment", "path/to/file.py:function", *(f"{k}PATH" for k in MODEL_KINDS))

# ---- names and rows ----


def load_reward(name: str) -> Reward:
    """Return a built-in reward, or `path/to/file.py:function`. Raises `ValueError` for anything
    else, and for `math` without math-verify."""
    if name in REWARDS:
        return REWARDS[name]
    if name == "math" and find_spec("math_verify") is None:
        missing = "the Python package math-verify, which is not installed"
        raise ValueError(f"--reward math needs {missing}; pip install '.[math]'")
    if name in OTHERS:
        return load_named(OTHERS[name], f"--reward {name}")
    if ":" not in name:
        raise ValueError(f"--reward {name}: unknown; there are {', '.join(BUILT_IN + FORMS)}")
    from common.rewards.in_processes import load_function

    return load_function(name)


def load_judges(flag: str):
    """Return the module of rewards that ask a chat model (extras/judges)."""
    with extra("judges", flag):
        from extras.judges import judges
    return judges


def reward_of_row(row: dict) -> str:
    """Return the row's column `reward`. Raises `ValueError` unless it names a built-in reward."""
    name = row.get("reward")
    if isinstance(name, str) and name in BUILT_IN:
        return name
    problem = f"is {name!r:.80}, and there are {', '.join(BUILT_IN)}"
    raise ValueError(f"{row['_source']}: column reward {problem} (--reward by_row)")


def require_usable_row(name: str, function: Reward, row: dict) -> None:
    """Raise `ValueError` naming the row if it lacks a column that the reward reads, or if the
    reward's own `check` refuses it."""
    source = row.get("_source")
    for column in getattr(function, "columns", ()):
        if row.get(column) is None:
            there = ", ".join(key for key, value in row.items() if value and key[:1] != "_")
            problem = f"--reward {name} reads column {column}; the row has {there}"
            raise ValueError(f"{source}: {problem}")
    try:
        if hasattr(function, "check"):
            function.check(row)
    except BaseException as error:  # a user's check may raise anything
        problem = distributed.first_line(error).removeprefix(f"{source}: ")
        raise ValueError(f"{source}: {problem} (--reward {name})") from error


def row_check(args: ScoringArgs) -> Callable[[dict], None]:
    """Return a function that raises `ValueError` for a row that one of `--reward` cannot use.
    Raises `ValueError` at once for an unknown name."""
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


def columns_of_rewards(args: ScoringArgs, rows: Iterable[dict]) -> tuple[set[str], bool]:
    """Return the columns that rewards read, and whether the list is complete: a user's function
    without the attribute `columns` may read any column."""
    names = set(args.reward)
    columns: set[str] = set()
    if "by_row" in names:
        columns.add("reward")
        names |= {str(row.get("reward")) for row in rows} & {*BUILT_IN}
    if any(name.startswith(JUDGE_KINDS) for name in names):
        from common.text.filler import columns_of

        columns |= {"rubric"} | columns_of("--judge_prompt", args.judge_prompt or "")
    is_all = "environment" not in names
    for name in names - {"by_row", "environment"}:
        if not name.startswith(MODEL_KINDS):
            function = load_reward(name)
            columns |= {*getattr(function, "columns", ()), *getattr(function, "may_read", ())}
            is_all &= hasattr(function, "columns") or name in REWARDS
    return columns, is_all


# ---- how they are computed ----


# Returns one result per completion of a prompt. `Rewards` checks the values.
Scorer = Callable[[Group], Awaitable[list[Result]]]


def make_scorer(name: str, columns: list[str], args: ScoringArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that is no model. Raises `ValueError` for an unknown name."""
    if name == "environment":
        return of_environment
    function = load_reward(name)
    if hasattr(function, "make_scorer"):
        return function.make_scorer(name, args, thoughts)
    if name == "math":
        from common.rewards.in_processes import of_math

        return of_math(args, thoughts)
    if ":" in name:
        from common.rewards.in_processes import of_user

        return of_user(name, function, columns, args)

    async def score(group: Group) -> list[Result]:
        return [Result(function(thoughts.read_by(function, each), each.row)) for each in group]

    return score


async def of_environment(group: Group) -> list[Result]:
    """Return the sum of the rewards that the environment gave in all turns."""
    return [Result(sum(reward for _, reward in sample.turn_rewards)) for sample in group]
