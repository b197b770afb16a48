"""Conversations are read in every usual form or refused by row, and the chat template is rendered
as the flags and the rows specify."""

import json
import signal
import time

import pytest
from helpers import tiny_tokenizer
from text.chats import (
    ASKED,
    CALL,
    CALLS,
    EOS,
    EOT,
    READS_ALL,
    TOOL,
    chat,
    encoded,
    encoder,
    prompt,
    refused,
    said,
    samples,
    spans,
    turn,
)

from common.config.groups import BaseArgs
from common.model.tiny import tiny_model
from common.parallel.process import within
from common.text.encode import Encoder
from common.text.tokenizer import load_tokenizer


def calling(arguments: object, name: str = "f") -> dict:
    return said("", tool_calls=[dict(function=dict(name=name, arguments=arguments))])


def share(role: str, value: str) -> dict:
    return {"from": role, "value": value}


SYSTEM, ANSWER = turn("system", "S"), said("4")
PARTS = [dict(type="text", text="a"), dict(type="text", text="b")]
# two calls in one turn, and their results
A, B = (dict(CALL, id=x, function=dict(name=x, arguments={})) for x in ("call_a", "call_b"))
BOTH = [ASKED, said("", tool_calls=[A, B])]
BEGUN, OTHER = [ASKED, ANSWER], [turn("user", "Sure?"), ANSWER]
A_TOLD, B_TOLD = (turn("tool", x, tool_call_id=x) for x in ("call_a", "call_b"))
TOLD = turn("tool", "x")

# ---- forms of a row ----

# Messages in two forms, between other ones.
SAME = {
    "text in parts": ([turn("user", PARTS)], [turn("user", "ab")]),
    "null fields": (
        [turn("user", "a", tool_calls=None, weight=None), said(None, tool_calls=[CALL])],
        [turn("user", "a"), said("", tool_calls=[CALL])],
    ),
    "no content": ([dict(role="assistant", tool_calls=[CALL])], [said("", tool_calls=[CALL])]),
    "no calls": ([said("a", tool_calls=[])], [said("a")]),
    "arguments as JSON text": ([calling('{"x": 1}')], [calling(dict(x=1))]),
    "no arguments": ([calling(""), calling(None)], [calling({}), calling({})]),
    "reasoning": ([said("4", reasoning="R")], [said("4", reasoning_content="R")]),
    "thinking": ([said("4", reasoning="", thinking="R")], [said("4", reasoning_content="R")]),
    "thought in the text": ([said("<think>\nR\n</think>\n4")], [said("4", reasoning_content="R")]),
    "end of turn": ([said("4" + EOT), ASKED, said("4" + EOT + EOS)], [said("4"), ASKED, said("4")]),
    "EOS": ([said("4" + EOS)], [said("4")]),
    "ends apart": ([said(f"4\n{EOT} {EOS}\n")], [said("4")]),
    "blanks": ([said("4" + " " * 100_000 + EOT)], [said("4")]),  # no regular expression backtracks
    "ShareGPT": (
        [share("system", "S"), share("human", "a"), share("gpt", "b"), share("tool", "c")],
        [SYSTEM, turn("user", "a"), said("b"), turn("tool", "c")],
    ),
    "roles": (
        [turn("System", "S"), turn("Human", "a"), turn("model", "b"), share("GPT", "c")],
        [SYSTEM, turn("user", "a"), said("b"), said("c")],
    ),
    "ShareGPT's models": (
        [share(role, "b") for role in ("chatgpt", "bot", "bard", "model")],
        [said("b")] * 4,
    ),
    "ShareGPT's calls": (
        [
            share("function_call", '{"name": "f", "arguments": {"x": 1}}'),
            share("observation", "yes"),
            share("function_call", [dict(name="f", arguments="{}"), dict(name="g", arguments={})]),
            share("tool_response", "2"),
            share("ipython", "3"),
        ],
        [
            calling(dict(x=1)),
            turn("tool", "yes"),
            said("", tool_calls=[*calling({})["tool_calls"], *calling({}, "g")["tool_calls"]]),
            turn("tool", "2"),
            turn("tool", "3"),
        ],
    ),
    "results in another order": ([*BOTH, B_TOLD, A_TOLD], [*BOTH, A_TOLD, B_TOLD]),
}


@pytest.mark.parametrize("case", SAME)
def test_forms_of_a_conversation_have_the_same_ids(case):
    coder = encoder(READS_ALL)
    form, usual = ([ASKED, *messages, ASKED] for messages in SAME[case])
    for given in (form, json.dumps(form)):  # in a table, messages are text
        assert encoded(coder, prompt=given) == encoded(coder, prompt=usual)
    assert encoded(coder, messages=[*form, ANSWER]) == encoded(coder, messages=[*usual, ANSWER])


ROWS = [
    dict(messages=[ASKED, ANSWER]),
    dict(conversations=[share("human", "2+2?"), share("gpt", "4")]),
    dict(prompt=[ASKED], completion=[ANSWER]),
    dict(prompt=[ASKED], completion="4"),
    dict(prompt="2+2?", completion="4"),
    dict(question="2+2?", answer="4"),
    dict(prompt=[ASKED], chosen="4", rejected="5"),
    dict(chosen=[ASKED, ANSWER], rejected=[ASKED, said("5")]),
    dict(prompt=[ASKED]),
    dict(question="2+2?"),
]


@pytest.mark.parametrize("row", ROWS)
def test_system_text_and_template_variables_of_a_row_are_those_of_flags(row):
    """They win over the flags and change no other row."""
    flags = dict(template=READS_ALL, prompt_format="chat")
    coder = encoder(**flags)
    flagged = encoder(**flags, system_prompt="S", template_kwargs=("brief=true",))
    usual = encoded(coder, **row)
    for system in (dict(system="S"), dict(system_prompt="S")):
        for variables in (dict(brief=True), '{"brief": true, "tone": null}'):
            both = encoded(coder, **row, **system, chat_template_kwargs=variables)
            assert both == encoded(flagged, **row)
    text = coder.tokenizer.decode(both[0][0])
    assert text.startswith(f"Brief!\n<|turn|>system\nS{EOT}\n<|turn|>user\n")
    own = encoded(flagged, **row, system="T", chat_template_kwargs=dict(brief=False))
    assert own == encoded(encoder(**flags, system_prompt="T"), **row)
    assert usual == encoded(coder, **row, system=None, chat_template_kwargs=dict(tone=None))


@pytest.mark.parametrize("row", ROWS)
def test_messages_may_be_json_text(row):
    """As in tables of texts. Other JSON is text."""
    texts = {k: json.dumps(v, indent=1) if isinstance(v, list) else v for k, v in row.items()}
    coder = encoder(prompt_format="chat")
    assert encoded(coder, **texts) == encoded(coder, **row)
    for other in ('[{"role": "user"}]', "[{", "[3]"):
        (sample,) = samples(coder, prompt="2+2?", completion=other)
        assert spans(coder, sample) == [other + EOT]


def test_system_text_of_a_row_may_repeat_its_system_turn():
    row = dict(messages=[SYSTEM, ASKED, ANSWER])
    for coder in (encoder(), encoder(system_prompt="flag")):
        for system in ("S", None):
            assert encoded(coder, **row, system=system) == encoded(encoder(), **row)


def test_tools_reach_the_prompt():
    coder = encoder(READS_ALL)
    text = prompt(coder, ASKED, tools=[TOOL])
    assert text.startswith("<|turn|>tools\n" + json.dumps([TOOL]) + EOT)
    assert prompt(coder, ASKED, tools=json.dumps([TOOL])) == text
    assert prompt(coder, ASKED, tools="[]") == prompt(coder, ASKED)


def test_calls_are_written_with_their_keys_in_their_order():
    function = dict(strict=True, arguments=dict(z=1, a=dict(y=2, b=3)), name="f")
    call = dict(index=0, function=function, id="x", type="function")
    coder = encoder(chat("{{ m.content + (m.tool_calls or '') | tojson }}"))
    (sample,) = samples(coder, messages=[ASKED, said("", tool_calls=[call])])
    assert spans(coder, sample) == [json.dumps([call]) + EOT]


def test_keys_that_nothing_reads_are_said_once(capsys):
    coder = encoder(READS_ALL.replace("m.content", "(m.mood or '') + m.content"))
    part = dict(type="text", text="a", cache_control="x")
    messages = [
        turn("user", [part], mood="!", name="Ann", date=None),
        said("", tool_calls=[dict(CALL, index=0, secret=1, date=None)], reasoning_content="R"),
        turn("tool", "2", name="add", tool_call_id=CALL["id"], cost=1),
        said("4", lang="en", train=True, weight=1),
        share("human", "a"),
    ]
    for new, row in (
        # the name of a tool is in its call
        (("cost", "lang", "secret"), dict(messages=messages[1:])),
        (("cache_control", "name"), dict(prompt=messages)),
        ((), dict(messages=messages)),
    ):
        samples(coder, **row)
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"not used: the key {key} of messages" for key in new]


def test_roles_that_nothing_knows_are_said_once(capsys):
    """A template may know further roles. A result has the role that the template knows."""
    narrators = [turn("narrator", "x"), ASKED, turn("Narrator", "y")]
    for names, results, unknown, shown in (
        ("", "observation", ["Narrator", "narrator", "observation"], "observation"),
        ("narrator", "observation", ["Narrator", "observation"], "observation"),
        ("tool", "observation", ["Narrator", "narrator"], "tool"),
        ("tool ipython", "ipython", ["Narrator", "narrator"], "tool"),
        ("ipython", "ipython", ["Narrator", "narrator"], "ipython"),
    ):
        template = READS_ALL + "".join(f"{{{{ '' if '{name}' }}}}" for name in names.split())
        text = prompt(encoder(template), *narrators, calling({}), turn(results, "2"))
        assert "<|turn|>narrator\nx" in text and f"<|turn|>{shown}\n2" in text
        note = "rows.jsonl:3: the role {} of messages is unknown; its turns are context"
        assert capsys.readouterr().out.splitlines() == [note.format(role) for role in unknown]


# ---- refused rows ----

UPPER = chat("{{ m.content | upper }}")
MARKED = chat("{{ m.content }}{{ '!' if m.role != 'user' and not loop.last }}")
COUNTED = "{{ messages | length }}" + chat()
REFUSES = chat("{{ raise_exception('no system') if m.role == 'system' }}{{ m.content }}")
SILENT = chat().replace("in messages", "in messages if m.role in ('user', 'assistant')")
NAMED = "tools must list JSON schemas of functions, each with a name"
LEFT_OUT = "the chat template leaves it out; change the role"
# A malformed message behind another one.
MALFORMED = [
    (turn("user", [dict(type="video", video="x")]), "content.0: Input tag 'video' found"),
    (turn("user", ["x"]), "content.0: Input should be a valid dictionary"),
    (turn("user", [dict(type="text")]), "content.0.text.text: Field required"),
    (dict(role="user"), "content: Field required"),
    (turn("tool", dict(a=1)), "content: Input should be a valid string"),
    (turn("user", "x", tool_calls=[CALL]), "tool_calls stand in an assistant's message only"),
    (said("x", tool_calls=[dict(function=dict(name="f"))]), "function.arguments: Field required"),
    (said("x", tool_calls="add"), "tool_calls: Input should be a valid list"),
    (said("x", tool_calls=["add"]), "tool_calls.0: Input should be a valid dictionary"),
    (calling({}, 1), "tool_calls.0.function.name: Input should be a valid string"),
    (calling([]), "function.arguments: Input should be a valid dictionary"),
    (calling("{"), "function.arguments: the arguments are not JSON: Expecting property name"),
    (calling("[" * 100_000), "function.arguments: the arguments are not JSON: maximum recursion"),
    (said("4", thinking=dict(text="R")), "reasoning_content: Input should be"),
    (said("<think>R</think>4", thinking="R"), "it has its thought twice"),
    (said("4", function_call=dict(name="f")), "it has a function_call, an old form; give tool_"),
    (share("function_call", "f(1)"), "the arguments are not JSON"),
    (share("function_call", '{"arguments": {}}'), "tool_calls.0.function.name: Field required"),
    (share(["human"], "x"), "role: Input should be a valid string"),
    (turn("tool", "x", tool_call_id=["a"]), "tool_call_id.str: Input should be a valid string"),
    (said("4", weight=0.5), "weight: Input should be a valid boolean"),
]
# Rows, the reason, and the template if it is not `READS_ALL`.
REFUSED = [
    *(
        (dict(messages=[ASKED, message]), f"column messages: turn 2: .*{words}")
        for message, words in MALFORMED
    ),
    *(
        (dict(messages=[message]), "column messages contains a lone surrogate")
        for message in (
            calling(dict(x="\ud800")),
            calling({}, "\ud800"),
            said("4", reasoning_content="\ud800"),
        )
    ),
    # results of calls
    (dict(messages=[*BOTH, A_TOLD, ASKED]), "turn 2: results of the calls call_a for"),
    (dict(prompt=[*BOTH, A_TOLD, A_TOLD]), "results of the calls call_a, call_a for"),
    (dict(prompt=[said("", tool_calls=[A, A]), A_TOLD, A_TOLD]), "for the calls call_a, call_a;"),
    (dict(prompt=[*BOTH, A_TOLD, dict(B_TOLD, tool_call_id=2)]), "calls call_a, 2 for the calls"),
    (dict(prompt=[*BOTH, TOLD]), "turn 2: results of the calls None for the calls call_a, call_b"),
    # tools
    (dict(prompt=[ASKED], tools="add"), "column tools is not JSON"),
    (dict(prompt=[ASKED], tools="[" * 100_000), f"column {NAMED}"),
    *(
        (dict(prompt=[ASKED], tools=tools), f"column {NAMED}")
        for tools in (["add"], TOOL, '{"name": "add"}', [dict(name=1)], [dict(function="f")], 3)
    ),
    # columns that are flags
    (dict(prompt=[SYSTEM, ASKED], system="T"), "it has a system text, its messages begin"),
    (dict(prompt=[ASKED], system=3), "column system is int"),
    (
        dict(prompt=[ASKED], system="S", system_prompt="T"),
        "columns system and system_prompt differ",
    ),
    *(
        (dict(prompt="x") | columns, "column .* needs chat format, column prompt is plain text")
        for columns in (dict(tools=[TOOL]), dict(system="S"), dict(chat_template_kwargs=dict(x=1)))
    ),
    *(
        (dict(prompt=prompt, chat_template_kwargs=variables), f"column chat_template_k.* {words}")
        for prompt, variables, words in (
            ([ASKED], dict(breif=True), "breif: the chat template does not read it; lea"),
            ([ASKED], dict(messages=[]), "messages: the rows set it; leave it out"),
            ([ASKED], "brief", "is no object"),
        )
    ),
    # rows without a meaning (tests/test_bad_input.py has more)
    (dict(prompt="a", completion=[ANSWER]), "column completion lists messages, column prompt is"),
    (dict(prompt=[ASKED], chosen=" ", rejected="3"), "column chosen is empty"),
    (dict(chosen=BEGUN, rejected=OTHER), "chosen and rejected do not begin with the same prompt"),
    # another prompt in an answer
    (dict(prompt=[ASKED], completion=OTHER), "column completion begins with a question, but not"),
    (dict(prompt="a", chosen=BEGUN, rejected=BEGUN), "rejected do not begin with column prompt"),
    # a turn that is continued
    (dict(prompt=BEGUN, completion=[said("4", thinking="R")]), "turn 3: only text can continue a"),
    (dict(prompt=BEGUN, completion=[ANSWER, *OTHER]), "turn 3: no further turn may follow one"),
    # turns that the template does not show as they are sampled
    (dict(messages=[ASKED, said("b")]), r"turn 2 \(assistant\): .* changes its text", UPPER),
    (
        dict(messages=[ASKED, said("b")]),
        "turn 2 .*: the chat template does not go on from its prompt",
        COUNTED,
    ),
    (
        dict(prompt=[ASKED], chosen=[ANSWER, *OTHER], rejected="5"),
        "column chosen: the chat template rewrites its earlier turns",
        MARKED,
    ),
    (dict(messages=[said("b")]), r"turn 1 \(assistant\): nothing asks for it"),
    (dict(messages=[ASKED, turn("narrator", "b")]), "no message with the role assistant to"),
]


@pytest.mark.parametrize("case", REFUSED)
def test_row_is_refused(case):
    row, words, *template = case
    refused(encoder(*template or [READS_ALL]), words, **row)


# Prompts that the template refuses or does not show, with other columns.
NOT_SHOWN = [
    (REFUSES, [SYSTEM, ASKED], {}, "the chat template refuses the messages: no system"),
    (SILENT, [SYSTEM, ASKED], {}, rf"turn 1 \(system\): {LEFT_OUT}"),
    (SILENT, [turn("narrator", "a"), ASKED], {}, rf"turn 1 \(narrator\): {LEFT_OUT}"),
    (SILENT, [ASKED, ANSWER, TOLD], {}, rf"turn 3 \(tool\): {LEFT_OUT}"),
    (None, [ASKED], dict(tools=[TOOL]), "column tools: the chat template does not read it"),
    (None, [*CALLS[:2], ASKED], {}, r"turn 2 \(assistant\): .* omits the tool call of add"),
]


@pytest.mark.parametrize(("template", "asked", "columns", "words"), NOT_SHOWN)
def test_prompt_is_refused_alike_in_training_and_in_sampling(template, asked, columns, words):
    coder = encoder(template)
    for row in (
        dict(prompt=asked),
        dict(messages=[*asked, ANSWER]),
        dict(prompt=asked, completion=[ANSWER]),
        dict(prompt=asked, chosen=[ANSWER], rejected="5"),
    ):
        refused(coder, words, **row, **columns)


def test_messages_need_a_chat_template():
    coder = encoder(prompt_format="plain")
    refused(coder, "column messages needs a chat template, not plain", messages=BEGUN)
    refused(coder, "column prompt lists messages, which need a chat template", prompt=[ASKED])
    words = "column completion lists messages, column prompt is text"
    refused(coder, words, prompt=ASKED["content"], completion=BEGUN)


# ---- --chat_template, --template_kwargs ----


def test_template_from_a_file_is_used_and_saved(tmp_path):
    (tmp_path / "chat.jinja").write_text(READS_ALL + "\n")
    tokenizer = load_tokenizer(tiny_model(), BaseArgs(chat_template=str(tmp_path / "chat.jinja")))
    text = prompt(Encoder(tokenizer, BaseArgs()), ASKED, tools=[TOOL])
    assert text.startswith("<|turn|>tools") and text.endswith("<|turn|>assistant\n")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text().strip() == READS_ALL


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (b"{% for %}", r"refuses the messages: Expected an expression.* \(line 1\)"),
        (b"{{ 1 / 0 }}", "refuses the messages: division by zero"),
        (b"{{ 'a' * 10 ** 15 }}", "refuses the messages: out of memory"),
        (b"hello", "the template changes the text of an assistant turn"),
        (b"{{ raise_exception('no') }}", "refuses the messages: no"),
        (b"\xff", "'utf-8' codec can't decode"),
        (None, "No such file or directory"),
    ],
)
def test_template_that_fails_to_render_is_refused(template, words, tmp_path):
    if template is not None:
        (tmp_path / "chat.jinja").write_bytes(template)
    with pytest.raises(ValueError, match=f"^--chat_template .*chat.jinja: .*{words}"):
        load_tokenizer(tiny_model(), BaseArgs(chat_template=str(tmp_path / "chat.jinja")))


@pytest.mark.parametrize("condition", [
    "true", "messages[0].role == 'developer'", "messages|length == 3", "messages[-1].tool_calls",
    "add_generation_prompt",
])  # fmt: skip
def test_template_without_an_end_is_refused(condition, monkeypatch):
    """All probes of a template have one time limit; one that is late is no refusal."""
    monkeypatch.setattr("common.text.chat.RENDER_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="chat template is not rendered: no end within 0.2 s; set"):
        encoder(f"{{% if {condition} %}}{loops}{{% endif %}}{chat('{{ m.content }}')}")


class SlowToEnd:
    def __del__(self):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass


def in_c():
    return (bytes(1 << 26) + b"\xff").decode("ascii")


def with_finalizer():
    SlowToEnd()
    while True:
        pass


def swallows():
    while True:
        try:
            while True:
                pass
        except BaseException:
            return 3


@pytest.mark.parametrize("call", [in_c, with_finalizer, swallows, lambda: bytes(1 << 28).count(1)])
def test_a_late_call_is_a_time_out_whatever_it_does(call, capfd):
    """A signal arrives between two operations of the interpreter: behind a long one, anywhere."""
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match="^no end within 0.001 s$"):
        within(0.001, call)
    assert within(9.0, abs, -3) == 3
    with pytest.raises(ZeroDivisionError):
        within(9.0, lambda: 1 / 0)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert capfd.readouterr().err == ""


def test_template_kwargs_are_values_or_text():
    for value, start in (("true", "Brief"), ("false", "<"), ("null", "<"), ("a: b", "Brief")):
        coder = encoder(READS_ALL, template_kwargs=(f"brief={value}",))
        assert prompt(coder, ASKED).startswith(start)


def test_templates_may_use_extensions_of_transformers():
    template = chat("{% generation %}{{ m.content }}{%- endgeneration %}")
    template += "{% for m in messages %}{% break %}{% endfor %}{% if brief %}!{% endif %}"
    coder = encoder(template, template_kwargs=("brief=false",))
    (sample,) = samples(coder, messages=[ASKED, ANSWER])
    assert spans(coder, sample) == ["4" + EOT]


@pytest.mark.parametrize(
    ("template", "flags", "words"),
    [
        (READS_ALL, dict(template_kwargs=("breif=1",)), "--template_kwargs breif: the chat"),
        (READS_ALL, dict(template_kwargs=("messages=x",)), "--template_kwargs messages: .*"),
        (None, dict(template_kwargs=("brief=1",)), "--template_kwargs: the tokenizer has no chat"),
        (None, dict(prompt_format="chat"), "--prompt_format chat: the tokenizer has no chat"),
        (None, dict(system_prompt="S"), "--system_prompt: the tokenizer has no chat template"),
    ],
)
def test_flags_without_effect_are_refused(template, flags, words):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"^{words}"):
        Encoder(tokenizer, BaseArgs(**flags))
