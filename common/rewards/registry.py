"""The names of `--reward`: the functions behind them, the rows that they can use, and how each is
computed for the completions of a prompt.

A scorer computes a reward of one prompt in the event loop of `Rewards`, while others wait: it calls
built-in functions there, `math` and a user's functions in processes. A built-in function may have a
`make_scorer` of its own."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable

from common.config.extra import extra, load_named
from common.config.flags import JUDGE_KINDS, MODEL_KINDS
from common.config.online import SamplingArgs
from common.packs.sample import Group
from common.parallel import distributed
from common.rewards.functions import REWARDS, Reward
from common.text.filler import columns_of
from common.text.thoughts import Thoughts
from common.workers.pool import Pool
from common.workers.user_code import load_callable
from common.workers.worker import Result

MATH = "common.rewards.math_reward:math"
OTHERS = dict(
    math=MATH,
    countdown="extras.graders.puzzles:countdown",
    choice="extras.graders.choice:choice",
    stated="extras.graders.choice:stated",
    ifeval="extras.graders.ifeval:ifeval",
    code="extras.code.scorer:passes",
    code_fraction="extras.code.scorer:fraction",
)  # a module is imported when its function is named
BUILT_IN = (*REWARDS, *OTHERS)
FORMS = ("by_row", "environment", "path/to/file.py:function", *(f"{k}PATH" for k in MODEL_KINDS))

# ---- names and rows ----


def load_reward(name: str) -> Reward:
    """Return a built-in reward, or `path/to/file.py:function`. Raises `ValueError` for anything
    else."""
    if name in REWARDS:
        return REWARDS[name]
    if name in OTHERS:
        return load_named(OTHERS[name], f"--reward {name}")
    if ":" not in name:
        raise ValueError(f"--reward {name}: unknown; there are {', '.join(BUILT_IN + FORMS)}")
    function = load_callable("--reward", name)
    reward_form(name, function)
    columns = getattr(function, "columns", ())
    if not isinstance(columns, list | tuple):  # a text would be read letter by letter
        problem = f"its attribute columns is {columns!r:.80}; write a tuple of names"
        raise ValueError(f"--reward {name}: {problem}")
    return function


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
    except BaseException as error:  # it may be a user's, which may raise anything
        problem = distributed.first_line(error).removeprefix(f"{source}: ")
        raise ValueError(f"{source}: {problem} (--reward {name})") from error


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


def columns_of_rewards(args: SamplingArgs, rows: Iterable[dict]) -> tuple[set[str], bool]:
    """Return the columns that rewards read, and whether these are all: a function without the
    attribute `columns` may read any."""
    names = set(args.reward)
    columns: set[str] = set()
    if "by_row" in names:
        columns.add("reward")
        names |= {str(row.get("reward")) for row in rows} & {*BUILT_IN}
    if any(name.startswith(JUDGE_KINDS) for name in names):
        columns |= {"rubric"} | columns_of("--judge_prompt", args.judge_prompt or "")
    is_all = "environment" not in names
    for name in names - {"by_row", "environment"}:
        if not name.startswith(MODEL_KINDS):
            function = load_reward(name)
            columns |= {*getattr(function, "columns", ()), *getattr(function, "may_read", ())}
            is_all &= hasattr(function, "columns") or name in REWARDS
    return columns, is_all


# Names of the second parameter, which gets the row. One letter and a name with _ will do too.
ROW_NAMES = set("row example ex sample item record entry instance datum data doc line".split())
# Names of other tools, and of lists, that promise something else than a reward's parameters get.
NO_COMPLETION = set("prompt prompts query queries data_source".split())
LISTS = set("texts responses outputs answers generations predictions solutions samples".split())
NEVER_FILLED = set(
    "completion_ids prompt prompts prompt_ids ground_truth labels extra_info".split()
)
PLACES = dict(completion=0, completions=0, row=1, ids=2)
SIGNATURES = "(completion, row) or (completions, row), and may take ids as a third parameter"


def reward_form(name: str, function: Callable, columns: Iterable[str] = ()) -> tuple[bool, bool]:
    """Return `(of_group, with_ids)`: how the parameters of a reward ask to be called.

    The usual form is `(completion, row)`. A first parameter named `completions` gets the texts of
    all completions of a prompt, a third one named `ids` the sampled token ids of the completion, or
    a list of them. Raises `ValueError` for a name that promises something else, such as one of
    `columns` or `ground_truth`: it would get the whole row; and for further parameters without a
    default."""
    try:
        if inspect.isclass(function):
            raise TypeError("it is a class; name a function, or an object that can be called")
        if inspect.isasyncgenfunction(function):
            raise TypeError("it is an async generator; return a number or a list")
        signature = inspect.signature(function)
        names = list(signature.parameters)
        require_known_names(signature, set(columns))
        with_ids = names[2:3] == ["ids"]
        signature.bind("", {}, *[[]] * with_ids)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--reward {name}: a reward takes {SIGNATURES}: {error}") from error
    return names[0] == "completions", with_ids


def require_known_names(signature: inspect.Signature, columns: set[str]) -> None:
    """Raise `TypeError` for a parameter whose name promises something that it does not get."""
    for place, name in enumerate(signature.parameters):
        if PLACES.get(name, place) != place:
            raise TypeError(f"{name!r} stands elsewhere")
    for place, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_column = name in columns and name not in PLACES
        if place == 0 and (is_column or name in NO_COMPLETION | LISTS):
            raise TypeError(f"{name!r} gets the text of one completion; call it completion")
        if place == 1 and name != "row":
            is_row = name in ROW_NAMES or len(name) == 1 or name.startswith("_")
            if not is_row or name in columns:
                read = f", and read row[{name!r}]" if name in columns else ""
                raise TypeError(f"{name!r} gets the whole row; call it row{read}")
        if place > 1 and name in columns | NEVER_FILLED:
            advice = "call it ids" if name == "completion_ids" else "read the row"
            raise TypeError(f"{name!r} gets nothing; {advice}")


# ---- how they are computed ----


# Returns a result for each completion of a prompt, whose value is not checked yet.
Scorer = Callable[[Group], Awaitable[list[Result]]]


def make_scorer(name: str, columns: list[str], args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """Return the scorer of a reward that is not a model. Raises `ValueError` for an unknown
    name."""
    if name == "environment":
        return of_environment
    function = load_reward(name)
    if hasattr(function, "make_scorer"):
        return function.make_scorer(name, args, thoughts)
    if name == "math":
        return of_math(args, thoughts)
    if ":" in name:
        return of_user(name, function, columns, args)

    async def score(group: Group) -> list[Result]:
        return [Result(function(thoughts.read_by(function, each), each.row)) for each in group]

    return score


async def of_environment(group: Group) -> list[Result]:
    """Return the sum of the rewards of all turns. `Rewards` counts the errors of episodes."""
    return [Result(sum(reward for _, reward in sample.turn_rewards)) for sample in group]


def of_math(args: SamplingArgs, thoughts: Thoughts) -> Scorer:
    """An answer that exceeds the time or memory limit is wrong; as an error it would go unpunished.
    A gold answer that cannot be parsed is an error, and so is a process that cannot start."""
    pool = Pool(MATH, args.reward_workers, args.reward_timeout, shared=True)

    async def score_one(sample) -> Result:
        result = await pool.call(thoughts.answer(sample), sample.row)
        faults = "ValueError: ", f"{MATH} cannot be loaded: "
        if result.error is None or result.error.startswith(faults):
            return result
        return result._replace(value=0.0, error=None)

    async def score(group: Group) -> list[Result]:
        return await asyncio.gather(*map(score_one, group))

    return score


def of_user(name: str, function: Callable, columns: list[str], args: SamplingArgs) -> Scorer:
    """A user's function reads all text of a completion or, if it takes `completions`, of a group.
    A call for a group has the time limit times the number of its completions."""
    of_group, with_ids = reward_form(name, function, columns)
    is_async = inspect.iscoroutinefunction(function)
    pool = Pool(name, args.reward_workers, args.reward_timeout, is_async=is_async)

    async def score_samples(group: Group) -> list[Result]:
        calls = [(s.text, s.row, s.sampled_ids)[: 2 + with_ids] for s in group]
        return await asyncio.gather(*(pool.call(*call) for call in calls))

    async def score_group(group: Group) -> list[Result]:
        texts = [sample.text for sample in group]
        ids = [sample.sampled_ids for sample in group]
        call = (texts, group[0].row, ids)[: 2 + with_ids]
        result = await pool.call(*call, seconds=len(group) * pool.seconds)
        if result.error is None:
            values = values_of_group(result.value)
            if values is not None and len(values) == len(group):
                return [Result(value) for value in values]
            came = described(result.value)
            result = Result(error=f"returned no list of {len(group)} values but {came}")
        return [result] * len(group)

    return score_group if of_group else score_samples


# ---- what a function of a user may return ----

SCORES = ("score", "reward")  # keys of a reward in a dict


def plain_value(value: object) -> object:
    """Return an array or a tensor as numbers, and a list of one value as this value."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1:
        return plain_value(value[0])
    return value


def values_of_group(values: object) -> list | tuple | None:
    """Return the values of a group, one for each completion: a list, an array, a tensor, or a dict
    of lists, `{"rewards": [...], "words": [...]}`. None for anything else."""
    if isinstance(values, dict):
        lists = {key.removesuffix("s") if key in ("scores", "rewards") else key: values_of_group(x)
                 for key, x in values.items()}  # fmt: skip
        if not set(SCORES) & set(lists) or None in lists.values():
            return None
        if len(set(map(len, lists.values()))) > 1:
            return None
        return [dict(zip(lists, each, strict=True)) for each in zip(*lists.values(), strict=True)]
    if hasattr(values, "tolist"):
        values = values.tolist()
    return values if isinstance(values, list | tuple) else None


def described(value: object) -> str:
    """Return what a function returned, in a few words."""
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"a dict with the keys {', '.join(map(repr, list(value)[:6]))}"
    if hasattr(value, "shape"):
        return f"a {kind} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple | set):
        return f"a {kind} of {len(value)} values"
    return f"{value!r:.50}" if isinstance(value, str | bytes | int | float) else f"a {kind}"
