"""Reads the calls in a turn of the model, in the format of its chat template.

`hermes` and `openai` are read here, every other format by a tool parser of vLLM. At the start of a
run, the parser must read a call that the chat template has written. A turn in which a call begins
but none can be read is malformed; it does not count as an answer."""

import importlib.util
import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from common.config.online import SamplingArgs
from common.parallel import distributed
from common.parallel.process import within
from common.text.chat import ASKED, CALL, PROBE, SAID, ChatTemplate
from common.text.messages import arguments_of
from common.text.thoughts import answer_of, template_text, thought_marks
from common.text.turns import prompt_of, require_shown, said_of, template_form

# How chat templates begin a call -> name of its parser. The first match is the default.
FORMATS = (
    (r"<tool_call>\s*\{", "hermes"),
    (r"<tool_call>\s*<function=", "qwen3_coder"),
    (r"<tool_call>\s*\w+\s*<arg_key>", "glm45"),
    (r"to=functions\.", "openai"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<\|tool_call_start\|>\[", "lfm2"),
    (r"<\|tool_calls_section_begin\|>", "kimi_k2"),
    (r"<｜tool▁calls▁begin｜>.*```json", "deepseek_v3"),
    (r"<｜tool▁calls▁begin｜>", "deepseek_v31"),
    (r"<\|tool_call>call:", "gemma4"),
    (r"<start_function_call>", "functiongemma"),
    (r"<\|tool_call\|>\s*\[", "granite"),
    (r"<\|START_ACTION\|>", "cohere_command3"),
    (r"<seed:tool_call>", "seed_oss"),
    (r"<minimax:tool_call>", "minimax_m2"),
    (r"<tool_calls>\s*\[", "hunyuan_a13b"),
    (r"<\w+:function_calls>", "muse_glimmer"),
    (r"functools\s*\[|<\|tool_call\|>", "phi4_mini_json"),
    (r"\[\w+\(", "pythonic"),
    (r"\{\s*\"name\"", "llama3_json"),
)


# The start of a run writes and reads this call, with arguments of two types.
TRIED: dict = CALL | dict(function=CALL["function"] | dict(arguments=dict(x=1, s="a b")))

SECONDS = 5.0  # limit for reading a turn: some of vLLM's patterns take quadratic time and worse


class Call(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: object
    """an object, unless the model wrote something else"""
    id: str | None = None
    """the call's id, if the model wrote one"""


class Turn(NamedTuple):
    """A turn of the model. Text without calls is its answer."""

    content: str
    calls: list[Call]
    problem: str = ""
    """why the calls cannot be read; empty if they can be, or if there are none"""


# (turn, schemas) -> text in front of the calls, and the calls. Raises `ValueError`.
Reader = Callable[[str, list[dict]], tuple[str, list[Call]]]


class Parser:
    """Parses the turns of one model."""

    def __init__(self, read: Reader, tokenizer, cuts_thoughts: bool = True):
        self.read = read
        self.cuts_thoughts = cuts_thoughts
        self.start, self.end = thought_marks(template_text(tokenizer))  # of thoughts
        self.marker = ""
        """text with which a call begins; empty if it is no mark, but could begin any text"""

    def parse(self, text: str, tools: list[dict], prompt: str = "") -> Turn:
        """Return the calls in a turn of the model, after its thoughts. `text`: the turn without the
        token that ends it; `tools`: schemas, for the types of arguments; `prompt`: the text before
        the turn, or its last part, which may open a thought."""
        answer = text
        if self.cuts_thoughts:
            inside = re.search(rf"(?:{self.start})\s*\Z", prompt) is not None
            answer = answer_of(text, inside, self.start, self.end)
        try:
            content, calls = within(SECONDS, self.read, answer, tools)
        except (ValueError, TimeoutError) as error:
            return Turn(answer, [], str(error))
        if not calls and self.marker and self.marker in answer:
            return Turn(answer, [], "no call can be read")
        # JSON may contain half a surrogate pair, which has no UTF-8
        names = [call.name.encode("utf-8", "replace").decode() for call in calls]
        named = [call._replace(name=name) for call, name in zip(calls, names, strict=True)]
        return Turn(content, named)


def make_parser(tokenizer, args: SamplingArgs) -> Parser:
    """Return the parser of `--tool_parser` for the tokenizer's chat template. Raises `ValueError`
    if it is unknown, or does not read a call that the template writes."""
    chat = ChatTemplate(tokenizer, args.template_kwargs)
    if "tools" not in chat.variables:
        example = "configs/templates/chatml_tools.jinja"
        advice = f"set --chat_template to one that does, such as {example}"
        raise ValueError(f"--tools: the chat template does not read tools; {advice}")
    prompt, text = written_calls(chat, PROBE, [TRIED])
    name = args.tool_parser or default_parser(text)
    parser = Parser(make_reader(name, tokenizer), tokenizer, cuts_thoughts=name != "openai")
    turn = parser.parse(text, PROBE["tools"], prompt)
    function = TRIED["function"]
    found = [(call.name, call.arguments) for call in turn.calls]
    if found != [(function["name"], function["arguments"])]:
        problem = turn.problem or (f"it reads {found}" if found else "it reads no call")
        raise ValueError(
            f"--tool_parser {name}: does not read the calls of this chat template, {problem} in"
            f" {text!r:.200}; name another parser, or set another --chat_template"
        )
    before, _, _ = text.partition(function["name"])
    parser.marker = marker_of(re.sub(r"\A(\s|</?think>)*", "", before))
    return parser


def written_calls(chat: ChatTemplate, row: dict, calls: list[dict]) -> tuple[str, str]:
    """Return a prompt, and the turn in which the model makes `calls` after it, without the token
    that ends it. Raises `ValueError` if the template does not show such a turn."""
    row, messages = template_form(chat, row, [ASKED, SAID | dict(content="", tool_calls=calls)])
    try:
        require_shown(chat, row, messages)
        prompt = prompt_of(chat, row, messages[:1])
        text = said_of(chat, row, messages, prompt)
    except ValueError as error:
        raise ValueError(f"{error}; set another --chat_template") from error
    return prompt, text.removesuffix(chat.end_of_calls.token)


def default_parser(text: str) -> str:
    """Return the name of the parser for a call that the template wrote."""
    for pattern, name in FORMATS:
        if re.search(pattern, text, re.DOTALL):
            return name
    raise ValueError(f"--tools: no parser is known for the call {text!r:.200}; set --tool_parser")


def marker_of(text: str) -> str:
    """Return the mark with which a call starts: a tag, or the text in front of its name."""
    tag = re.match(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])", text)
    if tag:
        return tag[1]
    return text.strip() if len(text.strip()) > 4 else ""


# ---- readers ----


def make_reader(name: str, tokenizer) -> Reader:
    """Return the reader of `--tool_parser`. Raises `ValueError` for an unknown name."""
    if name in OURS:
        return OURS[name]
    flag = f"--tool_parser {name}"
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"{flag}: this parser needs vllm; without it there are {', '.join(OURS)}")
    from vllm.tool_parsers import ToolParserManager

    names = [*OURS, *ToolParserManager.list_registered()]
    if name not in names:
        raise ValueError(f"{flag}: unknown; there are {', '.join(names)}")
    return vllm_reader(name, tokenizer)


def read_hermes(text: str, tools: list[dict]) -> tuple[str, list[Call]]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    content, *bodies = text.split("<tool_call>")
    return content, [call_of(body.partition("</tool_call>")[0]) for body in bodies]


def call_of(text: str) -> Call:
    """Read a call from JSON, in the forms that rows of data have; `parameters` means arguments.
    Raises `ValueError` for any other key: without it, another call would run."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not JSON: {distributed.first_line(error)}") from error
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call | call["function"]
        del call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError('the call is not an object with "name" and "arguments"')
    given = [call[key] for key in ("arguments", "parameters") if key in call]
    unknown = call.keys() - {"name", "arguments", "parameters", "id", "type", "index"}
    if unknown or len(given) > 1:
        keys = ", ".join(sorted(unknown)) or "arguments and parameters"
        raise ValueError(f'the call has {keys}; write "name" and "arguments" alone')
    return Call(call["name"], arguments_of(given[0]) if given else {})


def read_harmony(text: str, tools: list[dict]) -> tuple[str, list[Call]]:
    """Read the call of gpt-oss: the last message of its turn, if it is addressed to a function.
    Other messages of the turn are thoughts."""
    header, _, body = text.rpartition("<|start|>")[2].partition("<|message|>")
    recipient = re.search(r"to=functions\.([\w.-]+)", header)
    if recipient is None:
        return text, []
    return "", [Call(recipient[1], arguments_of(body.partition("<|")[0]))]


OURS: dict[str, Reader] = dict(hermes=read_hermes, openai=read_harmony)


def vllm_reader(name: str, tokenizer) -> Reader:
    """Return a reader that calls a tool parser of vLLM."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionToolsParam,
    )
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # malformed calls are usual
    make = ToolParserManager.get_tool_parser(name)

    @lru_cache(64)  # some take 0.4 s to make
    def parser_and_request(tools: str) -> tuple:
        params = [ChatCompletionToolsParam(**tool) for tool in json.loads(tools)]
        request = ChatCompletionRequest(model="", messages=[], tools=params)
        return make(tokenizer, params), request

    def read(text: str, tools: list[dict]) -> tuple[str, list[Call]]:
        try:
            parser, request = parser_and_request(json.dumps(tools))
            found = parser.extract_tool_calls(text, request)
        except Exception as error:  # vLLM's parsers may raise anything on text of a model
            raise ValueError(f"no call can be read: {distributed.first_line(error)}") from error
        calls = []
        for call in found.tool_calls:
            arguments = arguments_of(call.function.arguments)  # JSON of what the model wrote
            calls.append(Call(call.function.name, arguments, call.id if call.id in text else None))
        return found.content or "", calls

    return read
