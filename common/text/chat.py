"""The chat template: messages -> text, in the form that the template reads, and the tokens that end
turns."""

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

# Messages of the conversations that probe a template.
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
RENDER_SECONDS = 10.0  # of a row, and of all probes
SET_HERE = ("messages", "tools", "add_generation_prompt")  # `ChatTemplate.render` sets these


class TurnEnd(NamedTuple):
    """How a template ends a turn of the model."""

    token: str  # the last token of the turn that the model samples
    last: str  # what the model samples after its answer: other tokens, if any, and `token`
    appended: bool = False  # the template writes no token after a last turn, so we add it


class ChatTemplate:
    """Chat template of the tokenizer, with the variables of `--template_kwargs`.

    Templates differ in the form of the content they read (text or parts), in where they put
    thoughts, in whether they know developers, and in how they end a turn. Probes find out."""

    def __init__(self, tokenizer, template_kwargs: tuple[str, ...] = (), label: str | None = None):
        """Parse `--template_kwargs`. Raises `ValueError` if the template does not render, ignores a
        variable or takes too long for the probes together."""
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
        # Whether a thought beside the content is shown, in turns with calls and in others.
        self._shows_thoughts = {
            "tool_calls" in turn: MARK in self._probe(ASKED, turn | dict(reasoning_content=MARK))
            for turn in (SAID | dict(content="!"), CALLED)
        }
        self.shows_developer = MARK in self._probe(SAID | dict(role="developer"), ASKED)
        prompt = self._probe(ASKED, add_generation_prompt=True)
        shared = os.path.commonprefix([prompt, self._probe(ASKED)])
        # text between a question and the reply, such as <|im_start|>assistant\n
        self.header = prompt[len(shared) :] if shared else ""
        # None if the template does not show the text of an assistant's turn
        self.end = self._find_end(SAID, ASKED, MARK)
        marked = CALL | dict(function=dict(name=MARKED_CALL, arguments=dict(x=1)))
        self.end_of_calls = self._find_end(CALLED | dict(tool_calls=[marked]), RESULT, MARKED_CALL)

    # ---- text ----

    def render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with `add_generation_prompt` up to the start of the
        next reply. The row's `tools`, if any, are a list of schemas; its `chat_template_kwargs` are
        variables of the template."""
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
        """Return variables of the template, which may be JSON text. Raises `ValueError` for one
        that it does not read, or that the data determines."""
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
        """Return the messages in the form that the template expects. An assistant's text ends
        before the tokens that end its turn, because the template adds them. A thought stands beside
        the content if the template reads it there, else in the content."""
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
        """Return the name of a role in the template: developers may be the system, an `observation`
        or `ipython` may be the role tool."""
        if role == "developer" and not self.shows_developer:
            return "system"
        return "tool" if role in RESULTS and "tool" in self.words else role

    def end_of(self, turn: dict) -> TurnEnd | None:
        """Return how the template ends a turn of the model like `turn`."""
        return self.end_of_calls if turn.get("tool_calls") else self.end

    def added_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the special and added tokens in a text, each with the place where it ends."""
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
        """Return the text of a conversation; empty if the template refuses it."""
        has_calls = any("tool_calls" in message for message in messages)
        row = PROBE if has_calls and "tools" in self.variables else {}
        try:
            return self.render(row, [*messages], add_generation_prompt)
        except ValueError:
            return ""

    def _find_end(self, turn: dict, after: dict, mark: str) -> TurnEnd | None:
        """Find out how the template ends `turn`, in whose text `mark` stands. The end token is the
        last one after the mark that stands there both where the conversation ends and where it goes
        on."""
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
    """Return the variables that the tokenizer's template, or one of its templates, reads, and all
    names of attributes and keys in it."""
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
    """Return a pattern that finds `words`, the longest one first, and ignores blank words."""
    words = sorted(filter(str.strip, words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def rendered(tokenizer, messages: list[dict], label: str, **options) -> str:
    """Return the text of a conversation. Raises `ValueError`, which begins with `label`, if the
    template refuses it."""
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
    """Return the token that the tokenizer's chat template writes at the end of a turn of the model,
    which may be another one for turns with calls; None without such a token. Some tokenizers list
    it as an added token only."""
    chat = ChatTemplate(tokenizer)
    end = chat.end_of_calls if calls else chat.end
    is_written = end and not (end.appended and end.token == (tokenizer.eos_token or ""))
    if not is_written or (calls and "tools" not in chat.variables):
        return None
    return tokenizer.convert_tokens_to_ids(end.token)
