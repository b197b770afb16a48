"""Columns of a row: text and conversations, checked and in one form."""

import json
import re
from collections.abc import Sequence

IMAGE = "\ufffc"  # object replacement character: where an image stands in a text
PLACEHOLDER = "<image>"  # the same in the texts of many data sets, and for people
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # a thought beside the content


def text_field(row: dict, column: str) -> str:
    """Return a column that must be a string. Raises `ValueError` with file and row number."""
    value = row.get(column)
    label = f"{row.get('_source')}: column {column}"
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {type(value).__name__}, expected a string"
        raise ValueError(f"{label} {problem}")
    require_characters(label, value)
    return value


def require_characters(label: str, text: str) -> None:
    """Raise `ValueError` for half a surrogate pair, which JSON may contain: it has no UTF-8."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{label} contains a lone surrogate, which is not a character")


def is_message(message: object) -> bool:
    """Return whether the value is an object with string role and content."""
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def messages_field(row: dict, column: str) -> list[dict] | None:
    """Return the column as messages with string content and tool calls with object arguments; None
    if it is no list.

    Content may be a list of text parts. An assistant message with tool calls may lack content. A
    thought beside the content is called `reasoning_content`. Raises `ValueError` for a malformed
    message."""
    value = row.get(column)
    if not isinstance(value, list):
        return None
    label = f"{row.get('_source')}: column {column}"
    return [_message(label, number, message) for number, message in enumerate(value, 1)]


def has_images(row: dict, columns: Sequence[str] | None = None) -> bool:
    """Return whether a row has images, in columns of their own or as parts of the messages in
    `columns`, by default in any."""
    if row.get("images") or row.get("image"):
        return True
    values = row.values() if columns is None else map(row.get, columns)
    return any(isinstance(value, list) and any(map(_has_image, value)) for value in values)


def _has_image(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return False
    return any(isinstance(p, dict) and p.get("type") in ("image", "image_url") for p in content)


def _message(label: str, number: int, value: object) -> dict:
    turn = f"{label}: turn {number}"
    value = value if isinstance(value, dict) else {}
    message = {key: item for key, item in value.items() if item is not None}
    if "function_call" in message:
        raise ValueError(f"{turn} has a function_call, an old form; give tool_calls")
    thoughts = [message.pop(key) for key in THOUGHT_KEYS if key in message]
    for thought in thoughts:
        if not isinstance(thought, str):
            problem = f"its thought is {type(thought).__name__}, expected a string"
            raise ValueError(f"{turn}: {problem}")
        require_characters(label, thought)
    thought = next(filter(None, thoughts), None)
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if "tool_calls" in message:
        message["tool_calls"] = calls_of(label, number, message)
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_text_of_part(turn, part) for part in message["content"])
    if not is_message(message):
        raise ValueError(f"{label} must list objects with string role and content")
    require_characters(label, message["role"] + message["content"])
    if thought:
        if message["content"].lstrip().startswith("<think>"):
            raise ValueError(f"{turn} has its thought twice, in the content and beside it")
        message["reasoning_content"] = thought
    return message


def _text_of_part(turn: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"{turn} has a part of type {kind}; only text and images are supported")
    return part["text"]


def in_one_part(message: dict) -> dict:
    """Return a message whose content is a list of one part, the form of templates for images and
    text."""
    return message | dict(content=[dict(type="text", text=message["content"])])


def in_parts(message: dict) -> dict:
    """Return a message with a mark in its text in the form of templates for images and text: parts,
    an image for each mark."""
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if IMAGE not in content:
        return message
    texts = content.split(IMAGE)
    parts = [dict(type="text", text=texts[0])]
    for text in texts[1:]:
        parts += [dict(type="image"), dict(type="text", text=text)]
    return message | dict(content=[part for part in parts if part.get("text") != ""])


def texts_of(message: dict) -> list[str]:
    """Return the thought of a message and its answer, without blanks around them and tags."""
    texts = [message.get("reasoning_content") or "", *re.split("</?think>", message["content"])]
    return [text.strip() for text in texts if text.strip()]


# ---- thoughts ----


def opened_thought(prompt: str) -> str | None:
    """Return the tag that opens a thought at the end of a prompt; None without one."""
    match = re.search(r"(<(\w+:)?(think|thinking|thought|reasoning)>|\[THINK\])\s*$", prompt)
    return match[1] if match else None


def closing(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"


def with_thought(thought: str, answer: str, tag: str = "<think>") -> str:
    """Return a thought, with its tags, and the answer."""
    return f"{tag}\n{thought}\n{closing(tag)}\n\n{answer}"


# ---- tools and calls ----


def tools_field(row: dict) -> list[dict]:
    """Return the column `tools`: JSON schemas of functions, as objects or text. Raises `ValueError`
    otherwise."""
    tools = row["tools"]
    label = f"{row['_source']}: column tools"
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or []
        except ValueError as error:
            raise ValueError(f"{label} is not JSON: {error}") from error
    if not isinstance(tools, list) or not all(map(_is_schema, tools)):
        raise ValueError(f"{label} must list JSON schemas of functions, each with a name")
    require_characters(label, json.dumps(tools, ensure_ascii=False, default=str))
    return tools


def _is_schema(tool: object) -> bool:
    return isinstance(tool, dict) and _has_name(tool.get("function", tool))


def _has_name(function: object) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def calls_of(label: str, number: int, message: dict) -> list[dict]:
    """Return the tool calls of a message with their arguments as objects, the form that templates
    expect. Raises `ValueError` that begins with `label` for malformed calls."""
    calls = message["tool_calls"]
    if not isinstance(calls, list) or message.get("role") != "assistant":
        raise ValueError(f"{label}: tool_calls must be a list, in an assistant's message")
    calls = [_call(f"{label}: turn {number}", call) for call in calls]
    require_characters(label, json.dumps(calls, ensure_ascii=False, default=str))
    return calls


def _call(label: str, call: object) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not _has_name(function):
        problem = "a tool call must be an object with a `function` that has a `name`"
        raise ValueError(f"{label}: {problem}")
    label = f"{label}: the arguments of {function['name']}"
    arguments = function.get("arguments")
    if "arguments" in function and arguments in ("", None):  # a call without arguments
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{label} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{label} are not an object")
    return call | dict(function=function | dict(arguments=arguments))


def named(call: dict, name: str) -> dict:
    """Return a call of another function."""
    return call | dict(function=call["function"] | dict(name=name))
