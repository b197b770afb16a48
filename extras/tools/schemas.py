"""The JSON schemas of `--tools` and the tools of each data row, in the training process."""

import inspect
from collections.abc import Callable
from types import MethodType

from common.config.flags import public
from common.config.online import SamplingArgs
from common.parallel import distributed
from common.rewards.answers import from_json
from common.text.messages import tools_field
from common.workers.user_code import load_callable, load_user_file
from extras.tools.parser import make_parser
from extras.tools.sources import Functions, load_source, name_of


def schema_of(label: str, name: str, function: Callable, is_method: bool) -> dict:
    """Return the JSON schema of a function, from its type hints and its docstring. Raises
    `ValueError` that begins with `label` if they are incomplete."""
    from transformers.utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise ValueError(f"{label}: not a plain function; write one with def")
    try:
        schema = get_json_schema(MethodType(function, object()) if is_method else function)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError) as error:
        problem = distributed.first_line(error)
        advice = "a tool needs a type hint and a line under Args: for each parameter"
        raise ValueError(f"{label}: {problem}; {advice}") from error
    schema["function"]["name"] = name
    return schema


def schemas_of(spec: str, args: SamplingArgs) -> list[dict]:
    """Return the schemas of one value of `--tools`. Raises `ValueError` for a wrong one."""
    path, _, _ = spec.rpartition(":")
    if spec.endswith(".py") and not spec.startswith("mcp:"):
        load_user_file("--tools", spec, spec)
    elif path and not spec.startswith("mcp:"):
        load_callable("--tools", spec)
    source = load_source(spec, args)
    if not isinstance(source, Functions):
        return source.schemas()
    if not source.names:
        kind = "method" if path else "function with a docstring"
        raise ValueError(f"--tools {spec}: it has no public {kind}; write one")
    is_method = source.make is not None
    named = source.functions.items()
    return [schema_of(f"--tools {spec}: {name}", name, f, is_method) for name, f in named]


def tool_schemas(args: SamplingArgs) -> list[dict]:
    """Return the schemas of `--tools`. Raises `ValueError` if two tools have the same name."""
    owners: dict[str, str] = {}
    schemas: list[dict] = []
    for spec in args.tools:
        for schema in schemas_of(spec, args):
            name = name_of(schema)
            if name in owners:
                problem = f"the name {name} is taken by {owners[name]}; rename one of them"
                raise ValueError(f"--tools {public(spec)}: {problem}")
            owners[name] = public(spec)
            schemas.append(schema)
    return schemas


def tool_selector(args: SamplingArgs, tokenizer) -> Callable[[dict], list[dict]]:
    """Return a function from a row to the schemas of its tools: those that its column `tools`
    names, by default all. It raises `ValueError` for a row that names an unknown tool. Raises
    `ValueError` for wrong tools, and if no parser reads the calls of the chat template."""
    make_parser(tokenizer, args)
    schemas = {name_of(schema): schema for schema in tool_schemas(args)}

    def select(row: dict) -> list[dict]:
        if row.get("tools") is None:
            return list(schemas.values())
        names = _names(row)
        unknown = [name for name in names if name not in schemas]
        if unknown:
            problem = f"column tools: unknown tool {unknown[0]}; --tools has {', '.join(schemas)}"
            raise ValueError(f"{row['_source']}: {problem}")
        return [schemas[name] for name in names]

    return select


def _names(row: dict) -> list[str]:
    """Return the names in the column `tools`: a list of names or schemas, possibly as JSON."""
    tools = from_json(row["tools"])
    if isinstance(tools, list) and all(isinstance(tool, str) for tool in tools):
        return tools
    return [name_of(schema) for schema in tools_field(row | dict(tools=tools))]
