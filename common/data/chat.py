"""The chat template: messages -> text, in the form that the template reads, and the token that ends
a turn."""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables

from common.config.specs import pairs_of
from common.data.messages import (
    THOUGHT_KEYS,
    in_one_part,
    in_parts,
    opened_thought,
    with_thought,
)
from common.parallel import distributed

# texts of a probe turn: templates may trim a turn or depend on earlier ones
MARK = "(here the model spoke)"
THOUGHT_MARK = "(here it thought)"
ASKED = dict(role="user", content="?")
SAID = dict(role="assistant", content=MARK)
CALL = dict(type="function", id="probecall", function=dict(name="probe", arguments=dict(x=1)))
SECONDS = 20  # for the first rendering
# Errors of templates: their own, and those of Python expressions in them.
_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    RecursionError,
)
_OURS = ("messages", "tools", "add_generation_prompt")  # variables that `ChatTemplate.render` sets


@dataclass(frozen=True)
class TurnEnd:
    """How a template ends a turn of the model."""

    token: str
    """last token that the model samples"""
    last: str
    """text from the end of the answer up to and with `token`, in the last turn"""
    tail: str
    """all text after the answer of the last turn; begins with `last`"""
    earlier: str | None
    """like `last`, in earlier turns; None if they end in another way, so that they are context"""
    appended: bool = False
    """whether the template leaves the token of a last turn out, so that it is added here"""


class ChatTemplate:
    """Chat template of the tokenizer, with the variables of `--template_kwargs`.

    Probes show how it writes what templates write differently: content as text or as a list of
    parts, thoughts, turns of a developer, and the end of a turn."""

    def __init__(self, tokenizer, template_kwargs: tuple[str, ...] = (), label: str | None = None):
        """Parse `--template_kwargs`. Raises `ValueError` if the template does not render or ignores
        a variable."""
        self.tokenizer = tokenizer
        tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        tokens = sorted(filter(str.strip, tokens), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self.thought_key = self.thought_key_of_calls = "reasoning_content"
        label = label or f"--model {tokenizer.name_or_path}"
        with _time_limit(label):
            self.in_parts = self._reads_parts(label)
            self.reads = _names_read(tokenizer)
            self.kwargs = _variables(template_kwargs, self.reads)
            self.thought_key = self._key_of_thoughts(SAID | dict(content="!"))
            # gpt-oss: a thought or content, not both
            self.thought_key_of_calls = self._key_of_thoughts(
                SAID | dict(content="", tool_calls=[CALL])
            )
            self.shows_developer = MARK in self._probe(SAID | dict(role="developer"), ASKED)
            self.end = self._find_end()
            self.header = self._find_header()
            self.markup = self._find_markup()
        # structures of conversations whose messages are all in the rendering
        self.shown: set[tuple] = set()

    # ---- text ----

    def render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with `add_generation_prompt` up to the start of the
        next reply. The row's `tools`, if any, are a list of schemas."""
        label = row.get("_source")
        tools = row.get("tools") or None
        if tools and "tools" not in self.reads:
            example = "configs/templates/chatml_tools.jinja"
            advice = f"set --chat_template to one that does, such as {example}"
            raise ValueError(f"{label}: column tools: the chat template does not read it; {advice}")
        messages = [self._as_read(message) for message in messages]
        if row.get("images"):
            messages = [in_parts(message) for message in messages]
            label = f"{label} has images"
        return rendered(
            self.tokenizer,
            messages,
            f"{label}: the",
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **self.kwargs,
        )

    def _as_read(self, message: dict) -> dict:
        """Return a message in the form that the template reads."""
        key = self._thought_key(message)
        if key is not None:
            message = {key if k == "reasoning_content" else k: v for k, v in message.items()}
        return in_one_part(message) if self.in_parts else message

    def _thought_key(self, message: dict) -> str | None:
        """Return the key under which the template reads the thought of a message; None if it reads
        none."""
        return self.thought_key_of_calls if message.get("tool_calls") else self.thought_key

    def normal(self, messages: list[dict]) -> list[dict]:
        """Return the messages without what the template adds itself or has no place for: an
        assistant's text ends before the token that ends its turn; a thought that the template does
        not read is written in the text; a developer is the system where the template has only
        that."""
        normal = []
        for message in messages:
            if message["role"] == "developer" and not self.shows_developer:
                message = message | dict(role="system")
            if message["role"] == "assistant":
                message = message | dict(content=self._without_end(message["content"]))
                message = self._with_thought_in_place(message)
            normal.append(message)
        return normal

    def _without_end(self, text: str) -> str:
        """Return the text of a turn without the tokens that end it."""
        ends = [self.end.token if self.end else "", self.tokenizer.eos_token]
        ends = sorted(filter(None, ends), key=len, reverse=True)
        while text.rstrip().endswith(tuple(ends)):
            text = text.rstrip()
            text = text.removesuffix(next(end for end in ends if text.endswith(end)))
        return text

    def _with_thought_in_place(self, message: dict) -> dict:
        """Return a turn with its thought where the template reads thoughts: beside the content, or
        in it."""
        thought = message.get("reasoning_content")
        if self._thought_key(message) is None:
            if not thought:
                return message
            others = {name: value for name, value in message.items() if name != "reasoning_content"}
            tag = opened_thought(self.header) or "<think>"
            return others | dict(content=with_thought(thought, message["content"], tag))
        inline = re.fullmatch(r"\s*<think>(.*?)</think>\s*(.*)", message["content"], re.DOTALL)
        if thought or not inline:
            return message
        return message | dict(reasoning_content=inline[1].strip(), content=inline[2])

    def added_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the special and added tokens in a text, each with the place where it ends."""
        return [(match[0], match.end()) for match in self._added.finditer(text)]

    def reply(self, messages: list[dict]) -> str:
        """Return the text of `messages` between two turns of the model: from the token that ends
        the first one to the start of the second."""
        row = dict(_source="the environment's messages")
        text = self.render(row, [ASKED, SAID, *messages], add_generation_prompt=True)
        after = text[text.index(MARK) + len(MARK) :]
        if self.end.earlier and after.startswith(self.end.earlier):
            return after[len(self.end.earlier) :]
        ends = [end for _, end in self.added_tokens(after)]
        return after[ends[0] :] if ends else after

    # ---- probes ----

    def _reads_parts(self, label: str) -> bool:
        """Return whether the template reads content as a list of parts. Raises `ValueError` if it
        does not render a plain conversation."""
        refusal = None
        try:
            if MARK in self.tokenizer.apply_chat_template([ASKED, SAID], tokenize=False):
                return False
        except _ERRORS as error:
            problem = distributed.first_line(error) or type(error).__name__
            problem += f" (line {error.lineno})" if hasattr(error, "lineno") else ""
            refusal = ValueError(f"{label}: the chat template does not render: {problem}")
        parts = [in_one_part(ASKED), in_one_part(SAID)]
        with contextlib.suppress(*_ERRORS):
            if MARK in self.tokenizer.apply_chat_template(parts, tokenize=False):
                return True
        if refusal:
            raise refusal
        return False

    def _probe(self, *messages: dict, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; empty if the template refuses it."""
        try:
            return self.render({}, [*messages], add_generation_prompt)
        except ValueError:
            return ""

    def _key_of_thoughts(self, turn: dict) -> str | None:
        """Return the key under which the template reads the thought of such a turn; None if it
        reads none."""
        turns = {key: turn | {key: MARK} for key in THOUGHT_KEYS}
        return next((key for key in turns if MARK in self._probe(ASKED, turns[key])), None)

    def _find_header(self) -> str:
        """Return what a prompt has after the question, up to the start of the reply."""
        question = self._probe(ASKED)
        prompt = self._probe(ASKED, add_generation_prompt=True)
        return prompt[len(os.path.commonprefix([prompt, question])) :] if question else ""

    def _find_markup(self) -> re.Pattern:
        """Return a pattern of what the template writes into each turn of the model beside its
        thought and its answer: blanks, tags of thoughts, and names of channels."""
        markup = {r"\s", "</?think>"}
        prompt = self._probe(ASKED, add_generation_prompt=True)
        thinking = SAID | dict(reasoning_content=THOUGHT_MARK)
        for messages in ([SAID], [SAID, ASKED], [thinking], [thinking, ASKED]):
            text = self._probe(ASKED, *messages)
            if prompt and text.startswith(prompt) and MARK in text:
                before, _, _ = text[len(prompt) :].partition(MARK)
                markup |= {re.escape(part.strip()) for part in before.split(THOUGHT_MARK)} - {""}
        return re.compile(f"(?:{'|'.join(sorted(markup, key=len, reverse=True))})*")

    def _find_end(self) -> TurnEnd | None:
        """Return how turns end; None if the template does not show the text of an assistant's
        turn."""
        _, mark, tail = self._probe(ASKED, SAID).partition(MARK)
        _, _, earlier = self._probe(ASKED, SAID, ASKED).partition(MARK)
        if not mark:
            return None
        last_tokens = self.added_tokens(tail)
        earlier_tokens = self.added_tokens(earlier)
        # <|END_RESPONSE|><|END_OF_TURN_TOKEN|> end a turn together; text stands between an end and
        # the next turn
        shared = 0
        for (token, end), (other, _) in zip(last_tokens, earlier_tokens, strict=False):
            is_next = shared == 0 or last_tokens[shared - 1][1] == end - len(token)
            if token != other or not is_next:
                break
            shared += 1
        if shared:  # closed turns: <|im_end|>
            token, end = last_tokens[shared - 1]
            _, earlier_end = earlier_tokens[shared - 1]
            return TurnEnd(token, tail[:end], tail, earlier[:earlier_end])
        if last_tokens:  # gpt-oss: <|return|> ends the last turn, another token earlier ones
            token, end = last_tokens[0]
            return TurnEnd(token, tail[:end], tail, None)
        if earlier_tokens:
            token, end = earlier_tokens[0]
            follows = not earlier[: end - len(token)].strip()
            if follows and token != self.tokenizer.bos_token:
                # GLM: the next role's token ends a turn
                return TurnEnd(token, tail + token, tail + token, earlier[:end], appended=True)
        token = self.tokenizer.eos_token or ""
        return TurnEnd(token, tail + token, tail + token, None, appended=True)


def _names_read(tokenizer) -> set[str]:
    """Return the variables that the tokenizer's template, or one of its templates, reads."""
    templates = tokenizer.chat_template
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    names = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        # tags of transformers around an assistant's text, which plain jinja does not parse
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
        names |= find_undeclared_variables(environment.parse(plain))
    return names


def _variables(template_kwargs: tuple[str, ...], names_read: set[str]) -> dict[str, object]:
    """Return `--template_kwargs`: true, 3, 0.5 and null as in YAML, anything else as text."""
    variables = {}
    for name, text in pairs_of("template_kwargs", template_kwargs).items():
        if name in _OURS:
            raise ValueError(f"--template_kwargs {name}: the data determines it")
        if name not in names_read:
            raise ValueError(f"--template_kwargs {name}: the chat template does not read it")
        variables[name] = text
        with contextlib.suppress(yaml.YAMLError):
            value = yaml.safe_load(text)
            if value is None or isinstance(value, bool | int | float):
                variables[name] = value
    return variables


@contextlib.contextmanager
def _time_limit(label: str) -> Iterator[None]:
    """Raise `ValueError` if the block takes more than `SECONDS`; only in the main thread, which has
    the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except TimeoutError as error:
        problem = f"the chat template does not render within {SECONDS} seconds"
        raise ValueError(f"{label}: {problem}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def rendered(tokenizer, messages: list[dict], label: str, **options) -> str:
    """Return the text of a conversation. Raises `ValueError`, which begins with `label`, if the
    template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except _ERRORS as error:
        problem = distributed.first_line(error) or type(error).__name__
        raise ValueError(f"{label} chat template refuses the messages: {problem}") from error


def use_template(tokenizer, file: str) -> None:
    """Set the tokenizer's chat template from a file. Raises `ValueError` if it cannot be read or
    rendered."""
    flag = f"--chat_template {file}"
    try:
        tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: not UTF-8: {error}") from error
    if ChatTemplate(tokenizer, label=flag).end is None:
        raise ValueError(f"{flag}: the template changes the text of an assistant turn")


def end_of_turn(tokenizer) -> int | None:
    """Return the token that the tokenizer's chat template writes at the end of an assistant's turn;
    None without such a token. Some tokenizers list it as an added token only."""
    end = ChatTemplate(tokenizer).end
    if end is None or (end.appended and end.earlier is None):
        return None
    return tokenizer.convert_tokens_to_ids(end.token)
