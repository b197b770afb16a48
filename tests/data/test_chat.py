"""Messages are parsed, errors name their position, and the chat template is rendered as the flags
specify."""

import json

import pytest

from common.config.groups import BaseArgs
from common.data.chat import end_of_turn
from common.data.encode import Encoder
from common.data.messages import messages_field, tools_field
from common.data.pairs import encode_pair
from common.model.hub import load_tokenizer
from common.model.tiny import build_tokenizer, tiny_model

TOKENIZER = build_tokenizer()
EOT = "<|end_of_turn|>"
SOURCE = dict(_source="rows.jsonl:3")
CALL = dict(type="function", function=dict(name="add", arguments=dict(a=1)))
# the tiny template with tools, tool calls and a switch
WITH_TOOLS = (
    "{% if tools %}{{ '<|turn|>tools\n' + tools | tojson + '<|end_of_turn|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}"
    "{% endfor %}"
    "{{ '<|end_of_turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% if brief %}{{ '!' }}{% endif %}"
    "{% endif %}"
)


def turn(role: str, content: object, **more) -> dict:
    return dict(role=role, content=content, **more)


def tokenizer_with(template: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoder(tokenizer=TOKENIZER, **flags) -> Encoder:
    return Encoder(tokenizer, BaseArgs(**flags))


def trained(encoder: Encoder, row: dict, columns: tuple[str, ...] = ("messages",)) -> list[str]:
    """Return the trained spans."""
    sample = encoder.sft(row | SOURCE, columns)
    text = "".join(
        encoder.tokenizer.decode([i]) if mask else "\0"
        for i, mask in zip(sample.ids, sample.loss_mask, strict=True)
    )
    return [stretch for stretch in text.split("\0") if stretch]


# ---- messages ----


def test_text_parts_are_concatenated():
    parts = [dict(type="text", text="a"), dict(type="text", text="b")]
    row = dict(prompt=[turn("user", parts)], **SOURCE)
    assert encoder().prompt(row, ("prompt",)) == encoder().prompt(
        dict(prompt=[turn("user", "ab")], **SOURCE), ("prompt",)
    )


def test_null_fields_are_dropped_and_arguments_become_objects():
    """Every message of a table has every column."""
    call = dict(CALL, id=None, function=dict(name="add", arguments='{"a": 1}'))
    row = dict(
        messages=[turn("user", "hi", tool_calls=None), turn("assistant", None, tool_calls=[call])],
        **SOURCE,
    )
    assert messages_field(row, "messages") == [
        turn("user", "hi"),
        turn("assistant", "", tool_calls=[dict(call, function=CALL["function"])]),
    ]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (turn("user", [dict(type="video", video="x")]), "content.0: Input tag 'video' found"),
        (turn("user", ["x"]), "content.0: Input should be a valid dictionary"),
        (turn("user", [dict(type="text")]), "content.0.text.text: Field required"),
        (turn("assistant", None), "content: Field required"),
        (turn("tool", dict(a=1)), "content: Input should be a valid string"),
        (turn("user", "x", tool_calls=[CALL]), "tool_calls stand in an assistant's message only"),
        (turn("assistant", "x", tool_calls="add"), "tool_calls: Input should be a valid list"),
        (turn("assistant", "x", tool_calls=["add"]), "tool_calls.0: Input should be"),
        (turn("assistant", "x", tool_calls=[dict(function=dict(name=1))]), "function.name: Input"),
        (
            turn("assistant", "x", tool_calls=[dict(function=dict(name="f"))]),
            "tool_calls.0.function.arguments: Field required",
        ),
        (
            turn("assistant", "x", tool_calls=[dict(function=dict(name="f", arguments="{"))]),
            "function.arguments: Expecting property name",
        ),
        (
            turn("assistant", "x", tool_calls=[dict(function=dict(name="\ud800", arguments={}))]),
            "a lone surrogate",
        ),
        (turn("assistant", "4", reasoning_content=["R"]), "reasoning_content: Input should be"),
        (turn("assistant", "4", thinking=dict(text="R")), "reasoning_content: Input should be"),
        (turn("assistant", "<think>R</think>4", thinking="R"), "it has its thought twice"),
        (turn("assistant", "4", function_call=dict(name="add")), "it has a function_call, an old"),
        (turn("assistant", "4", reasoning_content="\ud800"), "a lone surrogate"),
    ],
)
def test_malformed_messages_are_refused_by_position(message, words):
    with pytest.raises(ValueError, match=f"rows.jsonl:3: column messages.*{words}"):
        messages_field(dict(messages=[message], **SOURCE), "messages")


# ---- tools ----

TOOL = dict(type="function", function=dict(name="add", parameters=dict(type="object")))
CALLING = [
    turn("user", "1+1"),
    turn("assistant", None, tool_calls=[CALL]),
    turn("tool", "2"),
    turn("assistant", "It is 2"),
]


def test_tool_calls_are_trained_and_tool_results_are_not():
    coder = encoder(tokenizer_with(WITH_TOOLS))
    call = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    for tools in ([TOOL], json.dumps([TOOL])):
        row = dict(messages=CALLING, tools=tools)
        assert trained(coder, row) == [call + EOT, "It is 2" + EOT]
        text = TOKENIZER.decode(coder.sft(row | SOURCE, ("messages",)).ids)
        assert text.startswith("<|turn|>tools\n" + json.dumps([TOOL]) + EOT)
    row = dict(
        prompt=CALLING[:1],
        tools=[TOOL],
        chosen=CALLING[1:2],
        rejected=[turn("assistant", "2")],
        **SOURCE,
    )
    chosen, rejected = encode_pair(coder, row, ("prompt", "chosen", "rejected"))
    assert TOKENIZER.decode(chosen.completion_ids) == call + EOT
    assert (
        chosen.ids[: chosen.prompt_length]
        == coder.prompt(row, ("prompt",))
        == rejected.ids[: rejected.prompt_length]
    )
    assert "tools" in TOKENIZER.decode(coder.prompt(row, ("prompt",)))


def test_special_tokens_around_a_call_do_not_end_the_turn():
    """Qwen's <tool_call> is an added token."""
    tokenizer = tokenizer_with(WITH_TOOLS)
    tokenizer.add_tokens(["<call>", "</call>"])
    assert trained(encoder(tokenizer), dict(messages=CALLING))[0].endswith("</call>" + EOT)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("add", "column tools is not JSON"),
        (["add"], "column tools must list JSON schemas of functions, each with a name"),
        (TOOL, "column tools must list JSON schemas"),
        ('{"name": "add"}', "column tools must list JSON schemas"),
        ([dict(type="function", function="add")], "column tools must list JSON schemas"),
        ([dict(name=1)], "column tools must list JSON schemas"),
        (3, "column tools must list JSON schemas"),
    ],
)
def test_malformed_tools_are_refused_by_position(tools, words):
    with pytest.raises(ValueError, match=f"rows.jsonl:3: {words}"):
        tools_field(dict(tools=tools, **SOURCE))


def test_tools_that_the_template_omits_are_refused():
    row = dict(messages=CALLING, prompt="x", **SOURCE)
    with pytest.raises(
        ValueError,
        match=r"rows.jsonl:3: turn 2 \(assistant\): the chat template omits the tool call of add",
    ):
        encoder().sft(row, ("messages",))
    with pytest.raises(
        ValueError, match="rows.jsonl:3: column tools: the chat template does not read it"
    ):
        encoder().sft(row | dict(tools=[TOOL]), ("messages",))
    with pytest.raises(
        ValueError,
        match="rows.jsonl:3: column tools needs chat format, column prompt is plain text",
    ):
        encoder().prompt(row | dict(tools=[TOOL]), ("prompt",))


# ---- --chat_template, --template_kwargs ----


def test_template_from_a_file_is_used_and_saved(tmp_path):
    (tmp_path / "chat.jinja").write_text(WITH_TOOLS + "\n")
    tokenizer = load_tokenizer(tiny_model(), BaseArgs(chat_template=str(tmp_path / "chat.jinja")))
    text = tokenizer.decode(
        encoder(tokenizer).prompt(dict(question="x", tools=[TOOL], **SOURCE), ("question",))
    )
    assert text.startswith("<|turn|>tools") and text.endswith("<|turn|>assistant\n")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "chat_template.jinja").read_text().strip() == WITH_TOOLS.strip()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "No such file or directory"),
        (b"\xff", "not UTF-8: .* can't decode byte"),
        (b"{% for %}", r"does not render: Expected an expression.* \(line 1\)"),
        (b"{{ 1 / 0 }}", "does not render: division by zero"),
        (b"{{ messages[0].content + 1 }}", "does not render: can only concatenate str"),
        (b"{{ raise_exception('no') }}", "does not render: no"),
        (b"hello", "the template changes the text of an assistant turn"),
    ],
)
def test_template_that_fails_to_render_is_refused(template, words, tmp_path):
    if template is not None:
        (tmp_path / "chat.jinja").write_bytes(template)
    with pytest.raises(ValueError, match=f"^--chat_template .*chat.jinja: .*{words}"):
        load_tokenizer(tiny_model(), BaseArgs(chat_template=str(tmp_path / "chat.jinja")))


@pytest.mark.parametrize(
    ("value", "ends"), [("true", "\n!"), ("false", "\n"), ("null", "\n"), ("a: b", "\n!")]
)
def test_template_kwargs_reach_the_template(value, ends):
    coder = encoder(tokenizer_with(WITH_TOOLS), template_kwargs=(f"brief={value}",))
    assert TOKENIZER.decode(coder.prompt(dict(question="x", **SOURCE), ("question",))).endswith(
        "assistant" + ends
    )


@pytest.mark.parametrize(
    ("kwarg", "words"),
    [
        ("breif=true", "--template_kwargs breif: the chat template does not read it"),
        ("messages=x", "--template_kwargs messages: the data determines it"),
    ],
)
def test_unused_template_variables_are_refused(kwarg, words):
    with pytest.raises(ValueError, match=words):
        encoder(tokenizer_with(WITH_TOOLS), template_kwargs=(kwarg,))


def test_templates_may_use_extensions_of_transformers():
    template = WITH_TOOLS.replace(
        "{{ '<|end_of_turn|>\n' }}", "{% generation %}{{ '<|end_of_turn|>\n' }}{%- endgeneration %}"
    )
    template += "{% for m in messages %}{% break %}{% endfor %}"
    coder = encoder(tokenizer_with(template), template_kwargs=("brief=false",))
    assert trained(coder, dict(messages=[CALLING[0], CALLING[-1]])) == ["It is 2" + EOT]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            dict(template_kwargs=("brief=1",)),
            "--template_kwargs: the tokenizer has no chat template",
        ),
        (dict(prompt_format="chat"), "--prompt_format chat: the tokenizer has no chat template"),
    ],
)
def test_tokenizer_without_a_template_is_refused_for_chats(flags, words):
    with pytest.raises(ValueError, match=words):
        encoder(tokenizer_with(None), **flags)


# ---- start and end of turns ----


def test_text_that_a_template_adds_or_strips_is_not_trained():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content | trim + '<|end_of_turn|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )
    row = dict(
        messages=[
            turn("user", "a"),
            turn("assistant", " b\n"),
            turn("user", "c"),
            turn("assistant", "d "),
        ]
    )
    sample = encoder(tokenizer).sft(row | SOURCE, ("messages",))
    trained = [i for i, mask in zip(sample.ids, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "b" + EOT + "<think>\n\n</think>\n\nd" + EOT


def test_template_that_rewrites_turns_is_refused_by_row():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TOKENIZER.chat_template.replace(
        "message['content']", "message['content'] | upper"
    )
    with pytest.raises(
        ValueError, match=r"rows.jsonl:3: turn 2 \(assistant\): the chat template changes its text"
    ):
        encoder(tokenizer).sft(
            dict(messages=[turn("user", "a"), turn("assistant", "b")], **SOURCE), ("messages",)
        )


@pytest.mark.parametrize("special", [True, False])
def test_end_of_turn_in_added_tokens_only_is_trained(special):
    """Gemma 3 lists <end_of_turn> only among its added tokens; many ChatML models do not mark
    theirs as special."""
    from tokenizers import AddedToken

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=special, normalized=False)])
    tokenizer.chat_template = TOKENIZER.chat_template.replace(EOT, "<|im_end|>")
    sample = encoder(tokenizer).sft(
        dict(messages=[turn("user", "a"), turn("assistant", "b")], **SOURCE), ("messages",)
    )
    trained = [i for i, mask in zip(sample.ids, sample.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == "b<|im_end|>"


def test_end_of_turn_token_is_found():
    assert TOKENIZER.decode([end_of_turn(TOKENIZER)]) == EOT
    assert (
        end_of_turn(tokenizer_with("{% for m in messages %}{{ m.content }}\n{% endfor %}")) is None
    )
    assert end_of_turn(tokenizer_with("<|turn|>")) is None


WITHOUT_THINKING = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|end_of_turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.mark.parametrize("earlier", ["b", "<b>", "assistant", "<think>"])
def test_turn_that_is_not_shown_as_sampled_is_context(earlier):
    """Qwen3 without thinking: the prompt ends with an empty thinking block, which the template
    keeps only for the last turn. Training the earlier turn would train it after another prompt."""
    coder = encoder(tokenizer_with(WITHOUT_THINKING))
    row = dict(
        messages=[
            turn("user", "a"),
            turn("assistant", earlier),
            turn("user", "c"),
            turn("assistant", "d"),
        ]
    )
    assert trained(coder, row) == ["d" + EOT]
    assert coder.sft(row | SOURCE, ("messages",)).context_turns == 1
    pair = dict(prompt=row["messages"][:1], completion=row["messages"][1:], **SOURCE)
    with pytest.raises(
        ValueError, match="rows.jsonl:3: column completion: the chat template shows an earlier turn"
    ):
        coder.completion(pair, "prompt", "completion")


def test_last_turn_after_another_prompt_is_refused():
    tokenizer = tokenizer_with("{{ messages | length }}" + TOKENIZER.chat_template)
    with pytest.raises(
        ValueError, match=r"turn 2 \(assistant\): .* prompt goes on with '1<.*', the turn with '2<"
    ):
        trained(encoder(tokenizer), dict(messages=[turn("user", "a"), turn("assistant", "b")]))


def test_earlier_turns_are_tokenised_as_sampled():
    """A turn begins with a token of its own; in the whole text, two line breaks would become one
    token here."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    messages, coder = (
        [turn("user", "a"), turn("assistant", "\nb"), turn("user", "c")],
        encoder(tokenizer),
    )
    prompt = coder.prompt(dict(prompt=messages, **SOURCE), ("prompt",))
    whole = coder.sft(dict(messages=[*messages, turn("assistant", "d")], **SOURCE), ("messages",))
    assert (
        whole.ids[: len(prompt)] == prompt and tokenizer.convert_tokens_to_ids("\n\n") not in prompt
    )
    last = coder.sft(dict(prompt=messages, completion="d", **SOURCE), ("prompt", "completion"))
    assert last.ids == whole.ids and last.prompt_length == len(prompt)


def test_template_may_change_turns_of_a_prompt():
    """Prompt turns are not trained, and templates drop their thinking blocks."""
    upper = tokenizer_with(
        TOKENIZER.chat_template.replace("message['content']", "message['content'] | upper")
    )
    prompt = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    assert "\nB" + EOT in TOKENIZER.decode(
        encoder(upper).prompt(dict(prompt=prompt, **SOURCE), ("prompt",))
    )
