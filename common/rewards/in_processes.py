"""Rewards that run in processes of their own (common/workers): `math`, and functions from a user's
file. `reward_form` reads from a function's parameters how it wants to be called."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable

from common.config.online import ScoringArgs
from common.packs.sample import Group
from common.rewards.functions import SCORES, Reward, described
from common.text.thoughts import Thoughts
from common.workers.pool import Pool
from common.workers.user_code import load_callable
from common.workers.worker import Result

MATH = "common.rewards.math_reward:math"


def load_function(name: str) -> Reward:
    """Import and return `path/to/file.py:function`. Raises `ValueError` if it is no reward."""
    function = load_callable("--reward", name)
    reward_form(name, function)
    columns = getattr(function, "columns", ())
    if not isinstance(columns, list | tuple):  # a string would be read as a list of letters
        problem = f"its attribute columns is {columns!r:.80}; write a tuple of names"
        raise ValueError(f"--reward {name}: {problem}")
    return function


# Accepted names of the second parameter, which gets the row. A single letter, or a name that begins
# with _, is accepted too.
ROW_NAMES = set("row example ex sample item record entry instance datum data doc line".split())
# Refused names, which promise something else: parameters of other libraries, and plurals.
NO_COMPLETION = set("prompt prompts query queries data_source".split())
LISTS = set("texts responses outputs answers generations predictions solutions samples".split())
NEVER_FILLED = set(
    "completion_ids prompt prompts prompt_ids ground_truth labels extra_info".split()
)
PLACES = dict(completion=0, completions=0, row=1, ids=2)
SIGNATURES = "(completion, row) or (completions, row), and may take ids as a third parameter"


def reward_form(name: str, function: Callable, columns: Iterable[str] = ()) -> tuple[bool, bool]:
    """Return `(of_group, with_ids)`: whether a reward is called once for all completions of a
    prompt, and whether it takes token ids.

    The usual form is `(completion, row)`. If the first parameter is named `completions`, it gets
    the texts of all completions of a prompt. A third parameter named `ids` gets the sampled token
    ids, of the completion or as one list each. Raises `ValueError` for further parameters without a
    default, and for names that promise something else: a parameter called `ground_truth`, or like
    one of the data's `columns`, would silently get the whole row."""
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
    """Raise `TypeError` for a parameter that would not get what its name promises."""
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


def of_math(args: ScoringArgs, thoughts: Thoughts) -> Callable[[Group], Awaitable]:
    """Return the scorer of `math`. An answer that takes too much time or memory scores 0: as an
    error it would be left out of training, and so go unpunished. A gold answer that cannot be
    parsed is an error, and so is a process that cannot start."""
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


def of_user(
    name: str, function: Callable, columns: list[str], args: ScoringArgs
) -> Callable[[Group], Awaitable]:
    """Return the scorer of a user's function. It gets the whole text of a completion, with the
    thoughts; if its first parameter is `completions`, it gets all texts of a group in one call.
    Such a call may take as long as one call for each completion could."""
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


def values_of_group(values: object) -> list | tuple | None:
    """Return what a function of `completions` returned as one value per completion, or None if it
    has no such form: a list, an array, a tensor, or a dict of lists, `{"rewards": [...], "words":
    [...]}`."""
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
