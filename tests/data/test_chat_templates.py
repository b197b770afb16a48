"""The chat templates of common models give the same ids in training, sampling and evaluation. The
templates here are small ones with the same structure: special tokens, trimming, default system
turns, generation prompts, tool calls."""

import json
from dataclasses import dataclass

import pytest
from helpers import ROOT

from common.config.groups import BaseArgs
from common.data.encode import Encoder
from common.model.hub import eos_token_ids
from common.model.tiny import build_tokenizer, tiny_model

CHATML_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SMOLLM2 = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}"
    f"{CHATML_TURN}{{% endfor %}}{CHATML_PROMPT}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
    '{{ \'\n<tool_call>\n{"name": "\' + f.name + \'", "arguments": '
    "' + f.arguments | tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
)
# Tools are in the system turn; tool results form a user turn, several results in one turn.
CHATML_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n' }}"
    "{% else %}{{ DEFAULT }}{% endif %}"
    "{{ '# Tools\n' + tools | map('tojson') | join('\n') + '<|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% elif DEFAULT %}{{ '<|im_start|>system\n' + DEFAULT + '<|im_end|>\n' }}{% endif %}"
)
CHATML_TOOL_TURN = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN2_5 = (
    "{% set DEFAULT = 'You help.' %}" + CHATML_TOOLS + "{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}"
    "{% elif m.role == 'tool' %}" + CHATML_TOOL_TURN + "{% elif m.tool_calls %}"
    "{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    + CALLS
    + "{{ '<|im_end|>\n' }}"
    "{% else %}" + CHATML_TURN + "{% endif %}{% endfor %}" + CHATML_PROMPT
)
# A thinking block precedes the text of a turn; turns before the last question lose theirs.
QWEN3 = (
    "{% set DEFAULT = '' %}" + CHATML_TOOLS + "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}"
    "{% elif m.role == 'tool' %}" + CHATML_TOOL_TURN + "{% elif m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if "
    "'</think>' in m.content %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{ '<think>\n' + (thought or '') + '\n</think>\n\n' }}{% endif %}{{ said }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}"
    "{% else %}" + CHATML_TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n"
    "</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% set asks = messages[1:] if messages[0].role == 'system' else messages %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date\n\n' }}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson + '\n\n' }}{% endfor %}{% endif %}"
    "{{ (messages[0].content | trim if messages[0].role == 'system' else '') + '<|eot_id|>' }}"
    "{% for m in asks %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one tool call at once') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}"
    "{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + "
    "'<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}"
    + ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Tools precede the last question; the system text is part of the first question; there is no
# generation prompt.
MISTRAL = (
    "{{ bos_token }}{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' "
    "else '' %}"
    "{% set asks = messages[1:] if system else messages %}"
    "{% set users = asks | selectattr('role', 'equalto', 'user') | list %}{% for m in asks %}"
    "{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (system if loop.first else '') + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% if call.id | default('') | length != 9 %}"
    "{{ raise_exception('tool call ids have 9 characters') }}{% endif %}"
    "{{ call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    "{{ ']' + eos_token }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)


@dataclass
class Family:
    template: str
    end: str
    tokens: tuple[str, ...]
    bos: str | None = None
    kwargs: tuple[str, ...] = ()
    last: str = "{}"
    """form of the last turn's text after the prompt"""
    trains_earlier: bool = True
    """whether the template shows earlier turns as they are sampled"""
    system: bool = True
    tools: bool = True


CHATML = ("<|im_start|>", "<|im_end|>")
QWEN = (
    *CHATML,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
MARKS = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
FAMILIES = dict(
    qwen2_5=Family(QWEN2_5, "<|im_end|>", QWEN),
    qwen3=Family(QWEN3, "<|im_end|>", QWEN, last="<think>\n\n</think>\n\n{}"),
    qwen3_without_thinking=Family(
        QWEN3, "<|im_end|>", QWEN, kwargs=("enable_thinking=false",), trains_earlier=False
    ),
    llama3=Family(
        LLAMA3,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        bos="<|begin|>",
    ),
    gemma=Family(
        GEMMA,
        "<end_of_turn>",
        ("<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        system=False,
        tools=False,
    ),
    mistral=Family(MISTRAL, "<|eos|>", MARKS, bos="<s>", last=" {}"),
    smollm2=Family(SMOLLM2, "<|im_end|>", CHATML, tools=False),
    shipped=Family((ROOT / "configs/templates/chatml_tools.jinja").read_text(), "<|im_end|>", QWEN),
)


class Chat:
    """Tokenizer of a family, which adds BOS to plain text, and the encoder."""

    def __init__(self, family: Family):
        from tokenizers.processors import TemplateProcessing

        self.family, self.tokenizer = family, build_tokenizer()
        if family.bos:
            self.tokenizer.add_special_tokens(dict(bos_token=family.bos))
            bos = (family.bos, self.tokenizer.bos_token_id)
            self.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                f"{family.bos} $A", special_tokens=[bos]
            )
        thought = [
            token for token in family.tokens if token.startswith(("<t", "</t"))
        ]  # added, not special
        self.tokenizer.add_tokens(
            [token for token in family.tokens if token not in thought], special_tokens=True
        )
        self.tokenizer.add_tokens(thought)
        self.tokenizer.chat_template = family.template
        self.encoder = Encoder(self.tokenizer, BaseArgs(template_kwargs=family.kwargs))

    def prompt(self, messages: list[dict], **row) -> list[int]:
        return self.encoder.prompt(dict(prompt=messages, _source="x:1", **row), ("prompt",))

    def sft(self, messages: list[dict], **row) -> tuple[list[int], list[bool]]:
        sample = self.encoder.sft(dict(messages=messages, _source="x:1", **row), ("messages",))
        return sample.ids, sample.loss_mask

    def trained(self, ids: list[int], mask: list[bool]) -> list[str]:
        pieces = (self.tokenizer.decode([i]) if m else "\0" for i, m in zip(ids, mask, strict=True))
        return [stretch for stretch in "".join(pieces).split("\0") if stretch]


@pytest.fixture(params=FAMILIES)
def chat(request) -> Chat:
    return Chat(FAMILIES[request.param])


def turn(role: str, content: object, **more) -> dict:
    return dict(role=role, content=content, **more)


ASKED, TWICE = (
    [turn("user", "1+1?")],
    [turn("user", " 1+1?"), turn("assistant", "<b>2</b>"), turn("user", "why?\n")],
)


@pytest.mark.parametrize("messages", [ASKED, TWICE, [turn("system", "Be brief."), *TWICE]])
def test_training_prompt_equals_the_sampling_prompt_and_replies_are_trained(chat, messages):
    if messages[0]["role"] == "system" and not chat.family.system:
        with pytest.raises(
            ValueError, match="x:1: the chat template refuses the messages: no system role"
        ):
            chat.prompt(messages)
        return
    prompt, (ids, mask) = chat.prompt(messages), chat.sft([*messages, turn("assistant", "So.")])
    last = len(ids) - mask[::-1].index(
        False, mask[::-1].index(True)
    )  # start of the last trained span
    assert ids[:last] == prompt
    replies = chat.trained(ids, mask)
    earlier = [
        chat.family.last.format("<b>2</b>").replace("<think>\n\n</think>\n\n", "") + chat.family.end
    ]
    shows_earlier = len(messages) > 2 and chat.family.trains_earlier
    assert replies == earlier * shows_earlier + [chat.family.last.format("So.") + chat.family.end]
    row = dict(prompt=messages, completion="So.", _source="x:1")
    sample = chat.encoder.completion(row, "prompt", "completion")
    assert (sample.ids[: len(prompt)], sample.prompt_length) == (prompt, len(prompt))
    assert chat.tokenizer.decode(sample.completion_ids) == replies[-1]


def test_end_of_turn_token_ends_a_completion(chat):
    ids, mask = chat.sft([*ASKED, turn("assistant", "So.")])
    assert ids[len(ids) - 1 - mask[::-1].index(True)] in eos_token_ids(tiny_model(), chat.tokenizer)


def test_prompt_has_exactly_one_bos(chat):
    """The template writes BOS in chats; the tokenizer adds it to plain text."""
    if chat.family.bos:
        bos = chat.tokenizer.bos_token_id
        plain = chat.encoder.prompt(dict(prompt="1+1=", _source="x:1"), ("prompt",))
        for ids in (chat.prompt(TWICE), chat.sft([*TWICE, turn("assistant", "So.")])[0], plain):
            assert ids[0] == bos and ids.count(bos) == 1


TOOL = dict(type="function", function=dict(name="add", parameters=dict(type="object")))
CALL = dict(type="function", id="abcdefghi", function=dict(name="add", arguments=dict(a=1, b=1)))
CALLED = [*ASKED, turn("assistant", None, tool_calls=[CALL]), turn("tool", "2", name="add")]


def test_tool_calls_are_trained_or_refused(chat):
    if not chat.family.tools:
        with pytest.raises(
            ValueError, match="x:1: column tools: the chat template does not read it"
        ):
            chat.prompt(ASKED, tools=[TOOL])
        return
    prompt, (ids, mask) = chat.prompt(ASKED, tools=[TOOL]), chat.sft(CALLED[:2], tools=[TOOL])
    assert ids[: mask.index(True)] == prompt[
        : mask.index(True)
    ] and '"parameters"' in chat.tokenizer.decode(prompt)
    ids, mask = chat.sft([*CALLED, turn("assistant", "It is 2.")], tools=[TOOL])
    *calls, reply = chat.trained(ids, mask)
    assert len(calls) == chat.family.trains_earlier
    for call in calls:
        assert "add" in call and call.endswith(chat.family.end) and call.count(chat.family.end) == 1
    assert reply == chat.family.last.format("It is 2.") + chat.family.end
    assert (
        chat.prompt(CALLED, tools=[TOOL])
        == ids[: len(ids) - mask[::-1].index(False, mask[::-1].index(True))]
    )


def test_shipped_template_has_schemas_calls_and_results_in_their_places():
    """Two calls with an awkward argument, two results in one turn, and text before a call."""
    chat = Chat(FAMILIES["shipped"])
    calls = [dict(CALL, function=dict(name="add", arguments=dict(a=x))) for x in (1, '"\n</tool')]
    results = [turn("tool", "1"), turn("tool", "2")]
    messages = [
        turn("system", "Be brief."),
        *ASKED,
        turn("assistant", "I add.", tool_calls=calls),
        *results,
    ]
    ids, mask = chat.sft([*messages, turn("assistant", "3")], tools=[TOOL, dict(TOOL, note="x")])
    system, user, calling, told, answer, _ = chat.tokenizer.decode(ids).split("<|im_end|>\n")
    schemas = system.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    assert (
        system.startswith("<|im_start|>system\nBe brief.\n\n") and user == "<|im_start|>user\n1+1?"
    )
    assert [json.loads(line) for line in schemas] == [TOOL, dict(TOOL, note="x")]
    text, *called = calling.split("\n<tool_call>\n")
    assert text == "<|im_start|>assistant\nI add."
    assert [json.loads(one.removesuffix("\n</tool_call>")) for one in called] == [
        call["function"] for call in calls
    ]
    responses = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert told == "<|im_start|>user" + responses and answer == "<|im_start|>assistant\n3"
    assert chat.trained(ids, mask) == [
        calling.removeprefix("<|im_start|>assistant\n") + "<|im_end|>",
        "3<|im_end|>",
    ]
    between = chat.tokenizer.decode(chat.encoder.reply(results))
    assert between == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"


def test_turn_before_a_moving_system_turn_is_context():
    """Some Mistral templates write the system turn into the last question."""
    family = FAMILIES["mistral"]
    chat = Chat(
        Family(
            MISTRAL.replace("loop.first", "m == users[-1]"),
            family.end,
            family.tokens,
            bos=family.bos,
        )
    )
    messages = [turn("system", "Be brief."), *TWICE]
    assert chat.trained(*chat.sft([*messages, turn("assistant", "So.")])) == [" So.<|eos|>"]
    sample = chat.encoder.sft(
        dict(prompt=messages, completion="So.", _source="x:1"), ("prompt", "completion")
    )
    assert sample.ids[: sample.prompt_length] == chat.prompt(messages)
