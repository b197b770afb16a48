"""Functions and classes of a user's file, named `path/to/file.py:name` on the command line."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from common.parallel import distributed
from common.workers.worker import load_file


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
