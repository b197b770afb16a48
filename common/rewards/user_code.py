"""Functions and classes of a user's file, named `path/to/file.py:name` on the command line."""

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

from common.parallel import distributed
from common.rewards.worker import load_file

POSITIONS = dict(completion=0, completions=0, row=1, ids=2)  # of the parameters of a reward that have these names


def load_callable(flag: str, spec: str) -> Callable:
    """Return the function or class that `spec` names. Raises `ValueError` with `flag` and the problem."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {spec}: no file {path}")
    if not path.endswith(".py"):  # worker processes go by that too
        raise ValueError(f"{flag} {spec}: {path} is not a Python file")
    try:
        with distributed.signals_end_the_process():  # it may hang, and there is nothing to save yet
            module = load_file(path)
    except BaseException as error:  # a user's file may raise anything
        problem = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {problem}") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{flag} {spec}: {path} has no function {name}")
    return getattr(module, name)


def reward_form(name: str, function: Callable, data_columns: Iterable[str] = ()) -> tuple[bool, bool]:
    """Return `(of_group, with_ids)`: how the parameters of a reward ask to be called.

    The usual form is `(completion, row)`, with any names but those of `data_columns` for the row. A first one
    named `completions` gets a list with the texts of all completions of a prompt; a third one named `ids` gets the
    token ids of the completion, or a list of them. Raises `ValueError` for other parameters without a default.
    """
    try:
        if inspect.isclass(function):
            raise TypeError("it is a class; name a function, or an object that can be called")
        signature = inspect.signature(function)
        names = list(signature.parameters)
        if misplaced := [p for i, p in enumerate(names) if POSITIONS.get(p, i) != i]:
            raise TypeError(f"{misplaced[0]!r} stands elsewhere")
        if not isinstance(columns := getattr(function, "columns", ()), tuple | list):
            raise TypeError(f"its attribute columns is {columns!r}, not a tuple of names")
        if wrong := [p for p in names[1:2] if p in data_columns and p not in POSITIONS]:
            raise TypeError(f"{wrong[0]!r} gets the whole row; call it row, and read row[{wrong[0]!r}]")
        with_ids = names[2:3] == ["ids"]
        signature.bind("", {}, *[[]] * with_ids)
    except (TypeError, ValueError) as error:
        forms = "takes (completion, row) or (completions, row), and may take ids as a third parameter"
        raise ValueError(f"--reward {name}: a reward {forms}: {error}") from error
    return names[0] == "completions", with_ids
