"""The chat template: messages -> text, the places of the model's turns in it, and the token that ends a turn."""

import json
import os
import re
from pathlib import Path

import yaml
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from common.config.groups import BaseArgs
from common.config.specs import pairs_of
from common.parallel import distributed

MARK = "(here the model spoke)"  # text of a probe turn: templates may trim a turn or depend on earlier ones
PROBE = [dict(role="user", content="?"), dict(role="assistant", content=MARK)]
# Errors of templates: their own, and those of Python expressions in them.
_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
_OURS = ("messages", "tools", "add_generation_prompt")  # variables that `ChatTemplate.render` sets


# ---- columns of a row ----


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

    Content may be a list of text parts. An assistant message with tool calls may lack content. Raises `ValueError` for
    a malformed message.
    """
    value = row.get(column)
    if not isinstance(value, list):
        return None
    where, messages = f"{row['_source']}: column {column}", []
    for number, message in enumerate(value, 1):
        message = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
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
        if not is_message(message):
            raise ValueError(f"{where} must list objects with string role and content")
        _valid(row, column, message["content"])
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


# ---- templates ----


def use_template(tokenizer, file: str) -> None:
    """Set the tokenizer's chat template from a file. Raises `ValueError` if it cannot be read or rendered."""
    flag = f"--chat_template {file}"
    try:
        tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: not UTF-8: {error}") from error
    if MARK not in _probe(tokenizer, flag):
        raise ValueError(f"{flag}: the template changes the text of an assistant turn")


def _probe(tokenizer, label: str) -> str:
    """Return a conversation with `MARK` as the assistant's turn."""
    try:
        return tokenizer.apply_chat_template(PROBE, tokenize=False)
    except _ERRORS as error:
        problem = f"{distributed.first_line(error)} (line {error.lineno})" if hasattr(error, "lineno") else error
        raise ValueError(f"{label}: the chat template does not render: {problem}") from error


def rendered(tokenizer, messages: list[dict], label: str, **options) -> str:
    """Return the text of a conversation. Raises `ValueError`, which begins with `label`, if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except _ERRORS as error:
        raise ValueError(f"{label} chat template refuses the messages: {distributed.first_line(error)}") from error


def end_of_turn(tokenizer, text: str | None = None, start: int = 0) -> tuple[int, int] | None:
    """Return the id and the end of the first special token at or after `start`; without a text, those of the token that
    ends an assistant's turn; None without such a token. Some tokenizers list this token as an added one only."""
    if text is None:
        text = _probe(tokenizer, f"--model {tokenizer.name_or_path}")
        if (start := text.find(MARK) + len(MARK)) < len(MARK):
            return None
    tokens = [(str(token), i) for i, token in tokenizer.added_tokens_decoder.items()]
    found = [(at, at + len(token), i) for token, i in tokens if (at := text.find(token, start)) >= 0]
    _, end, token_id = min(found, default=(0, 0, None))
    return (token_id, end) if found else None


def names_read(tokenizer) -> set[str]:
    """Return the variables that the tokenizer's template, or one of its templates, reads."""
    templates = tokenizer.chat_template
    names = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        # tags of transformers around an assistant's text, which plain jinja does not parse
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        names |= find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    return names


def _scalar(text: str) -> object:
    """Return true, 3, 0.5 and null as in YAML, anything else as text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


class ChatTemplate:
    """Chat template of the tokenizer, with the variables of `--template_kwargs`."""

    def __init__(self, tokenizer, args: BaseArgs):
        """Parse `--template_kwargs`. Raises `ValueError` if the template does not render or ignores a variable."""
        self.tokenizer, self.reads = tokenizer, names_read(tokenizer)
        self.kwargs = {k: _scalar(v) for k, v in pairs_of("template_kwargs", args.template_kwargs).items()}
        for name in self.kwargs:
            if name in _OURS or name not in self.reads:
                why = "the data determines it" if name in _OURS else "the chat template does not read it"
                raise ValueError(f"--template_kwargs {name}: {why}")
        end = end_of_turn(tokenizer)
        self.end = None if end is None else str(tokenizer.added_tokens_decoder[end[0]])

    def render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with `add_generation_prompt` up to the start of the next reply."""
        if (tools := tools_field(row)) and "tools" not in self.reads:
            advice = "set --chat_template to one that does, such as the file of a Qwen3 model"
            raise ValueError(f"{row['_source']}: column tools: the chat template does not read it; {advice}")
        options = self.kwargs | dict(tools=tools, add_generation_prompt=add_generation_prompt)
        return rendered(self.tokenizer, messages, f"{row.get('_source')}: the", **options)

    def reply(self, messages: list[dict]) -> str:
        """Return the text of `messages` between two turns of the model, from the end of the first turn."""
        row = dict(_source="the environment's messages")
        text = self.render(row, PROBE + messages, add_generation_prompt=True)
        return text[end_of_turn(self.tokenizer, text, text.index(MARK) + len(MARK))[1] :]

    def pieces(
        self, row: dict, messages: list[dict], first_trained: int, add_generation_prompt: bool = False
    ) -> list[tuple[str, bool]]:
        """Split a conversation into (text, trained) pieces: a turn of the model with its end-of-turn token, as it is
        sampled, is one piece. The turns from message `first_trained` on are trained. Raises `ValueError` for a trained
        turn whose text the template changes."""
        text, done, pieces = self.render(row, messages, add_generation_prompt), 0, []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or (i == 0 < first_trained):  # it has no prompt
                continue
            start, content = self._start(row, text, messages, i), message["content"].strip()
            at = -1 if start is None else text.find(content, start)
            # The end-of-turn token is trained, also behind other text ("\n", say): it teaches the model to stop.
            end = None if at < 0 else self._end(row, text, at + len(content), message)
            if end is None and i < first_trained:
                continue
            if end is None:
                problem = "changes the text of" if at < 0 else "puts no end-of-turn token after"
                raise ValueError(f"{row['_source']}: the chat template {problem} turn {i + 1}")
            pieces += [(text[done:start], False), (text[start:end], i >= first_trained)]
            done = end
        return pieces + [(text[done:], False)]

    def _start(self, row: dict, text: str, messages: list[dict], i: int) -> int | None:
        """Return the start of turn `i` in the conversation: the end of the prompt that it is sampled from."""
        prompt = self.render(row, messages[:i], add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # Some templates render an earlier turn differently from the last one: Qwen3's drops the empty thoughts at the
        # end of the prompt. The turn then starts where both texts differ, whatever its content.
        other = self.render(row, [*messages[:i], PROBE[1], *messages[i + 1 :]])
        start = len(os.path.commonprefix([prompt, other, text]))
        return start if start >= len(self.render(row, messages[:i])) else None

    def _end(self, row: dict, text: str, start: int, message: dict) -> int | None:
        """Return the end of the turn whose content ends at `start`, behind its end-of-turn token."""
        calls = message.get("tool_calls") or []
        if not calls:
            end = end_of_turn(self.tokenizer, text, start)
            return end and end[1]
        # special tokens around the calls do not end the turn
        end = text.find(self.end, start) if self.end else -1
        for call in calls:
            if call["function"]["name"] not in text[start : max(end, start)]:
                name = call["function"]["name"]
                raise ValueError(f"{row['_source']}: the chat template omits the tool call of {name}")
        return end + len(self.end) if end >= 0 else None
