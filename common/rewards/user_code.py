"""Functions and classes of a user's file, named `path/to/file.py:name` on the command line."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from common.parallel import distributed
from common.rewards.worker import load_file


def load_callable(flag: str, spec: str) -> Callable:
    """Return the function or class that `spec` names. Its file may import the files beside it.
    Raises `ValueError` with `flag` and the problem."""
    path, _, name = spec.rpartition(":")
    named = getattr(load_user_file(flag, spec, path), name, None)
    if not callable(named):
        raise ValueError(f"{flag} {spec}: {path} has no function {name}")
    return named


def load_user_file(flag: str, spec: str, path: str) -> ModuleType:
    """Return the module of the file `path` of `spec`. Raises `ValueError` with `flag` and the
    problem."""
    if not path.endswith(".py") or not Path(path).is_file():  # worker processes go by .py too
        form = "the form is path/to/file.py:name"
        raise ValueError(f"{flag} {spec}: no file {path or spec} that ends in .py; {form}")
    try:
        return load_file(path)
    except BaseException as error:  # a user's file may raise anything
        problem = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {problem}") from error


def reward_form(
    name: str, function: Callable, data_columns: Iterable[str] = ()
) -> tuple[bool, bool]:
    """Return `(of_group, with_ids)`: how the parameters of a reward ask to be called.

    The usual form is `(completion, row)`, with any names but those of `data_columns` for the row. A
    first one named `completions` gets a list with the texts of all completions of a prompt; a third
    one named `ids` gets the token ids of the completion, or a list of them. Raises `ValueError` for
    other parameters without a default."""
    positions = dict(completion=0, completions=0, row=1, ids=2)
    try:
        if inspect.isclass(function):
            raise TypeError("it is a class; name a function, or an object that can be called")
        signature = inspect.signature(function)
        names = list(signature.parameters)
        for position, parameter in enumerate(names):
            if positions.get(parameter, position) != position:
                raise TypeError(f"{parameter!r} stands elsewhere")
        if names[1:2] and names[1] in data_columns and names[1] not in positions:
            advice = f"call it row, and read row[{names[1]!r}]"
            raise TypeError(f"{names[1]!r} gets the whole row; {advice}")
        with_ids = names[2:3] == ["ids"]
        signature.bind("", {}, *[[]] * with_ids)
    except (TypeError, ValueError) as error:
        forms = "(completion, row) or (completions, row), and may take ids as a third parameter"
        raise ValueError(f"--reward {name}: a reward takes {forms}: {error}") from error
    return names[0] == "completions", with_ids
