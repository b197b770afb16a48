"""The chat template: turns messages into text. Also finds out what this template expects, and which
tokens end a turn. The encoder (encode.py, turns.py) uses it."""

import contextlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, nodes
from jinja2.meta import find_undeclared_variables

from common.config.flags import pairs_of, values_of
from common.parallel import distributed
from common.parallel.process import within
from common.text.messages import (
    IMAGE,
    RESULTS,
    THOUGHT_KEYS,
    in_parts,
    opened_thought,
    with_thought,
)

# Messages of short conversations that are rendered to find out what a template does ("probes").
MARK = "(here the model spoke)"
ASKED = dict(role="user", content="?")
SAID = dict(role="assistant", content=MARK)
CALL = dict(type="function", id="probecall", function=dict(name="probe", arguments=dict(x=1)))
CALLED = dict(role="assistant", content="", tool_calls=[CALL])
MARKED_CALL = "marked_call"
RESULT = dict(role="tool", name="probe", tool_call_id=CALL["id"], content="?")
_X = dict(x=dict(type="integer", description="x"), s=dict(type="string", description="s"))
_PROBED = dict(name="probe", description="Probe.", parameters=dict(type="object", properties=_X))
PROBE = dict(_source="--tools", tools=[dict(type="function", function=_PROBED)])
RENDER_SECONDS = 10.0  # time limit for rendering one row, and for all probes together
SET_HERE = ("messages", "tools", "add_generation_prompt")  # `ChatTemplate.render` sets these


class TurnEnd(NamedTuple):
    """How a template ends a turn of the model."""

    token: str  # the token with which the model ends its turn
    last: str  # all that the model samples after its answer, mostly `token` alone
    appended: bool = False  # whether we add the token: the template writes none after a last turn


class ChatTemplate:
    """Chat template of the tokenizer, with the variables of `--template_kwargs`.

    Templates differ: some read content as text and some as a list of parts, they put thoughts in
    different places, not all know the role developer, and they end turns differently. The
    constructor renders short conversations to find out what this one does."""

    def __init__(self, tokenizer, template_kwargs: tuple[str, ...] = (), label: str | None = None):
        """Raises `ValueError` if the template does not render a simple conversation, does not read
        a variable of `--template_kwargs`, or takes too long for the probes."""
        self.tokenizer = tokenizer
        self._added = any_of(map(str, tokenizer.added_tokens_decoder.values()))
        label = label or f"--model {tokenizer.name_or_path}"
        try:
            within(RENDER_SECONDS, self._find_out, template_kwargs, label)
        except TimeoutError as error:
            problem = f"the chat template is not rendered: {error}"
            raise ValueError(f"{label}: {problem}; set another --chat_template") from error

    def _find_out(self, template_kwargs: tuple[str, ...], label: str) -> None:
        tokenizer = self.tokenizer
        self.in_parts = self._reads_parts(label)
        self.variables, self.words = _names_read(tokenizer)
        self.kwargs = self._checked("--template_kwargs", _variables(template_kwargs))
        # Does the template show `reasoning_content`: in turns with calls (True), in others (False)?
        self._shows_thoughts = {
            "tool_calls" in turn: MARK in self._probe(ASKED, turn | dict(reasoning_content=MARK))
            for turn in (SAID | dict(content="!"), CALLED)
        }
        self.shows_developer = MARK in self._probe(SAID | dict(role="developer"), ASKED)
        prompt = self._probe(ASKED, add_generation_prompt=True)
        shared = os.path.commonprefix([prompt, self._probe(ASKED)])
        # text that starts a reply, such as <|im_start|>assistant\n
        self.header = prompt[len(shared) :] if shared else ""
        # None if the template does not show the text of an assistant's turn as it is
        self.end = self._find_end(SAID, ASKED, MARK)
        marked = CALL | dict(function=dict(name=MARKED_CALL, arguments=dict(x=1)))
        self.end_of_calls = self._find_end(CALLED | dict(tool_calls=[marked]), RESULT, MARKED_CALL)

    # ---- text ----

    def render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation and, with `add_generation_prompt`, of the start of the
        next reply. The row may have `tools`, a list of schemas, and `chat_template_kwargs`, further
        variables of the template. Raises `ValueError` if the template does not read them."""
        label = row.get("_source")
        tools = row.get("tools") or None
        if tools and "tools" not in self.variables:
            example = "configs/templates/chatml_tools.jinja"
            advice = f"set --chat_template to one that does, such as {example}"
            raise ValueError(f"{label}: column tools: the chat template does not read it; {advice}")
        kwargs = self.kwargs
        if own := row.get("chat_template_kwargs"):
            own = self._checked(f"{label}: column chat_template_kwargs", own)
            kwargs = kwargs | {name: value for name, value in own.items() if value is not None}
        has_images = bool(row.get("images"))
        messages = [self._content_form(message, has_images) for message in messages]
        label = f"{label}: the row has images, the" if has_images else f"{label}: the"
        options = dict(tools=tools, add_generation_prompt=add_generation_prompt)
        return rendered(self.tokenizer, messages, label, **options, **kwargs)

    def _content_form(self, message: dict, has_images: bool) -> dict:
        """Return a message in the form that the template reads."""
        if "reasoning_content" in message:
            message = message | dict.fromkeys(THOUGHT_KEYS, message["reasoning_content"])
        if self.in_parts or (has_images and IMAGE in message["content"]):
            return in_parts(message, has_images)
        return message

    def _checked(self, label: str, variables: dict[str, object] | str) -> dict[str, object]:
        """Return the variables, which may be JSON text, as a dict. Raises `ValueError` for one that
        the template does not read, or that comes from the messages of the rows."""
        with contextlib.suppress(ValueError):
            variables = json.loads(variables) if isinstance(variables, str) else variables
        if not isinstance(variables, dict):
            raise ValueError(f"{label} is no object")
        for name in [name for name, value in variables.items() if value is not None]:
            if name in SET_HERE or name not in self.variables:
                unread = "the chat template does not read it"
                why = "the rows set it" if name in SET_HERE else unread
                raise ValueError(f"{label} {name}: {why}; leave it out")
        return variables

    def normal(self, messages: list[dict]) -> list[dict]:
        """Return the messages in the form that the template expects. End tokens are cut off the
        text of an assistant, because the template adds them. A thought goes into
        `reasoning_content` if the template reads it there, else into the content."""
        written = (self.end.token if self.end else "", self.tokenizer.eos_token or "")
        ends = tuple(filter(None, map(str.strip, written)))
        normal = []
        for message in messages:
            message = {**message}
            normal.append(message)
            message["role"] = self.role(message["role"])
            if message["role"] != "assistant":
                continue
            text = message["content"]
            while (shorter := text.rstrip()).endswith(ends):
                longest = max(filter(shorter.endswith, ends), key=len)
                text = shorter.removesuffix(longest).rstrip()
            message["content"] = text
            thought = message.get("reasoning_content")
            inline = re.fullmatch(r"\s*<think>(.*?)</think>\s*(.*)", text, re.DOTALL)
            if self._shows_thoughts["tool_calls" in message]:
                if inline and not thought:
                    message |= dict(reasoning_content=inline[1].strip(), content=inline[2])
            elif thought:
                del message["reasoning_content"]
                tag = opened_thought(self.header) or "<think>"
                message["content"] = with_thought(thought, text, tag)
        return normal

    def role(self, role: str) -> str:
        """Return the template's name for a role. If it does not know developers, they are the
        system. Results of calls (`observation`, `ipython`) are the role tool if it knows that."""
        if role == "developer" and not self.shows_developer:
            return "system"
        return "tool" if role in RESULTS and "tool" in self.words else role

    def end_of(self, turn: dict) -> TurnEnd | None:
        """Return how the template ends a turn of this kind: with tool calls, or without."""
        return self.end_of_calls if turn.get("tool_calls") else self.end

    def added_tokens(self, text: str) -> list[tuple[str, int]]:
        """Find the special and added tokens in a text. Return each with the place where it ends."""
        return [(match[0], match.end()) for match in self._added.finditer(text)]

    # ---- probes ----

    def _reads_parts(self, label: str) -> bool:
        """Return whether the template reads content as a list of parts. Raises `ValueError` if it
        does not render a plain conversation."""
        for reads_parts, form in ((False, dict), (True, in_parts)):
            with contextlib.suppress(ValueError):
                if MARK in rendered(self.tokenizer, [form(ASKED), form(SAID)], label):
                    return reads_parts
        rendered(self.tokenizer, [ASKED, SAID], f"{label}: the")
        return False

    def _probe(self, *messages: dict, add_generation_prompt: bool = False) -> str:
        """Render a short conversation. The text is empty if the template refuses it."""
        has_calls = any("tool_calls" in message for message in messages)
        row = PROBE if has_calls and "tools" in self.variables else {}
        try:
            return self.render(row, [*messages], add_generation_prompt)
        except ValueError:
            return ""

    def _find_end(self, turn: dict, after: dict, mark: str) -> TurnEnd | None:
        """Find out how the template ends `turn`, whose text contains `mark`. Render it once as the
        last message and once with a message `after` it. The end token is the last token behind the
        mark that both texts have there."""
        _, found, tail = self._probe(ASKED, turn).partition(mark)
        _, _, earlier = self._probe(ASKED, turn, after).partition(mark)
        if not found:
            return None
        shared = os.path.commonprefix([tail, earlier or tail])
        tokens = self.added_tokens(tail)
        # <|im_end|> of most templates; Cohere ends turns with two tokens.
        common = [(token, end) for token, end in tokens if end <= len(shared)]
        # gpt-oss ends the last turn with <|return|>, earlier ones with <|end|>.
        chosen = common[-1:] or tokens[:1]
        appends = mark != MARK and self.end is not None and self.end.appended
        if chosen and not appends:
            ((token, end),) = chosen
            return TurnEnd(token, tail[:end])
        # GLM writes no end: the model stops with the token of the next role.
        following = earlier[len(shared) :]
        token, end = next(iter(self.added_tokens(following)), ("", 0))
        if not token or following[:end].strip() != token or token == self.tokenizer.bos_token:
            token = self.tokenizer.eos_token or ""
        return TurnEnd(token, tail + token, appended=True)


def _names_read(tokenizer) -> tuple[set[str], set[str]]:
    """Return the variables that the tokenizer's template reads, and all names of attributes and
    keys in it. If the tokenizer has several templates, return those of all."""
    templates = tokenizer.chat_template
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    names: set[str] = set()
    words: set[str] = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        # Plain jinja cannot parse these tags, which transformers knows.
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
        parsed = environment.parse(plain)
        words |= {node.attr for node in parsed.find_all(nodes.Getattr)}
        words |= {node.value for node in parsed.find_all(nodes.Const) if type(node.value) is str}
        names |= find_undeclared_variables(parsed)
    return names, words


def _variables(template_kwargs: tuple[str, ...]) -> dict[str, object]:
    """Return `--template_kwargs`: true, 3, 0.5 and null as in YAML, anything else as text."""
    texts = pairs_of("template_kwargs", template_kwargs)
    values = values_of("template_kwargs", template_kwargs)
    plain = (bool, int, float, type(None))
    return {name: x if isinstance(x, plain) else texts[name] for name, x in values.items()}


def any_of(words: Iterable[str]) -> re.Pattern:
    """Return a pattern that finds any of `words`. It prefers long words to shorter ones, and leaves
    out blank ones."""
    words = sorted(filter(str.strip, words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def rendered(tokenizer, messages: list[dict], label: str, **options) -> str:
    """Return the text of a conversation. If the template refuses it, raises a `ValueError` that
    begins with `label`."""
    try:
        render = tokenizer.apply_chat_template
        return within(RENDER_SECONDS, render, messages, tokenize=False, **options)
    except Exception as error:  # a template may raise anything
        problem = distributed.first_line(error)
        problem += f" (line {error.lineno})" if hasattr(error, "lineno") else ""
        raise ValueError(f"{label} chat template refuses the messages: {problem}") from error


def use_template(tokenizer, file: str) -> None:
    """Set the tokenizer's chat template from a file. Raises `ValueError` if it cannot be rendered,
    or changes the text of the model's turns."""
    flag = f"--chat_template {file}"
    try:
        tokenizer.chat_template = Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag}: {distributed.first_line(error)}") from error
    if ChatTemplate(tokenizer, label=flag).end is None:
        raise ValueError(f"{flag}: the template changes the text of an assistant turn")


def end_of_turn(tokenizer, calls: bool = False) -> int | None:
    """Return the token that the tokenizer's chat template writes at the end of the model's turns
    (`calls`: of those with tool calls), or None if it writes none. The token may be an added token
    that is not special."""
    chat = ChatTemplate(tokenizer)
    end = chat.end_of_calls if calls else chat.end
    is_written = end and not (end.appended and end.token == (tokenizer.eos_token or ""))
    if not is_written or (calls and "tools" not in chat.variables):
        return None
    return tokenizer.convert_tokens_to_ids(end.token)
