"""Functions and classes from a user's file, named `path/to/file.py:name` on the command line."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from common import distributed


def load_callable(flag: str, spec: str) -> Callable:
    """The function or class that `spec` names. Raises `ValueError` with `flag` and what is wrong."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"{flag} {spec}: no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"user_{Path(path).stem}", path)
    if module_spec is None:
        raise ValueError(f"{flag} {spec}: {path} is not a Python file")
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)
    distributed.default_signals()  # it may hang, and there is nothing to save yet
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises, it is named and the run stops
        what = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {what}") from error
    distributed.install_signal_handlers()
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{flag} {spec}: {path} has no function {name}")
    return getattr(module, name)
