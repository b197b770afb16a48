"""The tools of one episode. They run in a process of their own (common/workers/pool.py)."""

import json
from collections.abc import Callable, Iterator, MappingView, Set
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from jsonschema.exceptions import best_match
from jsonschema.validators import extend, validator_for
from referencing.jsonschema import EMPTY_REGISTRY

from common.workers.worker import one_line
from extras.tools.sources import Functions, ToolError, load_source, name_of

if TYPE_CHECKING:  # the processes of tools import little
    from common.config.online import SamplingArgs
    from extras.tools.mcp_tools import McpTools

# a schema with one of these keys may allow parameters that its properties do not name
OPEN = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
MAX_OUTPUT = 4000  # characters after which a result is cut
PROBLEMS = ("malformed", "unknown", "wrong_arguments", "raised", "timed_out", "cut")


class Outcome(NamedTuple):
    """The result of a call, as the model reads it."""

    text: str
    problem: str = ""
    """one of `PROBLEMS`; empty if the tool returned a result"""
    cut: bool = False


def settings_of(args: "SamplingArgs") -> dict:
    """Return the flags that a toolbox and its sources read, as plain values."""
    names = ("tools", "answer_seconds", "unsafe_code_execution")
    return {name: getattr(args, name) for name in names}


def load_toolbox(settings: dict) -> Callable[[], "Toolbox"]:
    """Import the files of `--tools`, and return the function that makes the toolbox of an episode.
    `settings`: see `settings_of`."""
    flags = SimpleNamespace(**settings)
    owners: dict[str, Functions | McpTools] = {}
    for spec in flags.tools:
        source = load_source(spec, flags)
        owners |= dict.fromkeys(source.names, source)
    return partial(Toolbox, owners)


class Toolbox:
    """Checks and runs the calls of one episode."""

    def __init__(self, owners: "dict[str, Functions | McpTools]"):
        self.owners = owners
        self.begun: list[Functions | McpTools] = []

    def begin(self, row: dict) -> None:
        """Begin the episode of a data row. Its `tools` are the schemas that the model reads."""
        self.row = row
        self.schemas = {name_of(tool): tool.get("function", tool) for tool in row["tools"]}

    def call(self, name: str, arguments: object) -> Outcome:
        """Return the result of one call, or an error in words for the model."""
        schema = self.schemas.get(name)
        if schema is None:
            there_are = ", ".join(self.schemas) or "none"
            return self._outcome(f"error: unknown tool {name}; there are: {there_are}", "unknown")
        problem = wrong_arguments(schema.get("parameters") or {}, arguments)
        if problem:
            return self._outcome(f"error: {problem}", "wrong_arguments")
        source = self.owners[name]
        try:
            if source not in self.begun:
                source.begin(self.row)
                self.begun.append(source)
            value = source.call(name, arguments)
            text = text_of(value)
        except TimeoutError as error:
            return self._outcome(f"error: {error}", "timed_out")
        except ToolError as error:
            return self._outcome(f"error: {error}", "raised")
        except Exception as error:  # the user's code may raise anything
            return self._outcome(f"error: {one_line(error)}", "raised")
        return self._outcome(text)

    def close(self) -> None:
        for source in self.begun:
            source.end()

    def _outcome(self, text: str, problem: str = "") -> Outcome:
        """Return an outcome with a text in UTF-8 of at most `MAX_OUTPUT` characters."""
        text = text.encode("utf-8", "replace").decode()
        length = len(text)
        if length <= MAX_OUTPUT:
            return Outcome(text, problem)
        text = f"{text[:MAX_OUTPUT]}\n[the first {MAX_OUTPUT} of {length} characters]"
        return Outcome(text, problem, cut=True)


def text_of(value: object) -> str:
    """Return a value as the model reads it: a text as it is, anything else as JSON."""
    value = plain(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plain(value: object) -> object:
    """Return a value in the types of JSON. What none of them can hold becomes its text."""
    if type(value).__module__ in ("numpy", "torch"):
        value = value.tolist() if hasattr(value, "tolist") else str(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        items = ((plain(key), plain(item)) for key, item in value.items())
        return {key if isinstance(key, str) else json.dumps(key): item for key, item in items}
    if isinstance(value, Set) and not isinstance(value, MappingView):
        value = sorted(value, key=repr)  # the order of a set differs between processes
    if isinstance(value, list | tuple | MappingView | Iterator):
        return [*map(plain, value)]
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="backslashreplace")
    return value if value is None or isinstance(value, str | int | float) else str(value)


@cache
def checker_of(kind: type) -> type:
    """Return a kind of validator that accepts null where a schema is `nullable`, as transformers
    writes `int | None`."""

    def nullable(check: Callable) -> Callable:
        def checked(validator, rule: object, value: object, schema: dict) -> Iterator:
            if value is not None or schema.get("nullable") is not True:
                yield from check(validator, rule, value, schema) or ()

        return checked

    return extend(kind, {name: nullable(check) for name, check in kind.VALIDATORS.items()})


def wrong_arguments(schema: dict, arguments: object) -> str:
    """Return why arguments do not fit a JSON schema, or "" if they do. Other than in JSON schema, a
    parameter that the schema does not name is wrong."""
    if not isinstance(arguments, dict):
        return "the arguments are not an object"
    if "properties" in schema and not schema.keys() & OPEN:
        schema = schema | dict(additionalProperties=False)
    try:
        # the registry fetches nothing: a reference to a file or a page is an error
        checker = checker_of(validator_for(schema))(schema, registry=EMPTY_REGISTRY)
        error = best_match(checker.iter_errors(arguments))
    except Exception as problem:  # the schema may be anything: a server has sent it
        return f"the schema of the tool does not work: {one_line(problem)}"
    if error is None:
        return ""
    place = ".".join(map(str, error.absolute_path))
    return f"argument {place}: {error.message}" if place else f"arguments: {error.message}"
