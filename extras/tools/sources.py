"""Where the tools of `--tools` come from: Python files, Python's interpreter, or MCP servers.

A source, `Functions` or `McpTools`, is made twice. The training process makes it for its schemas
(schemas.py). The process that is forked for each episode (toolbox.py) calls its tools, and should
import little."""

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

TIME = 0.8  # of --environment_timeout: a late tool is stopped before its process would be
HOOKS = ("reset", "close")  # optional methods of a class: at the start and the end of an episode


class ToolError(Exception):
    """An error whose text the model reads in full."""


@dataclass(eq=False)
class Functions:
    """Functions, or methods of a class, of which each episode has an object. `begin` runs before
    the first call of an episode, `end` after the last unless its process hangs or dies."""

    functions: dict[str, Callable]
    make: Callable[[], object] | None = None
    """makes the object whose methods are called"""

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
    """Return the source that a value of `--tools` names. `flags`: an object with `answer_seconds`
    and `unsafe_code_execution`. Raises `ValueError` for an unknown one, and what a user's file
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
        with extra("tools", "--tools mcp"):  # not the whole value: a command may contain secrets
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
    """Return the public functions that a file defines and that have a docstring."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and value.__doc__
        and name[0] != "_"
    }


def methods_of(tool: type) -> dict[str, Callable]:
    """Return the public methods of a class, except `reset` and `close`."""
    methods = dict(inspect.getmembers(tool, inspect.isfunction))
    return {name: methods[name] for name in methods if name[0] != "_" and name not in HOOKS}
