"""The model's turns are trained as they are sampled, or the row is refused.

The templates here have the structure of real ones."""

import pytest

from common.config.groups import BaseArgs
from common.data.chat import end_of_turn
from common.data.encode import Encoder
from common.data.pairs import encode_pair
from common.model.tiny import build_tokenizer

EOT, EOS = "<|end_of_turn|>", "<|eos|>"
SOURCE = dict(_source="rows.jsonl:3")
HEAD = "{{ '<|turn|>' + m.role + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"


def loop(*turn: str) -> str:
    return "{% for m in messages %}" + "".join(turn) + "{% endfor %}"


# Like Qwen3: the thought of the last turn precedes its answer.
THINKING = (
    loop(
        HEAD,
        "{% set thought = m.reasoning_content or '' %}{% set answer = m.content %}",
        "{% if '</think>' in answer %}"
        "{% set thought = answer.split('</think>')[0].split('<think>')[-1] | trim %}",
        "{% set answer = answer.split('</think>')[-1].lstrip('\n') %}{% endif %}",
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + thought + '\n"
        "</think>\n\n' }}{% endif %}",
        "{{ answer + '<|end_of_turn|>\n' }}",
    )
    + PROMPT
)
# Like R1: the prompt opens a thought, which the turns lack.
OPENING = (
    loop(HEAD, "{{ m.content.split('</think>')[-1] + '<|end_of_turn|>\n' }}")
    + "{% if add_generation_prompt %}{{ '<|turn|>assistant\n<think>\n' }}{% endif %}"
)
# Like GLM-4: the token of the next role ends a turn.
OPEN_ENDED = (
    loop("{{ '<|' + m.role + '|>\n' + m.content }}")
    + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Like Cohere: two tokens end a turn.
TWO_ENDS = loop(HEAD, "{{ m.content + '<end>' + '<|end_of_turn|>\n' }}") + PROMPT
# Like gpt-oss: only the last turn ends with the token that the model samples.
RETURN = (
    loop(
        HEAD,
        "{{ m.content + ('<return>' if loop.last and m.role == 'assistant' else "
        "'<|end_of_turn|>\n') }}",
    )
    + PROMPT
)
# Like Phi-3: EOS follows a conversation.
WITH_EOS = (
    loop(HEAD, "{{ m.content + '<|end_of_turn|>\n' }}")
    + PROMPT[: -len("{% endif %}")]
    + "{% else %}<|eos|>{% endif %}"
)
# Like SmolVLM: content is a list of parts.
PARTS = (
    loop(HEAD, "{% for part in m.content %}{{ part.text }}{% endfor %}{{ '<|end_of_turn|>\n' }}")
    + PROMPT
)
# Like Gemma 4: the result of a tool follows in the same turn of the model.
RESULT_IN_TURN = (
    loop(
        "{% if m.role == 'tool' %}{{ m.content + '<result>' }}{% else %}",
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}",
        HEAD,
        "{% endif %}{{ m.content }}",
        "{% for c in m.tool_calls or [] %}",
        "{{ '<call>' + c.function.name + '</call><result>' }}{% endfor %}",
        "{% if not m.tool_calls %}{{ '<|end_of_turn|>\n' }}{% endif %}{% endif %}",
    )
    + "{% if add_generation_prompt and messages[-1].role != 'tool' %}"
    + "{{ '<|turn|>assistant\n' }}{% endif %}"
)
NO_TOKENS = (
    loop("{{ m.role + ': ' + m.content + '\n' }}")
    + "{% if add_generation_prompt %}assistant: {% endif %}"
)


def turn(role: str, content: str, **more) -> dict:
    return dict(role=role, content=content, **more)


ASKED = turn("user", "Why hi, what is in it?")


def encoder(template: str | None = None, tokens: tuple[str, ...] = (), **flags) -> Encoder:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([*tokens])
    tokenizer.chat_template = template or tokenizer.chat_template
    return Encoder(tokenizer, BaseArgs(**flags))


def trained(coder: Encoder, *messages: dict) -> list[str]:
    """Return the trained spans. The prompt of the last one must be that of sampling."""
    sample = coder.sft(dict(messages=[*messages], **SOURCE), ("messages",))
    spans: list[list[int]] = []
    starts = []
    for i, (token, mask) in enumerate(zip(sample.ids, sample.loss_mask, strict=True)):
        if mask and not (i and sample.loss_mask[i - 1]):
            spans.append([])
            starts.append(i)
        if mask:
            spans[-1].append(token)
    assert (
        coder.prompt(dict(prompt=[*messages][:-1], **SOURCE), ("prompt",))
        == sample.ids[: starts[-1]]
    )
    return [coder.tokenizer.decode(span) for span in spans]


def prompt(coder: Encoder, *messages: dict) -> str:
    return coder.tokenizer.decode(coder.prompt(dict(prompt=[*messages], **SOURCE), ("prompt",)))


# ---- thoughts ----


@pytest.mark.parametrize("answer", ["4", "in", "hi", "k", "t", "think", "2+2 is 4", ""])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
def test_thought_and_answer_are_trained(answer, inline, tokens):
    """The answer stands in the thought, in the question and in the tags."""
    thought = "2+2 is 4, think of hi"
    last = turn("assistant", f"<think>\n{thought}\n</think>\n\n{answer}")
    if not inline:
        last = turn("assistant", answer, reasoning_content=thought)
    assert trained(encoder(THINKING, tokens), ASKED, last) == [
        f"<think>\n{thought}\n</think>\n\n{answer}{EOT}"
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thought_is_found_under_each_usual_name(key):
    last = turn("assistant", "4", **{key: "2+2"})
    assert trained(encoder(THINKING), ASKED, last) == [f"<think>\n2+2\n</think>\n\n4{EOT}"]


def test_thought_without_a_place_in_the_template_precedes_the_answer():
    last = turn("assistant", "4", reasoning_content="2+2")
    assert trained(encoder(), ASKED, last) == [f"<think>\n2+2\n</think>\n\n4{EOT}"]


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (turn("assistant", "4"), "\n</think>\n\n4"),
        (turn("assistant", "4", reasoning_content="2+2"), "2+2\n</think>\n\n4"),
        (turn("assistant", "<think>\n2+2\n</think>\n\n4"), "2+2\n</think>\n\n4"),
        (turn("assistant", "2+2\n</think>\n\n4"), "2+2\n</think>\n\n4"),
    ],
)
def test_turn_continues_the_thought_that_its_prompt_opens(last, text):
    coder = encoder(OPENING)
    assert prompt(coder, ASKED).endswith("assistant\n<think>\n")
    assert trained(coder, ASKED, last) == [text + EOT]


def test_thought_of_an_earlier_turn_that_the_template_drops_makes_it_context():
    messages = [
        ASKED,
        turn("assistant", "1", reasoning_content="R1"),
        ASKED,
        turn("assistant", "2"),
    ]
    assert trained(encoder(THINKING), *messages) == [f"<think>\n\n</think>\n\n2{EOT}"]


# ---- ends of turns ----


@pytest.mark.parametrize(
    ("template", "tokens", "end", "earlier"),
    [
        (OPEN_ENDED, ("<|user|>", "<|assistant|>"), "<|user|>", "<|user|>"),
        (TWO_ENDS, ("<end>",), f"<end>{EOT}", f"<end>{EOT}"),
        (RETURN, ("<return>",), "<return>", None),
        (WITH_EOS, (), EOT, EOT),
        (NO_TOKENS, (), "\n" + EOS, None),
    ],
)
def test_turn_ends_with_the_token_that_the_model_samples_last(template, tokens, end, earlier):
    coder = encoder(template, tokens)
    begin = "\n" if template is OPEN_ENDED else ""
    first, last = turn("assistant", "A."), turn("assistant", "B.")
    both = [f"{begin}A.{earlier}"] if earlier else []
    assert trained(coder, ASKED, first, ASKED, last) == [*both, f"{begin}B.{end}"]
    assert coder.chat.end.token == end[-len(coder.chat.end.token) :]
    token = end_of_turn(coder.tokenizer)
    assert (None if token is None else coder.tokenizer.decode([token])) == (
        None if template is NO_TOKENS else coder.chat.end.token
    )


@pytest.mark.parametrize("end", [EOT, EOS, EOT + EOS])
def test_answer_with_its_own_end_has_one(end):
    assert trained(encoder(), ASKED, turn("assistant", "4" + end)) == ["4" + EOT]
    sample = encoder(prompt_format="plain").sft(
        dict(prompt="2+2=", completion="4" + EOS, **SOURCE), PLAIN
    )
    assert build_tokenizer().decode(sample.completion_ids) == "4" + EOS


PLAIN = ("prompt", "completion")


def test_text_with_its_own_bos_has_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(dict(bos_token="<s>"))
    bos = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[bos])
    coder = Encoder(tokenizer, BaseArgs(prompt_format="plain"))
    for text in ("2+2=", "<s>2+2="):
        assert tokenizer.decode(coder.prompt(dict(prompt=text, **SOURCE), ("prompt",))) == "<s>2+2="
        assert (
            tokenizer.decode(coder.sft(dict(text=text, **SOURCE), ("text",)).ids) == "<s>2+2=" + EOS
        )
        assert (
            tokenizer.decode(coder.sft(dict(prompt=text, completion="4", **SOURCE), PLAIN).ids)
            == "<s>2+2=4" + EOS
        )


def test_result_of_a_tool_in_the_turn_of_its_call_is_not_trained():
    call = dict(type="function", function=dict(name="add", arguments=dict(a=1)))
    messages = [
        ASKED,
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "2"),
        turn("assistant", "It is 2."),
    ]
    coder = encoder(RESULT_IN_TURN, ("<call>", "</call>", "<result>"))
    assert trained(coder, *messages) == ["<call>add</call><result>", "It is 2." + EOT]


CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}"
)
CALLING = (
    loop(HEAD, "{{ (m.reasoning_content or '') + m.content }}", CALLS, "{{ '<|end_of_turn|>\n' }}")
    + PROMPT
)


def test_calls_are_trained_to_their_end_and_no_further():
    """The arguments have the token that ends turns; two turns make the same call; EOS follows the
    conversation."""
    call = dict(type="function", function=dict(name="add", arguments=dict(a=f"add {EOT} add")))
    template = CALLING.replace("{% endif %}", "{% else %}<|eos|>{% endif %}")
    again = [turn("assistant", "", tool_calls=[call]), turn("tool", "add add")]
    coder = encoder(template, ("<call>", "</call>"))
    text = f'<call>{{"name": "add", "arguments": {{"a": "add {EOT} add"}}}}</call>{EOT}'
    assert trained(coder, ASKED, *again, *again, turn("assistant", "So.")) == [
        text,
        text,
        "So." + EOT,
    ]
    assert trained(coder, ASKED, *again, again[0]) == [text, text]


def test_thought_before_a_call_is_trained():
    call = dict(type="function", function=dict(name="add", arguments=dict(a=1)))
    messages = [
        ASKED,
        turn("assistant", "", reasoning_content="I add.", tool_calls=[call]),
        turn("tool", "2"),
    ]
    spans = trained(encoder(CALLING, ("<call>", "</call>")), *messages, turn("assistant", "2"))
    assert spans == [
        f'I add.<call>{{"name": "add", "arguments": {{"a": 1}}}}</call>{EOT}',
        "2" + EOT,
    ]


def test_thought_of_a_call_has_the_key_that_the_template_reads_there():
    """Like gpt-oss: `thinking`, but not beside content in a turn with calls; like Gemma 4: none in
    other turns."""
    both = (
        "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}"
        "{% endif %}"
    )
    thought = "{% if m.tool_calls %}{{ m.thinking or '' }}{% endif %}"
    coder = encoder(
        loop(HEAD, both, thought, "{{ m.content }}", CALLS, "{{ '<|end_of_turn|>\n' }}") + PROMPT,
        ("<call>", "</call>"),
    )
    call = dict(type="function", function=dict(name="add", arguments=dict(a=1)))
    calling = turn("assistant", "", reasoning_content="I add.", tool_calls=[call])
    spans = trained(
        coder, ASKED, calling, turn("tool", "2"), turn("assistant", "2", reasoning_content="So 2.")
    )
    assert spans == [
        f'I add.<call>{{"name": "add", "arguments": {{"a": 1}}}}</call>{EOT}',
        f"<think>\nSo 2.\n</think>\n\n2{EOT}",
    ]


# ---- messages that a template leaves out ----


@pytest.mark.parametrize("role", ["system", "human", "function"])
def test_message_that_the_template_leaves_out_is_refused(role):
    template = loop(
        "{% if m.role in ('user', 'assistant') %}",
        HEAD,
        "{{ m.content + '<|end_of_turn|>\n' }}{% endif %}",
    )
    coder = encoder(template + PROMPT)
    messages = [turn(role, "Be brief."), ASKED, turn("assistant", "4")]
    words = rf"rows.jsonl:3: turn 1 \({role}\): the chat template leaves it out"
    for encode in (
        lambda: coder.sft(dict(messages=messages, **SOURCE), ("messages",)),
        lambda: coder.prompt(dict(prompt=messages[:2], **SOURCE), ("prompt",)),
        lambda: coder.completion(
            dict(prompt=messages[:2], completion=messages[2:], **SOURCE), *PLAIN
        ),
    ):
        with pytest.raises(ValueError, match=words):
            encode()
    with pytest.raises(ValueError, match=r"turn 1 \(system\): the chat template leaves it out"):
        encoder(template + PROMPT, system_prompt="x").prompt(
            dict(question="2+2?", **SOURCE), ("question",)
        )


def test_developer_is_the_system_where_the_template_has_only_that():
    template = (
        loop(
            "{% if m.role != 'developer' %}",
            HEAD,
            "{{ m.content + '<|end_of_turn|>\n' }}{% endif %}",
        )
        + PROMPT
    )
    messages = [turn("developer", "Be brief."), ASKED]
    assert prompt(encoder(template), *messages).startswith("<|turn|>system\nBe brief.")
    assert prompt(encoder(), *messages).startswith("<|turn|>developer\nBe brief.")


def test_first_turn_of_the_model_has_no_prompt_and_is_context():
    messages = [turn("assistant", "Hello."), ASKED, turn("assistant", "4")]
    assert trained(encoder(), *messages) == ["4" + EOT]
    with pytest.raises(ValueError, match=r"rows.jsonl:3: turn 1 \(assistant\): it has no prompt"):
        trained(encoder(), messages[0])
    with pytest.raises(
        ValueError, match="rows.jsonl:3: no message with the role assistant to train on"
    ):
        trained(encoder(), ASKED, turn("model", "4"))


def test_empty_thought_hides_no_other_name():
    last = turn("assistant", "4", reasoning_content="", thinking="2+2")
    assert trained(encoder(THINKING), ASKED, last) == [f"<think>\n2+2\n</think>\n\n4{EOT}"]


def test_content_in_parts_reaches_templates_that_read_parts():
    assert trained(encoder(PARTS), turn("system", "Be brief."), ASKED, turn("assistant", "4")) == [
        "4" + EOT
    ]


@pytest.mark.parametrize("leak", ["{{ tools | tojson }}", "{{ messages[0].content }}"])
def test_turn_with_text_of_another_place_is_context(leak):
    """Some templates write the tools, or the system turn, into the first other turn, whatever its
    role."""
    first = "{% if loop.index0 == 1 and m.role == 'assistant' %}" + leak + "{% endif %}"
    coder = encoder(loop(HEAD, first, "{{ m.content + '<|end_of_turn|>\n' }}") + PROMPT)
    messages = [
        turn("system", "Be brief."),
        turn("assistant", "Hello."),
        ASKED,
        turn("assistant", "4"),
    ]
    row = dict(
        messages=messages, tools=[dict(type="function", function=dict(name="add"))], **SOURCE
    )
    if "tools" not in leak:
        del row["tools"]
    sample = coder.sft(row, ("messages",))
    assert (
        coder.tokenizer.decode([i for i, m in zip(sample.ids, sample.loss_mask, strict=True) if m])
        == "4" + EOT
    )
    assert sample.context_turns == 1


# ---- a turn that is continued ----


@pytest.mark.parametrize("template", [None, THINKING, OPENING, OPEN_ENDED])
def test_turn_at_the_end_of_a_prompt_is_continued(template):
    coder = encoder(template, ("<|user|>", "<|assistant|>") if template is OPEN_ENDED else ())
    begun = [ASKED, turn("assistant", "The answer is")]
    assert prompt(coder, *begun).endswith("The answer is")
    row = dict(
        prompt=begun, completion=" 4", chosen=[turn("assistant", " 4")], rejected=" 5", **SOURCE
    )
    sample = coder.sft(row, PLAIN)
    assert coder.prompt(row, ("prompt",)) == sample.ids[: sample.prompt_length]
    assert (
        coder.tokenizer.decode(coder.completion(row, *PLAIN).completion_ids)
        == " 4" + coder.chat.end.last
    )
    chosen, rejected = encode_pair(coder, row, ("prompt", "chosen", "rejected"))
    assert chosen.ids == coder.completion(row, *PLAIN).ids
    assert chosen.prompt_ids == rejected.prompt_ids == sample.prompt_ids
    thought = dict(row, completion=[turn("assistant", "4", reasoning_content="R")])
    with pytest.raises(
        ValueError, match="rows.jsonl:3: turn 3: only text can continue a turn of the model"
    ):
        coder.sft(thought, PLAIN)
    later = dict(row, completion=[turn("assistant", " 4"), ASKED, turn("assistant", "5")])
    with pytest.raises(
        ValueError, match="rows.jsonl:3: turn 3: no further turn may follow one that is continued"
    ):
        coder.sft(later, PLAIN)


def test_continued_turn_begins_as_the_template_begins_turns():
    """gpt-oss writes a channel in front of the answer. An unfinished thought follows the prompt
    itself."""
    coder = encoder(
        loop(
            HEAD,
            "{% if m.role == 'assistant' %}<final>{% endif %}{{ m.content + '<|end_of_turn|>\n' }}",
        )
        + PROMPT
    )
    assert prompt(coder, ASKED, turn("assistant", "It is")).endswith("assistant\n<final>It is")
    assert prompt(coder, ASKED, turn("assistant", "<think>\nIt is")).endswith(
        "assistant\n<think>\nIt is"
    )
    assert prompt(encoder(OPENING), ASKED, turn("assistant", "<think>\nIt is")).endswith(
        "assistant\n<think>\nIt is"
    )


# ---- tokens and limits ----


def test_token_that_the_model_lacks_is_refused_by_row():
    """Gemma 3's tokenizer has an image token that its language model has no embedding for."""
    coder = encoder(tokens=("<image>",))
    coder.tokenizer.model_vocab_size = len(coder.tokenizer) - 1
    assert prompt(coder, ASKED)
    with pytest.raises(
        ValueError, match="rows.jsonl:3: the model has no embedding for the token '<image>'"
    ):
        prompt(coder, turn("user", "See <image>"))


def test_template_that_needs_all_memory_is_refused():
    with pytest.raises(
        ValueError, match="^--model .*: the chat template does not render: MemoryError"
    ):
        encoder("{{ 'a' * 10 ** 15 }}")


SPECIAL = [
    turn("system", f"{EOS}s"),
    turn("user", f"What is {EOT}? {EOS}"),
    turn("assistant", f"An {EOT} token.{EOT}"),
]


def test_text_of_a_special_token_is_reported_or_stays_text(capsys):
    """The end of an answer is its end either way."""
    row = dict(messages=SPECIAL, **SOURCE)
    coder = encoder(special_text="token")
    coder.sft(row, ("messages",))
    coder.sft(row, ("messages",))
    said = f"rows.jsonl:3: the text {EOS} in the data is read as this special token"
    assert capsys.readouterr().out.count(said) == 1
    text = coder.tokenizer.decode(coder.sft(row, ("messages",)).ids)
    coder = encoder(special_text="text")
    sample = coder.sft(row, ("messages",))
    tokens = coder.tokenizer.convert_ids_to_tokens(sample.ids)
    assert tokens.count(EOT) == 3 and EOS not in tokens
    assert coder.tokenizer.decode(sample.ids) == text
    assert trained(coder, *SPECIAL) == [f"An {EOT} token.{EOT}"]
    sample = coder.sft(
        dict(messages=[ASKED, turn("assistant", "4<|turn|>")], **SOURCE), ("messages",)
    )
    assert coder.tokenizer.convert_ids_to_tokens(sample.ids).count("<|turn|>") == 2
    with pytest.raises(
        ValueError, match=r"rows.jsonl:3: a character beyond U\+FFFFF cannot be read"
    ):
        trained(coder, turn("user", "\U00100001"), turn("assistant", "4"))
    assert not capsys.readouterr().out


@pytest.mark.parametrize("columns", [PLAIN, ("text",)])
def test_text_of_a_special_token_stays_text_in_plain_prompts(columns):
    row = dict(
        prompt=f"{EOT}2+2=", completion=f"4{EOT}!{EOS}", text=f"{EOT}2+2=4{EOT}!{EOS}", **SOURCE
    )
    coder = encoder(special_text="text", prompt_format="plain")
    tokens = coder.tokenizer.convert_ids_to_tokens(coder.sft(row, columns).ids)
    assert "".join(tokens) == row["text"] and EOT not in tokens and tokens.count(EOS) == 1
