"""Columns of a row: text, conversations with tool calls, and schemas of tools, checked and in one form."""

import json

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # names of a thought beside the content


def text_field(row: dict, column: str) -> str:
    """Return a column that must be a string. Raises `ValueError` with file and row number."""
    value = row.get(column)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {type(value).__name__}, expected a string"
        raise ValueError(f"{row['_source']}: column {column} {problem}")
    return _valid(row, column, value)


def _valid(row: dict, column: str, text: str) -> str:
    """Return the text. Raises `ValueError` for half a surrogate pair, which JSON may contain: it has no UTF-8."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{row['_source']}: column {column} contains a lone surrogate, which is not a character")
    return text


def is_message(message: object) -> bool:
    """Return whether the value is an object with string role and content."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def messages_field(row: dict, column: str) -> list[dict] | None:
    """Return the column as messages with string content and tool calls with object arguments; None if it is no list.

    Content may be a list of text parts. An assistant message with tool calls may lack content. A thought beside the
    content is called `reasoning_content`. Raises `ValueError` for a malformed message.
    """
    value = row.get(column)
    if not isinstance(value, list):
        return None
    where, messages = f"{row['_source']}: column {column}", []
    for number, message in enumerate(value, 1):
        message = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if "function_call" in message:
            raise ValueError(f"{where}: turn {number} has a function_call, an old form; give tool_calls")
        thoughts = [message.pop(key) for key in THOUGHT_KEYS if key in message]
        if wrong := [thought for thought in thoughts if not isinstance(thought, str)]:
            raise ValueError(f"{where}: turn {number}: its thought is {type(wrong[0]).__name__}, expected a string")
        if thought := next(filter(None, thoughts), None):
            message["reasoning_content"] = _valid(row, column, thought)
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        if "tool_calls" in message:
            calls = message["tool_calls"]
            if not isinstance(calls, list) or (calls and message.get("role") != "assistant"):
                raise ValueError(f"{where}: tool_calls must be a list, in an assistant's message")
            message["tool_calls"] = [_tool_call(f"{where}: turn {number}", call) for call in calls]
            message.setdefault("content", "")
            _valid(row, column, json.dumps(message["tool_calls"], ensure_ascii=False, default=str))
        if isinstance(parts := message.get("content"), list):
            kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
            if wrong := [kind for kind, p in zip(kinds, parts, strict=True) if not _is_text_part(p)]:
                raise ValueError(f"{where}: turn {number} has a part of type {wrong[0]}; only text is supported")
            message["content"] = "".join(part["text"] for part in parts)
        if "reasoning_content" in message and str(message.get("content")).lstrip().startswith("<think>"):
            raise ValueError(f"{where}: turn {number} has its thought twice, in the content and beside it")
        if not is_message(message):
            raise ValueError(f"{where} must list objects with string role and content")
        _valid(row, column, message["role"] + message["content"])
        messages.append(message)
    return messages


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tool_call(where: str, call: object) -> dict:
    """Return a tool call with its arguments as an object, the form that templates expect."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call must be an object with a `function` that has a `name`")
    arguments = function.get("arguments")
    if "arguments" in function and arguments in ("", None):  # a call without arguments
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"{where}: the arguments of {function['name']} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of {function['name']} are not an object")
    return call | dict(function=function | dict(arguments=arguments))


def tools_field(row: dict) -> list[dict] | None:
    """Return the column `tools`: JSON schemas of functions, as objects or text. Raises `ValueError` otherwise."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except ValueError as error:
            raise ValueError(f"{row['_source']}: column tools is not JSON: {error}") from error
    for tool in tools if isinstance(tools, list) else [tools] if tools else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if tools is tool or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{row['_source']}: column tools must list JSON schemas of functions, each with a name")
    if tools:
        _valid(row, "tools", json.dumps(tools, ensure_ascii=False, default=str))
    return tools
