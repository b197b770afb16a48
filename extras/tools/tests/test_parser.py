"""Calls in the model's text: what a template writes is read, what cannot be read is malformed, a
parser that does not fit is refused."""

import json

import pytest
from field.families import CHATML, HARMONY, HARMONY_ENDS, IM_END, ours
from helpers import ROOT, tiny_tokenizer

from common.config.groups import BaseArgs
from common.text.encode import Encoder
from common.text.messages import messages_field
from extras.tools.parser import Call, Parser, make_parser, make_reader
from extras.tools.tasks import PYTHON_TOOL
from extras.tools.tests.episodes import assert_episode_equals_sft, call, make_args, parser_of

CODES = ["12*34", 'print("é")\nx = {1: "</s>"}', "7"]


def tiny():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (ROOT / "configs/templates/tiny_tools.jinja").read_text()
    return tokenizer


def chatml():
    tokenizer = ours("qwen2_5", "builtin", IM_END, CHATML, IM_END[0]).load()
    tokenizer.chat_template = (ROOT / "configs/templates/chatml_tools.jinja").read_text()
    return tokenizer


def gpt_oss():
    return ours("gpt_oss", "builtin", HARMONY_ENDS, HARMONY, "<|return|>").load()


TOKENIZERS = [tiny, chatml, gpt_oss]  # test_field.py has many others
ENDS = {"<|end_of_turn|>", *IM_END, *HARMONY_ENDS}


@pytest.mark.parametrize("load", TOKENIZERS)
def test_an_episode_has_the_ids_of_sft(load):
    """The parser reads the calls that the template writes, too."""
    encoder = Encoder(load(), BaseArgs(prompt_format="chat"))
    silent = {encoder.tokenizer.convert_tokens_to_ids(token) for token in ENDS}
    for code in CODES:
        called = call("python", dict(code=code))
        messages = [
            dict(role="user", content="?"),
            dict(role="assistant", content="", tool_calls=[called]),
            dict(role="tool", name="python", tool_call_id=called["id"], content="error: no\nline"),
            dict(role="assistant", content="408"),
        ]
        row = dict(messages=messages, tools=[PYTHON_TOOL], _source="x:1")
        assert_episode_equals_sft(encoder, parser_of(encoder.tokenizer), row, silent)


X = [Call("f", dict(x=1))]
# turn, calls that are read, problem
HERMES = [
    ("It is 7.", [], ""),
    ('a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', X, ""),
    ('<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}', [Call("f", {}), Call("g", {})], ""),
    ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', [Call("f", 3)], ""),
    ('<tool_call>{"name": "f", "parameters": {"x": 1}}', X, ""),
    ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}', X, ""),
    ('<tool_call>{"name": "f", "args": {"x": 1}}', [], "the call has args; write"),
    ('<tool_call>{"name": "f", "x": 1, "arguments": {}}', [], "the call has x; write"),
    ('<tool_call>{"name": "f", "parameters": {"x": 1}, "arguments": {}}', [],
     "the call has arguments and parameters; write"),
    ('<tool_call>{"name": "f", "arguments": "x=1"}', [], "the arguments are not JSON"),
    ("<tool_call>{</tool_call>", [], "the call is not JSON: Expecting property name"),
    ("<tool_call>[1]</tool_call>", [], "the call is not an object with"),
    ("<tool_call>" + "[" * 100_000, [], "the call is not JSON"),
    ('<think>\n<tool_call>{"name": "f"}</tool_call>\n</think>\n\n7', [], ""),
    ("<think>\n<tool_call>{", [], ""),  # an unfinished thought has neither call nor answer
]  # fmt: skip


# forms of the arguments x=1, and of none, in data and from the model
ARGUMENTS = [
    ({"x": 1}, {"x": 1}), ('{"x": 1}', {"x": 1}), ('"{\\"x\\": 1}"', {"x": 1}),
    ({}, {}), ("{}", {}), (" ", {}), ("", {}), ("null", {}), (None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "read"), ARGUMENTS)
def test_a_call_means_the_same_in_data_and_from_the_model(given, read):
    function = dict(name="f", arguments=given)
    message = dict(role="assistant", tool_calls=[dict(function=function)])
    row = dict(_source="x:1", messages=[dict(role="user", content="?"), message])
    (called,) = messages_field(row, "messages")[1]["tool_calls"]
    assert called["function"] == dict(name="f", arguments=read)
    written = dict(
        hermes=f"<tool_call>\n{json.dumps(function)}\n</tool_call>",
        openai=f" to=functions.f<|channel|>commentary json<|message|>{json.dumps(given)}",
    )
    tokenizer = chatml()
    for name, text in written.items():
        parser = Parser(make_reader(name, tokenizer), tokenizer, cuts_thoughts=name != "openai")
        turn = parser.parse(text, [PYTHON_TOOL])
        assert turn.calls == [Call("f", read)], (name, turn)


def test_a_turn_that_a_parser_of_vllm_does_not_read_is_malformed(monkeypatch):
    monkeypatch.setattr("extras.tools.parser.SECONDS", 0.2)
    parser = Parser(make_reader("qwen3_coder", chatml()), chatml())
    parser.marker = "<tool_call>"
    text = "<tool_call>\n<function=python>\n<parameter=code>" + ">" * 20_000
    turn = parser.parse(text, [PYTHON_TOOL])
    assert turn.problem and not turn.calls
    # vLLM swallows a broken call
    parser = make_parser(chatml(), make_args(tool_parser="granite4"))  # also `<tool_call>` and JSON
    turn = parser.parse('<tool_call>{"name": "f", </tool_call>', [PYTHON_TOOL])
    assert turn.problem and not turn.calls


@pytest.mark.parametrize(("text", "calls", "problem"), HERMES)
def test_hermes(text, calls, problem):
    turn = parser_of(chatml()).parse(text, [PYTHON_TOOL])
    assert turn.calls == calls and bool(turn.problem) == bool(problem)
    assert turn.problem.startswith(problem)


def test_a_thought_may_begin_in_the_prompt():
    parser = parser_of(chatml())
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert not parser.parse(text, [], prompt="<|im_start|>assistant\n<think>\n").calls
    assert parser.parse(f"hm</think>{text}", [], prompt="assistant\n<think>\n").calls


def test_gpt_oss():
    parser = parser_of(gpt_oss())
    thought = "<|channel|>analysis<|message|>Use it.<|end|><|start|>assistant"
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    assert parser.parse(f'{thought}{head}{{"x": 1}}', []).calls == [Call("f", dict(x=1))]
    assert parser.parse(f"{thought}{head}{{", []).problem.startswith("the arguments are not JSON")
    assert not parser.parse(f"{thought}<|channel|>final<|message|>7", []).calls


@pytest.mark.parametrize(("tokenizer", "flags", "words"), [
    (tiny_tokenizer, {}, "--tools: the chat template does not read tools; set --chat_template"),
    (chatml, dict(tool_parser="hermez"), "--tool_parser hermez: unknown; there are hermes"),
    (chatml, dict(tool_parser="openai"), "--tool_parser openai: does not read the calls of "),
])  # fmt: skip
def test_a_parser_that_does_not_fit_is_refused(tokenizer, flags, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_parser(tokenizer(), make_args(**flags))
    assert "\n" not in str(caught.value)
