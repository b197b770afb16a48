"""Functions and classes of a user's file, named `path/to/file.py:name` on the command line."""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from common.parallel import distributed
from common.rewards.worker import load_file

# positions of the parameters of a reward that have these names
POSITIONS = dict(completion=0, completions=0, row=1, ids=2)


def load_callable(flag: str, spec: str) -> Callable:
    """Return the function or class that `spec` names. Its file may import the files beside it.
    Raises `ValueError` with `flag` and the problem."""
    path, _, name = spec.rpartition(":")
    module = load_user_file(flag, spec, path, name)
    if not callable(getattr(module, name, None)):
        callables = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, callables, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{flag} {spec}: {path} has no function {name}{hint}")
    return getattr(module, name)


def load_user_file(flag: str, spec: str, path: str, name: str = "") -> ModuleType:
    """Return the module of the file `path` of `spec`, from which `name` is read. Raises
    `ValueError` with `flag` and the problem."""
    if not Path(path).is_file():
        candidates = (f"{path}.py", f"{path.replace('.', '/')}.py")
        files = [file for file in candidates if Path(file).is_file()]
        hint = f"; did you mean {files[0]}{name and f':{name}'}?" if files else ""
        raise ValueError(f"{flag} {spec}: no file {path}{hint}")
    if not path.endswith(".py"):  # worker processes go by that too
        raise ValueError(f"{flag} {spec}: {path} is not a Python file")
    folder = str(Path(path).absolute().parent)
    try:
        if folder not in sys.path:
            sys.path.append(folder)
        return load_file(path)
    except BaseException as error:  # a user's file may raise anything
        problem = f"{type(error).__name__}: {distributed.first_line(error)}"
        raise ValueError(f"{flag} {spec}: {path} fails to import: {problem}") from error


def load_agent(spec: str) -> Callable:
    """Return the function of `--agent`. Raises `ValueError` if it is no agent, or if the package
    of the endpoint is missing."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ValueError(f"--agent {spec}: needs aiohttp; pip install aiohttp")
    if ":" not in spec:
        raise ValueError(f"--agent {spec}: name the function: path/to/file.py:function")
    function = load_callable("--agent", spec)
    form = "write it as async def name(row, base_url, api_key)"
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"--agent {spec}: not an async function; {form}")
    try:
        inspect.signature(function).bind({}, "", "")
    except TypeError as error:
        raise ValueError(f"--agent {spec}: {error}; {form}") from error
    return function


def reward_form(
    name: str, function: Callable, data_columns: Iterable[str] = ()
) -> tuple[bool, bool]:
    """Return `(of_group, with_ids)`: how the parameters of a reward ask to be called.

    The usual form is `(completion, row)`, with any names but those of `data_columns` for the row. A
    first one named `completions` gets a list with the texts of all completions of a prompt; a third
    one named `ids` gets the token ids of the completion, or a list of them. Raises `ValueError` for
    other parameters without a default."""
    try:
        if inspect.isclass(function):
            raise TypeError("it is a class; name a function, or an object that can be called")
        signature = inspect.signature(function)
        names = list(signature.parameters)
        for position, parameter in enumerate(names):
            if POSITIONS.get(parameter, position) != position:
                raise TypeError(f"{parameter!r} stands elsewhere")
        columns = getattr(function, "columns", ())
        if not isinstance(columns, tuple | list):
            raise TypeError(f"its attribute columns is {columns!r}, not a tuple of names")
        second = names[1] if len(names) > 1 else "row"
        if second in data_columns and second not in POSITIONS:
            advice = f"call it row, and read row[{second!r}]"
            raise TypeError(f"{second!r} gets the whole row; {advice}")
        with_ids = names[2:3] == ["ids"]
        signature.bind("", {}, *[[]] * with_ids)
    except (TypeError, ValueError) as error:
        forms = "(completion, row) or (completions, row), and may take ids as a third parameter"
        raise ValueError(f"--reward {name}: a reward takes {forms}: {error}") from error
    return names[0] == "completions", with_ids
