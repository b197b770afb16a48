"""Loading functions and classes that the command line names as `path/to/file.py:name`."""

import ast
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from common.parallel import distributed
from common.workers.worker import load_file


def load_callable(flag: str, spec: str) -> Callable:
    """Return the function or class that `spec` names. Its file may import the files beside it.
    Raises `ValueError` naming the `flag`."""
    path, _, name = spec.rpartition(":")
    named = getattr(load_user_file(flag, spec, path), name, None)
    if not callable(named):
        raise ValueError(f"{flag} {spec}: {path} has no function {name}")
    return named


def load_user_file(flag: str, spec: str, path: str) -> ModuleType:
    """Import the file `path`, which is a part of `spec`. Raises `ValueError` naming the `flag`."""
    if not path.endswith(".py") or not Path(path).is_file():  # worker processes go by .py too
        form = "the form is path/to/file.py:name"
        raise ValueError(f"{flag} {spec}: no file {path or spec} that ends in .py; {form}")
    try:
        warn_of_taken_names(f"{flag} {spec}", path)
        return load_file(path)
    except BaseException as error:  # a user's file may raise anything
        problem = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {problem}") from error


@cache
def warn_of_taken_names(label: str, path: str) -> None:
    """Warn of each file beside the user's file that it imports but cannot get: Python has another
    module of that name and finds it first, because the user's folder is searched last."""
    nodes = [*ast.walk(ast.parse(Path(path).read_bytes()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    for name in sorted({name.partition(".")[0] for name in names | {n.module for n in froms}}):
        folder = Path(path).absolute().parent
        beside = [folder / f"{name}.py", folder / name / "__init__.py"]
        found = importlib.util.find_spec(name) if any(map(Path.is_file, beside)) else None
        # A folder without __init__.py has no origin, and gives way to a file.
        other = found and found.origin
        if other and Path(other).resolve() not in [file.resolve() for file in beside]:
            problem = f"import {name} finds {other}, not the file in {folder}"
            distributed.say(f"warning: {label}: {problem}; rename that file")
