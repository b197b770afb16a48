"""The chat template: messages -> text, in the form that the template reads, and the token that ends a turn."""

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
from common.data.messages import THOUGHT_KEYS
from common.parallel import distributed

MARK = "(here the model spoke)"  # text of a probe turn: templates may trim a turn or depend on earlier ones
ASKED = dict(role="user", content="?")
PROBE = [ASKED, dict(role="assistant", content=MARK)]
CALL = dict(type="function", id="probecall", function=dict(name="probe", arguments=dict(x=1)))
SECONDS = 20  # for the first rendering
# Errors of templates: their own, and those of Python expressions in them.
_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, MemoryError, RecursionError
)  # fmt: skip
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
    if ChatTemplate(tokenizer, label=flag).end is None:
        raise ValueError(f"{flag}: the template changes the text of an assistant turn")


def rendered(tokenizer, messages: list[dict], label: str, **options) -> str:
    """Return the text of a conversation. Raises `ValueError`, which begins with `label`, if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except _ERRORS as error:
        problem = distributed.first_line(error) or type(error).__name__
        raise ValueError(f"{label} chat template refuses the messages: {problem}") from error


def end_of_turn(tokenizer) -> int | None:
    """Return the token that the tokenizer's chat template writes at the end of an assistant's turn; None without such a
    token. Some tokenizers list it as an added token only."""
    end = ChatTemplate(tokenizer).end
    if end is None or (end.appended and end.earlier is None):
        return None
    return tokenizer.convert_tokens_to_ids(end.token)


def names_read(tokenizer) -> set[str]:
    """Return the variables that the tokenizer's template, or one of its templates, reads."""
    templates = tokenizer.chat_template
    names = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        # tags of transformers around an assistant's text, which plain jinja does not parse
        plain = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
        names |= find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    return names


@contextlib.contextmanager
def _time_limit(label: str) -> Iterator[None]:
    """Raise `ValueError` if the block takes more than `SECONDS`; only in the main thread, which has the signals."""
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
        raise ValueError(f"{label}: the chat template does not render within {SECONDS} seconds") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _scalar(text: str) -> object:
    """Return true, 3, 0.5 and null as in YAML, anything else as text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


class ChatTemplate:
    """Chat template of the tokenizer, with the variables of `--template_kwargs`.

    Probes show how it writes what templates write differently: content as text or as a list of parts, thoughts, turns
    of a developer, and the end of a turn.
    """

    def __init__(self, tokenizer, template_kwargs: tuple[str, ...] = (), label: str | None = None):
        """Parse `--template_kwargs`. Raises `ValueError` if the template does not render or ignores a variable."""
        self.tokenizer, self.in_parts = tokenizer, False
        tokens = sorted((str(token) for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._added = re.compile("|".join(re.escape(token) for token in tokens if token.strip()) or r"(?!)")
        self.thought_key = self.thought_key_of_calls = "reasoning_content"
        label = label or f"--model {tokenizer.name_or_path}"
        with _time_limit(label):
            self._check_rendering(label)
            self.reads = names_read(tokenizer)
            self.kwargs = {k: _scalar(v) for k, v in pairs_of("template_kwargs", template_kwargs).items()}
            for name in self.kwargs:
                if name in _OURS or name not in self.reads:
                    why = "the data determines it" if name in _OURS else "the chat template does not read it"
                    raise ValueError(f"--template_kwargs {name}: {why}")
            self.in_parts = not self._shows(*PROBE) and self._renders_parts()
            self.thought_key = self._key_of_thoughts(dict(role="assistant", content="!"))
            calling = dict(role="assistant", content="", tool_calls=[CALL])  # gpt-oss: a thought or content, not both
            self.thought_key_of_calls = self._key_of_thoughts(calling)
            self.shows_developer = self._shows(dict(role="developer", content=MARK), ASKED)
            self.end = self._find_end()
            self.header = self._find_header()
            self.opens_thought = opened_thought(self.header) is not None
        self.shown: set[tuple] = set()  # structures of conversations whose messages are all in the rendering
        self.usual: set[str] = set()  # texts that the template writes into the model's turns

    # ---- probes ----

    def _check_rendering(self, label: str) -> None:
        """Raise `ValueError` if the template does not render a plain conversation."""
        try:
            self.tokenizer.apply_chat_template(PROBE, tokenize=False)
        except _ERRORS as error:
            if self._renders_parts():
                return
            problem = distributed.first_line(error) or type(error).__name__
            problem = f"{problem} (line {error.lineno})" if hasattr(error, "lineno") else problem
            raise ValueError(f"{label}: the chat template does not render: {problem}") from error

    def _renders_parts(self) -> bool:
        try:
            return MARK in self.tokenizer.apply_chat_template([_in_parts(m) for m in PROBE], tokenize=False)
        except _ERRORS:
            return False

    def _after_mark(self, messages: list[dict]) -> str | None:
        """Return the rendering of a probe behind `MARK`; None if the template refuses the probe or drops `MARK`."""
        try:
            _, mark, after = self._render(messages, "", add_generation_prompt=False).partition(MARK)
        except ValueError:
            return None
        return after if mark else None

    def _shows(self, *messages: dict) -> bool:
        return self._after_mark([*messages]) is not None

    def _key_of_thoughts(self, turn: dict) -> str | None:
        """Return the key under which the template reads the thought of such a turn; None if it reads none."""
        return next((key for key in THOUGHT_KEYS if self._shows(ASKED, turn | {key: MARK})), None)

    def _find_header(self) -> str:
        """Return what a prompt has after the question, up to the start of the reply."""
        try:
            prompt = self._render([ASKED], "", add_generation_prompt=True)
            same = os.path.commonprefix([prompt, self._render([ASKED], "", add_generation_prompt=False)])
        except ValueError:
            return ""
        return prompt[len(same) :]

    def _find_end(self) -> TurnEnd | None:
        """Return how turns end; None if the template does not show the text of an assistant's turn."""
        tail, earlier = self._after_mark(PROBE), self._after_mark([*PROBE, ASKED])
        if tail is None:
            return None
        last_tokens, earlier_tokens = self.added_tokens(tail), self.added_tokens(earlier or "")
        shared = os.path.commonprefix([[t for t, _ in last_tokens], [t for t, _ in earlier_tokens]])
        # <|END_RESPONSE|><|END_OF_TURN_TOKEN|> end a turn together; text stands between an end and the next turn
        apart = [i for i in range(1, len(shared)) if last_tokens[i][1] - len(shared[i]) > last_tokens[i - 1][1]]
        shared = shared[: min(apart, default=len(shared))]
        if shared:  # closed turns: <|im_end|>
            token, end = last_tokens[len(shared) - 1]
            return TurnEnd(token, tail[:end], tail, earlier[: earlier_tokens[len(shared) - 1][1]])
        if last_tokens:  # gpt-oss: the last turn ends with <|return|>, and earlier ones with another token
            token, end = last_tokens[0]
            return TurnEnd(token, tail[:end], tail, None)
        if earlier_tokens:
            token, end = earlier_tokens[0]
            follows = not earlier[: end - len(token)].strip()
            if follows and token != self.tokenizer.bos_token:  # GLM: the next role's token ends a turn
                return TurnEnd(token, tail + token, tail + token, earlier[:end], appended=True)
        token = self.tokenizer.eos_token or ""
        return TurnEnd(token, tail + token, tail + token, None, appended=True)

    def added_tokens(self, text: str) -> list[tuple[str, int]]:
        """Return the special and added tokens in a text, each with the place where it ends."""
        return [(match[0], match.end()) for match in self._added.finditer(text)]

    # ---- text ----

    def render(self, row: dict, messages: list[dict], add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation; with `add_generation_prompt` up to the start of the next reply. The row's
        `tools`, if any, are a list of schemas."""
        tools = row.get("tools")
        if tools and "tools" not in self.reads:
            advice = "set --chat_template to one that does, such as configs/templates/chatml_tools.jinja"
            raise ValueError(f"{row['_source']}: column tools: the chat template does not read it; {advice}")
        label = f"{row.get('_source')}: the"
        return self._render(messages, label, tools=tools, add_generation_prompt=add_generation_prompt)

    def _render(self, messages: list[dict], label: str, **options) -> str:
        return rendered(self.tokenizer, [self._as_read(m) for m in messages], label, **self.kwargs, **options)

    def _thought_key(self, message: dict) -> str | None:
        """Return the key under which the template reads the thought of a message; None if it reads none."""
        return self.thought_key_of_calls if message.get("tool_calls") else self.thought_key

    def _as_read(self, message: dict) -> dict:
        """Return a message in the form that the template reads."""
        key = self._thought_key(message)
        if key is not None:
            message = {key if k == "reasoning_content" else k: v for k, v in message.items()}
        return _in_parts(message) if self.in_parts else message

    def normal(self, messages: list[dict]) -> list[dict]:
        """Return the messages without what the template adds itself or has no place for: an assistant's text ends
        before the token that ends its turn; a thought that the template does not read is written in the text; a
        developer is the system where the template has only that."""
        normal = []
        for message in messages:
            if message["role"] == "developer" and not self.shows_developer:
                message = message | dict(role="system")
            if message["role"] == "assistant":
                message = self._normal_thought(message | dict(content=self._without_end(message["content"])))
            normal.append(message)
        return normal

    def _without_end(self, text: str) -> str:
        """Return the text of a turn without the tokens that end it."""
        ends = tuple(filter(None, (self.end.token if self.end else "", self.tokenizer.eos_token)))
        while text.rstrip().endswith(ends):
            text = text.rstrip()
            text = text[: -max(len(end) for end in ends if text.endswith(end))]
        return text

    def _normal_thought(self, message: dict) -> dict:
        """Return a turn with its thought where the template reads thoughts: beside the content, or in it."""
        thought = message.get("reasoning_content")
        key = self._thought_key(message)
        if key is None and thought:
            rest = {name: value for name, value in message.items() if name != "reasoning_content"}
            tag = opened_thought(self.header) or "<think>"
            return rest | dict(content=with_thought(thought, message["content"], tag))
        inline = re.fullmatch(r"\s*<think>(.*?)</think>\s*(.*)", message["content"], re.DOTALL)
        if key is not None and not thought and inline:
            return message | dict(reasoning_content=inline[1].strip(), content=inline[2])
        return message

    def reply(self, messages: list[dict]) -> str:
        """Return the text of `messages` between two turns of the model: from the token that ends the first one to the
        start of the second."""
        row = dict(_source="the environment's messages")
        text = self.render(row, PROBE + messages, add_generation_prompt=True)
        after = text[text.index(MARK) + len(MARK) :]
        if self.end.earlier and after.startswith(self.end.earlier):
            return after[len(self.end.earlier) :]
        tokens = self.added_tokens(after)
        return after[tokens[0][1] :] if tokens else after


def _in_parts(message: dict) -> dict:
    """Return a message whose content is a list of one part, the form of templates for images and text."""
    return message | dict(content=[dict(type="text", text=message["content"])])


def opened_thought(prompt: str) -> str | None:
    """Return the tag that opens a thought at the end of a prompt; None without one."""
    match = re.search(r"(<(\w+:)?(think|thinking|thought|reasoning)>|\[THINK\])\s*$", prompt)
    return match[1] if match else None


def with_thought(thought: str, answer: str, tag: str = "<think>") -> str:
    """Return a thought, with its tags, and the answer."""
    return f"{tag}\n{thought}\n{closing(tag)}\n\n{answer}"


def closing(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"
