"""Functions and classes of a user's file, named `path/to/file.py:name` on the command line."""

import ast
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from common.parallel import distributed
from common.rewards.worker import load_file

POSITIONS = dict(completion=0, completions=0, row=1, ids=2)  # of the parameters of a reward that have these names


def load_callable(flag: str, spec: str) -> Callable:
    """Return the function or class that `spec` names. Its file may import the files beside it. Raises `ValueError` with
    `flag` and the problem."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        files = [file for file in (f"{path}.py", f"{path.replace('.', '/')}.py") if Path(file).is_file()]
        hint = f"; did you mean {files[0]}:{name}?" if files else ""
        raise ValueError(f"{flag} {spec}: no file {path}{hint}")
    if not path.endswith(".py"):  # worker processes go by that too
        raise ValueError(f"{flag} {spec}: {path} is not a Python file")
    try:
        with distributed.signals_end_the_process():  # it may hang, and there is nothing to save yet
            warn_of_taken_names(f"{flag} {spec}", Path(path))
            if (folder := str(Path(path).absolute().parent)) not in sys.path:
                sys.path.append(folder)
            module = load_file(path)
    except BaseException as error:  # a user's file may raise anything
        problem = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {problem}") from error
    if not callable(getattr(module, name, None)):
        known = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{flag} {spec}: {path} has no function {name}{hint}")
    return getattr(module, name)


@cache
def warn_of_taken_names(label: str, path: Path) -> None:
    """Print a line, once, for each file beside a user's file that it should import but that has the name of another
    module. Python finds the other one, because the folder is the last one that is searched."""
    folder = path.absolute().parent
    files = [path]
    names: set[str] = set()
    for file in files:  # which grows by the imported files
        for name in sorted(imported_names(file) - names):
            names.add(name)
            places = (folder / f"{name}.py", folder / name / "__init__.py")
            siblings = [place for place in places if place.is_file()]
            if not siblings:
                continue
            files.append(siblings[0])
            found = place_of(name)
            if found is not None and not (Path(found).exists() and siblings[0].samefile(found)):
                distributed.say(f"warning: {label}: import {name} finds {found}, not {siblings[0]}; rename that file")


def imported_names(path: Path) -> set[str]:
    """Return the top-level names that a Python file imports; none if it cannot be parsed, which the import reports."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {module.partition(".")[0] for module in modules}


def place_of(name: str) -> str | None:
    """Return the place of the module that Python finds under a name; None if there is none, or a folder alone, which
    gives way to a file."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a loaded module without a spec, such as __main__
        return "a loaded module"
    if spec is None or spec.origin is None:
        return None
    return spec.origin if spec.has_location else "a built-in module"


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
