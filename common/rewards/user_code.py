"""Functions and classes from a user's file, named `path/to/file.py:name` on the command line."""

from collections.abc import Callable
from pathlib import Path

from common import distributed
from common.rewards.process import load_file


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
