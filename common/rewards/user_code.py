"""Functions and classes from a user's file, named `path/to/file.py:name` on the command line."""

import inspect
from collections.abc import Callable
from pathlib import Path

from common.parallel import distributed
from common.rewards.worker import load_file


def load_callable(flag: str, spec: str) -> Callable:
    """The function or class that `spec` names. Raises `ValueError` with `flag` and what is wrong."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {spec}: no file {path}")
    if not path.endswith(".py"):  # worker processes go by that too
        raise ValueError(f"{flag} {spec}: {path} is not a Python file")
    try:
        with distributed.signals_end_the_process():  # it may hang, and there is nothing to save yet
            module = load_file(path)
    except (Exception, SystemExit) as error:  # whatever the user's file raises, it is named and the run stops
        what = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {what}") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{flag} {spec}: {path} has no function {name}")
    return getattr(module, name)


PLACES = dict(completion=0, completions=0, row=1, ids=2)


def reward_form(name: str, function: Callable) -> tuple[bool, bool]:
    """How a reward is called, which its parameters say: `(completion, row)`, whatever the two are named; of a function
    whose first is named `completions` with the texts of all completions of a prompt, in a list. A third one named `ids`
    gets the token ids of the completion, or a list of theirs. Returns `(of_group, with_ids)`.

    Raises `ValueError` for other parameters that must be given.
    """
    try:
        signature = inspect.signature(function)
        names = list(signature.parameters)
        if misplaced := [p for i, p in enumerate(names) if PLACES.get(p, i) != i]:
            raise TypeError(f"{misplaced[0]!r} stands elsewhere")
        with_ids = names[2:3] == ["ids"]
        signature.bind("", {}, *[[]] * with_ids)
    except (TypeError, ValueError) as error:
        what = "takes (completion, row) or (completions, row), and may take ids as a third parameter"
        raise ValueError(f"--reward {name}: a reward {what}: {error}") from error
    return names[0] == "completions", with_ids
