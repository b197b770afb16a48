"""The chat template: messages -> text, where the model's turns begin and end in it, and the token that ends them."""

import json
import os
import re
from pathlib import Path

import yaml
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from common.config.flags import BaseArgs, pairs_of
from common.parallel import distributed

MARK = "(here the model spoke)"  # templates may trim a turn or look at those before it, so it is one like any
PROBE = [dict(role="user", content="?"), dict(role="assistant", content=MARK)]
# What a template can raise: its own words, and what Python says of its expressions.
_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
_OURS = ("messages", "tools", "add_generation_prompt")


# ---- what stands in a row ----


def text_field(row: dict, column: str) -> str:
    """A column that must be a string. Raises `ValueError` with file and row number."""
    value = row.get(column)
    if not isinstance(value, str):
        problem = "is missing" if value is None else f"is {type(value).__name__}, expected a string"
        raise ValueError(f"{row['_source']}: column {column} {problem}")
    return _valid(row, column, value)


def _valid(row: dict, column: str, text: str) -> str:
    """JSON may hold half of a surrogate pair, which is no character and has no UTF-8."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{row['_source']}: column {column} holds a lone surrogate, which is not a character")
    return text


def is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def messages_field(row: dict, column: str) -> list[dict] | None:
    """The column as messages whose content is a string and whose tool calls are objects, None if it is not a list.

    Content may be a list of text parts; an assistant's that calls tools may be missing. Raises `ValueError` for what is
    malformed.
    """
    value = row.get(column)
    if not isinstance(value, list):
        return None
    where, messages = f"{row['_source']}: column {column}", []
    for number, message in enumerate(value, 1):
        message = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
        if "tool_calls" in message:
            message["tool_calls"] = [_tool_call(f"{where}: turn {number}", c) for c in _listed(where, message)]
            message.setdefault("content", "")
            _valid(row, column, json.dumps(message["tool_calls"], ensure_ascii=False, default=str))
        if isinstance(parts := message.get("content"), list):
            kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
            if wrong := [kind for kind, p in zip(kinds, parts, strict=True) if not _is_text_part(p)]:
                raise ValueError(f"{where}: turn {number} has a part of type {wrong[0]}, only text parts can be read")
            message["content"] = "".join(part["text"] for part in parts)
        if not is_message(message):
            raise ValueError(f"{where} must list objects with string role and content")
        _valid(row, column, message["content"])
        messages.append(message)
    return messages


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _listed(where: str, message: dict) -> list:
    if not isinstance(calls := message["tool_calls"], list) or (calls and message.get("role") != "assistant"):
        raise ValueError(f"{where}: tool_calls must be a list, in an assistant's message")
    return calls


def _tool_call(where: str, call: object) -> dict:
    """A tool call with its arguments as an object, which is what templates write out."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call is an object with `function`, and that one with a `name`")
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
    """The column `tools`, schemas of what the model may call or JSON of them. Raises `ValueError` if it is not that."""
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


# ---- what the template says ----


def use_template(tokenizer, file: str) -> None:
    """Give the tokenizer the chat template in a file. Raises `ValueError` if that cannot be read or rendered."""
    flag = f"--chat_template {file}"
    try:
        tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: not UTF-8: {error}") from error
    if MARK not in _probe(tokenizer, flag):
        raise ValueError(f"{flag}: what an assistant says does not come out of it as it went in")


def _probe(tokenizer, whose: str) -> str:
    try:
        return tokenizer.apply_chat_template(PROBE, tokenize=False)
    except _ERRORS as error:
        what = f"{distributed.first_line(error)} (line {error.lineno})" if hasattr(error, "lineno") else error
        raise ValueError(f"{whose}: the chat template does not render: {what}") from error


def rendered(tokenizer, messages: list[dict], whose: str, **options) -> str:
    """The text of a conversation. Raises `ValueError` if the template, which is `whose`, refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except _ERRORS as error:
        raise ValueError(f"{whose} chat template refuses the messages: {distributed.first_line(error)}") from error


def end_of_turn(tokenizer, text: str | None = None, start: int = 0) -> tuple[int, int] | None:
    """The first special token of the text at or after `start`: its id and where it ends. Without a text the token that
    ends an assistant's turn. Some tokenizers have it among the added ones only. None if there is none."""
    if text is None:
        text = _probe(tokenizer, f"--model {tokenizer.name_or_path}")
        if (start := text.find(MARK) + len(MARK)) < len(MARK):
            return None
    tokens = [(str(token), i) for i, token in tokenizer.added_tokens_decoder.items()]
    found = [(at, at + len(token), i) for token, i in tokens if (at := text.find(token, start)) >= 0]
    _, end, token_id = min(found, default=(0, 0, None))
    return (token_id, end) if found else None


def names_read(tokenizer) -> set[str]:
    """The variables that the tokenizer's template, or one of its templates, reads."""
    templates = tokenizer.chat_template
    names = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        # transformers' own mark around what an assistant says; it is no part of jinja
        plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        names |= find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    return names


def _scalar(text: str) -> object:
    """true, 3, 0.5 and null as YAML has them; all else is text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


class ChatTemplate:
    """The tokenizer's chat template with what `--template_kwargs` gives it."""

    def __init__(self, tokenizer, args: BaseArgs):
        """Raises `ValueError` for a template that does not render and for kwargs that it never reads."""
        self.tokenizer, self.reads = tokenizer, names_read(tokenizer)
        self.kwargs = {k: _scalar(v) for k, v in pairs_of("template_kwargs", args.template_kwargs).items()}
        for name in self.kwargs:
            if name in _OURS or name not in self.reads:
                why = "it is what the data says" if name in _OURS else "the chat template never reads it"
                raise ValueError(f"--template_kwargs {name}: {why}")
        end = end_of_turn(tokenizer)
        self.end = None if end is None else str(tokenizer.added_tokens_decoder[end[0]])

    def render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """The text of a conversation, up to where the model is to speak if a prompt for that is to be added."""
        if (tools := tools_field(row)) and "tools" not in self.reads:
            raise ValueError(f"{row['_source']}: column tools: the chat template never reads tools")
        options = self.kwargs | dict(tools=tools, add_generation_prompt=add_generation_prompt)
        return rendered(self.tokenizer, messages, f"{row.get('_source')}: the", **options)

    def reply(self, messages: list[dict]) -> str:
        """What stands between two turns of the model, behind the end of the first: `messages`."""
        row = dict(_source="the environment's messages")
        text = self.render(row, PROBE + messages, add_generation_prompt=True)
        return text[end_of_turn(self.tokenizer, text, text.index(MARK) + len(MARK))[1] :]

    def pieces(
        self, row: dict, messages: list[dict], first_trained: int, add_generation_prompt: bool = False
    ) -> list[tuple[str, bool]]:
        """(text, trained) pieces of a conversation, cut where a turn of the model starts and behind the token that ends
        it, as they were sampled. Trained: those turns from message `first_trained` on. Raises `ValueError` for one of
        them that does not come out of the template as it went in."""
        text, done, pieces = self.render(row, messages, add_generation_prompt), 0, []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or (i == 0 < first_trained):  # no prompt before it
                continue
            start, content = self._start(row, text, messages, i), message["content"].strip()
            if start is None or (at := text.find(content, start)) < 0:
                if i < first_trained:
                    continue
                raise ValueError(f"{row['_source']}: turn {i + 1} does not come out of the chat template as it went in")
            # The template's end-of-turn token is trained, whatever stands before it ("\n", say): without it a model
            # would never learn to stop.
            end = self._end(row, text, at + len(content), message)
            if end is None:
                if i < first_trained:
                    continue
                raise ValueError(f"{row['_source']}: the chat template puts no end-of-turn token after turn {i + 1}")
            pieces += [(text[done:start], False), (text[start:end], i >= first_trained)]
            done = end
        return pieces + [(text[done:], False)]

    def _start(self, row: dict, text: str, messages: list[dict], i: int) -> int | None:
        """Where turn `i` starts in the conversation: behind what stands before it when it is sampled."""
        prompt = self.render(row, messages[:i], add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # Some templates write an earlier turn otherwise than the last one, Qwen3's without the empty thoughts that its
        # prompt ends with. It starts where the two part, whatever is said in it.
        other = self.render(row, [*messages[:i], PROBE[1], *messages[i + 1 :]])
        start = len(os.path.commonprefix([prompt, other, text]))
        return start if start >= len(self.render(row, messages[:i])) else None

    def _end(self, row: dict, text: str, start: int, message: dict) -> int | None:
        """Where the turn whose content ends at `start` ends itself."""
        calls = message.get("tool_calls") or []
        if not calls:
            end = end_of_turn(self.tokenizer, text, start)
            return end and end[1]
        # special tokens may stand around the calls: those do not end the turn
        end = text.find(self.end, start) if self.end else -1
        for call in calls:
            if call["function"]["name"] not in text[start : max(end, start)]:
                name = call["function"]["name"]
                raise ValueError(f"{row['_source']}: the chat template does not write the tool call of {name}")
        return end + len(self.end) if end >= 0 else None
