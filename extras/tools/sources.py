"""The values of `--tools`: where tools come from.

A source, `Functions` or `McpTools`, is made twice: in the training process for its schemas
(schemas.py), and in the process that is forked for each episode (toolbox.py), which calls its tools
and therefore imports little."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from common.config.extra import extra
from common.workers.worker import load_file

if TYPE_CHECKING:
    from extras.tools.mcp_tools import McpTools

TIME = 0.8  # of --environment_timeout; then the other tools of the episode keep their state
HOOKS = ("reset", "close")  # optional methods of a class: at the start and the end of an episode


class ToolError(Exception):
    """Error whose text the model reads in full."""


@dataclass(eq=False)
class Functions:
    """Functions, or methods of a class of which each episode has an object. `begin` runs before the
    first call of an episode, `end` unless its process hangs or dies."""

    functions: dict[str, Callable]
    make: Callable[[], object] | None = None
    """for methods: returns the object"""

    @property
    def names(self) -> list[str]:
        return list(self.functions)

    def begin(self, row: dict) -> None:
        self.object = self.make() if self.make else None
        if hasattr(self.object, "reset"):
            self.object.reset(row)

    def call(self, name: str, arguments: dict) -> object:
        function = self.functions[name] if self.make is None else getattr(self.object, name)
        return function(**arguments)

    def end(self) -> None:
        if hasattr(self.object, "close"):
            self.object.close()


def name_of(schema: dict) -> str:
    return schema.get("function", schema)["name"]


def load_source(spec: str, flags: Any) -> "Functions | McpTools":
    """Return the source of a value of `--tools`. `flags`: `answer_seconds` and
    `--unsafe_code_execution`. Raises `ValueError` for an unknown one, and what a user's file
    raises."""
    label = f"--tools {spec}"
    if spec == "python":
        with extra("code", label):
            from extras.tools.python_tool import Interpreter, require_confinement
        require_confinement(flags.unsafe_code_execution)
        seconds = TIME * flags.answer_seconds
        make = partial(Interpreter, seconds, flags.unsafe_code_execution)
        return Functions(dict(python=Interpreter.python), make)
    if spec.startswith("mcp:"):
        with extra("tools", "--tools mcp"):  # the command may have secrets
            from extras.tools.mcp_tools import mcp_source
        return mcp_source(spec, TIME * flags.answer_seconds)
    if spec.endswith(".py"):
        return Functions(functions_of(load_file(spec)))
    if ":" not in spec:
        raise ValueError(f"{label}: unknown; there are python, mcp:COMMAND, path/to/file.py")
    path, _, name = spec.rpartition(":")
    tool = getattr(load_file(path), name)
    if isinstance(tool, type):
        return Functions(methods_of(tool), tool)
    return Functions({name: tool})


def functions_of(module: ModuleType) -> dict[str, Callable]:
    """Return the public functions with a docstring that a file defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and value.__doc__
        and name[0] != "_"
    }


def methods_of(tool: type) -> dict[str, Callable]:
    """Return the public methods of a class, without `reset` and `close`."""
    methods = dict(inspect.getmembers(tool, inspect.isfunction))
    return {name: methods[name] for name in methods if name[0] != "_" and name not in HOOKS}
