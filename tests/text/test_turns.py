"""Each turn of the model is trained as it is sampled. `make field` runs these templates, and those
of TRL, with the tokenizers of their models."""

import json
from itertools import pairwise

import pytest
from helpers import ROOT
from text.chats import (
    ASKED,
    CALL,
    CALL_TEXTS,
    CALLS,
    END,
    EOS,
    EOT,
    HEAD,
    PROMPT,
    READS_ALL,
    SOURCE,
    TOOL,
    chat,
    encoded,
    encoder,
    loop,
    prompt,
    refused,
    said,
    samples,
    spans,
    turn,
)

from common.model.tiny import tiny_model
from common.text.chat import end_of_turn
from common.text.encode import Encoder
from common.text.tokenizer import eos_token_ids

# ---- templates ----

QWEN = "<|im_start|> <|im_end|> <tool_call> </tool_call> <think> </think>"
NO_THINKING = "qwen3 enable_thinking=false"
# Files and small templates, each with the tokens that it needs, and BOS.
TEMPLATES = {
    "chatml_tools": (QWEN, None),
    "qwen3": (QWEN, None),
    NO_THINKING: (QWEN, None),
    "qwq": (QWEN, None),
    "glm4": ("[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>", None),
    "gpt_oss": ("<|start|> <|end|> <|message|> <|channel|> <|return|> <|call|>", None),
    "r1": ("<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>", "<s>"),
    "mistral_v3": ("[INST] [/INST] [AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]", "<s>"),
    "parts": ("<|im_start|> <end_of_utterance>", None),
}
TWO_ENDS = chat("{{ m.content }}<end>")  # Cohere
NO_TOKENS = loop(
    "{{ m.role + ': ' + m.content + '\n' }}",
    prompt="{% if add_generation_prompt %}assistant: {% endif %}",
)
WITH_EOS = READS_ALL.removesuffix("{% endif %}") + "{% else %}<|eos|>{% endif %}"
THINKS_BEFORE_CALLS = chat(
    "{{ m.thinking if m.tool_calls and m.thinking }}{{ m.content }}" + CALL_TEXTS
)
# Gemma 4: what the model samples last asks for the result, which follows in the same turn.
RESULT_IN_TURN = loop(
    "{% if m.role != 'tool' and (loop.first or loop.previtem.role != 'tool') %}"
    f"{HEAD}{{% endif %}}"
    "{{ m.content }}{% if m.role == 'tool' %}<result>{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call><result>{% endfor %}"
    f"{{% if m.role != 'tool' and not m.tool_calls %}}{END}{{% endif %}}",
    prompt=f"{{% if messages[-1].role != 'tool' %}}{PROMPT}{{% endif %}}",
)


def coder_of(template: str | None) -> Encoder:
    """Return the encoder of a name in `TEMPLATES`, or of a small template."""
    if template not in TEMPLATES:
        return encoder(template, "<call> </call> <result> <end>")
    name, _, variables = template.partition(" ")
    folder = "configs/templates" if name == "chatml_tools" else "tests/field/templates"
    text = (ROOT / folder / f"{name}.jinja").read_text(encoding="utf-8")
    return encoder(text, *TEMPLATES[template], template_kwargs=tuple(variables.split()))


# ---- trained turns ----

SYSTEM = turn("system", "Be brief.")
TALK = [SYSTEM, turn("user", " 1+1?"), said("<b>2</b>"), turn("user", "why?\n"), said(" So.\n")]
THOUGHTS = [ASKED, said("2", reasoning_content="R"), ASKED, said("<think>\nQ\n</think>\n\n3")]
R2, Q3 = "<think>\nR\n</think>\n\n2", "<think>\nQ\n</think>\n\n3"
EMPTY = "<think>\n\n</think>\n\n"
HELLO = [SYSTEM, said("Hello."), ASKED, said("4")]
ADD = said("", reasoning_content="I add.", tool_calls=[CALL])
AWKWARD = dict(type="function", function=dict(name="add", arguments=dict(a=f"add {EOT} add")))
AGAIN = [said("", tool_calls=[AWKWARD]), turn("tool", "add add")]

ARGUMENTS = '{"a": 1, "b": 1}'
CALLED = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
CALLED_TINY = f'<call>{{"name": "add", "arguments": {ARGUMENTS}}}</call>{EOT}'
CALLED_AGAIN = f'<call>{{"name": "add", "arguments": {{"a": "add {EOT} add"}}}}</call>{EOT}'
GLM_A, GLM_B = (f"<arg_key>{key}</arg_key>\n<arg_value>1</arg_value>\n" for key in "ab")
GLM_CALLED = f"\n<think></think>\n<tool_call>add\n{GLM_A}{GLM_B}</tool_call><|observation|>"
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
OSS_CALLED = f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
MISTRAL_CALLED = f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]<|eos|>'
# Templates, messages, and the turns that they train.
TRAINED = [
    ("chatml_tools", TALK, ["<b>2</b><|im_end|>", " So.\n<|im_end|>"]),
    ("chatml_tools", THOUGHTS, [f"{R2}<|im_end|>", f"{Q3}<|im_end|>"]),
    ("chatml_tools", CALLS, [CALLED, "It is 2.<|im_end|>"]),
    # a thought only in the last turn: what was said earlier is asked with another history
    ("qwen3", TALK, [f"{EMPTY}<b>2</b><|im_end|>", f"{EMPTY} So.\n<|im_end|>"]),
    ("qwen3", THOUGHTS, [f"{R2}<|im_end|>", f"{Q3}<|im_end|>"]),
    ("qwen3", CALLS, [EMPTY + CALLED, f"{EMPTY}It is 2.<|im_end|>"]),
    # the same, in the prompt
    (NO_THINKING, TALK, ["<b>2</b><|im_end|>", " So.\n<|im_end|>"]),
    (NO_THINKING, CALLS, [CALLED, "It is 2.<|im_end|>"]),
    (NO_THINKING, [*THOUGHTS[:3], said("3")], ["3<|im_end|>"]),  # a thought, and thinking is off
    *(
        (NO_THINKING, [ASKED, said(x), ASKED, said("d")], [f"{x}<|im_end|>", "d<|im_end|>"])
        for x in ("b", "assistant", "<think>")
    ),
    # the token of the next role ends a turn
    ("glm4", TALK, [f"\n<think></think>\n{x}<|user|>" for x in ("<b>2</b>", "So.")]),
    ("glm4", THOUGHTS, [f"\n<think>{t}</think>\n{x}<|user|>" for t, x in ("R2", "Q3")]),
    ("glm4", CALLS, [GLM_CALLED, "\n<think></think>\nIt is 2.<|user|>"]),
    ("glm4", CALLS[:2], [GLM_CALLED]),
    # another token ends earlier turns, and a call
    ("gpt_oss", TALK, [f"{FINAL}<b>2</b><|return|>", f"{FINAL} So.\n<|return|>"]),
    (
        "gpt_oss",
        THOUGHTS,
        [f"{ANALYSIS}{t}<|end|><|start|>assistant{FINAL}{x}<|return|>" for t, x in ("R2", "Q3")],
    ),
    ("gpt_oss", CALLS, [OSS_CALLED, f"{FINAL}It is 2.<|return|>"]),
    # the prompt opens a thought, which the turns lack
    ("r1", TALK, [f"\n</think>\n\n{x}<｜end▁of▁sentence｜>" for x in ("<b>2</b>", " So.\n")]),
    ("r1", THOUGHTS, [f"{t}\n</think>\n\n{x}<｜end▁of▁sentence｜>" for t, x in ("R2", "Q3")]),
    ("r1", [ASKED, said("3", reasoning="Q")], ["Q\n</think>\n\n3<｜end▁of▁sentence｜>"]),
    ("r1", [ASKED, said("Q\n</think>\n\n3")], ["Q\n</think>\n\n3<｜end▁of▁sentence｜>"]),
    # EOS ends turns, no header begins them; the system text and the tools move to the last question
    ("mistral_v3", TALK, [" <b>2</b><|eos|>", " So.<|eos|>"]),
    ("mistral_v3", THOUGHTS, [f" {R2}<|eos|>", f" {Q3}<|eos|>"]),
    ("mistral_v3", CALLS, [MISTRAL_CALLED, " It is 2.<|eos|>"]),
    # content is a list of parts
    ("parts", TALK, [" <b>2</b><end_of_utterance>", "  So.\n<end_of_utterance>"]),
    # the answer stands in its thought, in the question and in the tags
    *(
        ("qwen3", [ASKED, last], [f"<think>\n2 is 4, hi\n</think>\n\n{x}<|im_end|>"])
        for x in ("4", "in", "hi", "k", "think", "2 is 4", "")
        for last in (said(x, thinking="2 is 4, hi"), said(f"<think>2 is 4, hi</think>{x}"))
    ),
    # ends of turns
    (TWO_ENDS, [ASKED, said("A."), ASKED, said("B.")], [f"A.<end>{EOT}", f"B.<end>{EOT}"]),
    (NO_TOKENS, [ASKED, said("B.")], ["B.\n" + EOS]),
    (WITH_EOS, [ASKED, *AGAIN, *AGAIN, said("So.")], [CALLED_AGAIN, CALLED_AGAIN, "So." + EOT]),
    (WITH_EOS, [ASKED, *AGAIN, AGAIN[0]], [CALLED_AGAIN, CALLED_AGAIN]),
    (RESULT_IN_TURN, CALLS, ["<call>add</call><result>", "It is 2." + EOT]),
    # thoughts before calls
    (READS_ALL, [ASKED, ADD], ["I add." + CALLED_TINY]),
    (THINKS_BEFORE_CALLS, [*THOUGHTS[:2], ASKED, ADD], [R2 + EOT, "I add." + CALLED_TINY]),
    # a turn that nobody asked for
    (None, HELLO[1:], ["4" + EOT]),
    # turns that the data leaves out
    (None, [ASKED, said("1", weight=0), ASKED, said("2", weight=1)], ["2" + EOT]),
    (None, [ASKED, said("1", train=True), ASKED, said("2", train=False)], ["1" + EOT]),
]


@pytest.mark.parametrize(("template", "messages", "expected"), TRAINED)
def test_turns_are_trained_as_they_are_sampled(template, messages, expected):
    """Each follows a prompt of sampling, in one sequence where the next prompt goes on."""
    coder = coder_of(template)
    row = dict(tools=[TOOL]) if "tools" in coder.chat.variables else {}
    sequences = samples(coder, messages=messages, **row)
    assert [span for sample in sequences for span in spans(coder, sample)] == expected
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    prompts = [samples(coder, prompt=messages[:i], **row)[0].ids for i in turns]
    for sample in sequences:
        mask = [False, *sample.loss_mask]
        starts = [i for i in range(len(sample.ids)) if mask[i + 1] and not mask[i]]
        assert all(sample.ids[:start] in prompts for start in starts)
        assert sample.prompt_length == starts[0]
        bos = coder.tokenizer.bos_token_id
        assert bos is None or sample.ids.count(bos) == 1
    for before, after in pairwise(sequences):  # else they would be one
        assert after.ids[: len(before.ids)] != before.ids
    off = [i for i in turns if not (messages[i].get("weight", 1) and messages[i].get("train", 1))]
    assert len(sequences[0].turns_left_out) == len(turns) - len(off) - len(expected)
    (last,) = samples(coder, train_on="last", messages=messages, **row)
    assert spans(coder, last) == expected[-1:] and last.ids == sequences[-1].ids
    if turns[-1] in off or messages[-1]["content"] == "":  # refused, and so are empty answers
        return
    pair = dict(prompt=messages[:-1], completion=messages[-1:], **row, **SOURCE)
    last = coder.completion(pair, "prompt", "completion")
    assert last.ids == sequences[-1].ids and last.prompt_ids == prompts[-1]
    assert last.ids[-1] in eos_token_ids(tiny_model(), coder.tokenizer)


def test_shipped_template_has_schemas_calls_and_results_in_their_places():
    """Two calls with an awkward argument, two results in one turn, and text before a call."""
    coder = coder_of("chatml_tools")
    functions = [dict(name="add", arguments=dict(a=x)) for x in ('"\n</tool', "")]
    calls = [dict(type="function", function=function) for function in functions]
    results, tools = [turn("tool", "1"), turn("tool", "2")], [TOOL, dict(TOOL, note="x")]
    messages = [SYSTEM, ASKED, said("I add.", tool_calls=calls), *results, said("3")]
    (sample,) = samples(coder, messages=messages, tools=tools)
    system, _, calling, told, _ = coder.tokenizer.decode(sample.ids).split("<|im_end|>\n")
    schemas = system.partition("<tools>\n")[2].partition("\n</tools>")[0].split("\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert [*map(json.loads, schemas)] == tools
    text, *called = calling.split("\n<tool_call>\n")
    assert text == "<|im_start|>assistant\nI add."
    assert [json.loads(one.removesuffix("\n</tool_call>")) for one in called] == functions
    responses = "\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert told == "<|im_start|>user" + responses
    between = coder.tokenizer.decode(coder.reply(results))
    assert between == f"\n{told}<|im_end|>\n<|im_start|>assistant\n"


def test_results_follow_a_call_where_the_prompt_opens_a_thought():
    """The turn with the call has no thought, so it does not begin as the prompt ends."""
    coder = coder_of("qwq")
    between = coder.reply([turn("tool", "2")], calls=[CALL], tools=[TOOL])
    told = "<tool_response>\n2\n</tool_response><|im_end|>"
    start = "<|im_start|>assistant\n<think>\n"
    assert coder.tokenizer.decode(between) == f"\n<|im_start|>user\n{told}\n{start}"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        ("glm4", [turn("system", "s"), turn("user", "b")], "\ns<|user|>\nb<|assistant|>"),
        ("glm4", [turn("tool", "7"), turn("user", "b")],
         "\n<tool_response>\n7\n</tool_response><|user|>\nb<|assistant|>"),
        ("gpt_oss", [turn("user", "a <|return|> b")],
         "<|start|>user<|message|>a <|return|> b<|end|><|start|>assistant"),
        (NO_TOKENS, [turn("user", f"a {EOS} b")], f"\nuser: a {EOS} b\nassistant: "),
    ],
)  # fmt: skip
def test_messages_between_two_turns_are_whole(template, messages, expected):
    """Also if the token that ends the last turn, but no earlier one, stands in or behind them."""
    coder = coder_of(template)
    assert coder.tokenizer.decode(coder.reply(messages)) == expected


def test_end_of_turn_token_is_found():
    ends = [end_of_turn(encoder(READS_ALL).tokenizer, calls) for calls in (False, True)]
    assert encoder().tokenizer.convert_ids_to_tokens(ends) == [EOT, EOT]
    for template in (NO_TOKENS, "<|turn|>"):
        assert end_of_turn(encoder(template).tokenizer) is None


def test_everything_is_trained_with_train_on_all():
    """Also what is no turn of the model, or shown in another form than the sampled one."""
    coder = encoder()
    for columns, messages in (
        (("messages",), HELLO),
        (("messages",), HELLO[:2]),
        (("messages",), [ASKED]),
        (("prompt", "completion"), HELLO),
    ):
        row = dict(messages=messages, prompt=messages[:1], completion=messages[1:], **SOURCE)
        (sample,) = coder.sft(row, columns, train_on="all")
        assert all(sample.loss_mask)
        assert coder.tokenizer.decode(sample.ids) == coder.chat.render({}, messages)


def test_a_prompt_has_the_ids_of_its_whole_text():
    """Two line breaks are one token here, but not where a turn begins with one of them. So the next
    prompt, whose text goes on from that turn, has other ids, and is a sequence of its own."""
    coder = encoder()
    coder.tokenizer.add_tokens(["\n\n"])
    coder.ids_end = len(coder.tokenizer)
    messages = [turn("user", "a"), said("\nb"), turn("user", "c"), said("d")]
    first, second = samples(coder, messages=messages)
    both = coder.tokenizer.convert_tokens_to_ids("\n\n")
    assert both not in first.ids and both in second.ids
    for sample, i in ((first, 1), (second, 3)):
        text = coder.chat.render({}, messages[:i], add_generation_prompt=True)
        ids = coder.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sample.prompt_ids.tolist() == ids
        assert sample.prompt_ids == samples(coder, prompt=messages[:i])[0].ids


def test_a_turn_whose_prompt_and_text_contradict_each_other_is_left_out_and_counted():
    """Here a thought, although thinking is off; a row without another turn is refused."""
    coder = coder_of(NO_THINKING)
    (sample,) = samples(coder, messages=[*THOUGHTS[:3], said("3")])
    assert spans(coder, sample) == ["3<|im_end|>"]
    (reason,) = sample.turns_left_out
    assert reason.startswith("the prompt ends the thought, the row has one; set --template_kwargs")
    words = (
        "turn 2 .assistant.: the prompt ends the thought, the row has one; set --template_kwargs"
    )
    refused(coder, words, messages=THOUGHTS[:2])
    refused(coder, words, train_on="last", messages=THOUGHTS[:2])
    words = "column chosen: the prompt ends the thought, the row has one; set --template_kwargs"
    refused(coder, words, prompt=[ASKED], chosen=THOUGHTS[1:3] + [said("3")], rejected="4")


# ---- prompts ----


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (None, "assistant\n"),
        ("qwen3", "<think>\n\n</think>\n\n"),
        ("r1", "<think>\n\n</think>\n\n"),
        ("glm4", "<think></think>\n"),
        ("gpt_oss", FINAL),  # a channel in front of the answer
    ],
)
def test_turn_at_the_end_of_a_prompt_is_continued(template, head):
    coder = coder_of(template)
    begun = [ASKED, said("The answer is")]
    assert prompt(coder, *begun).endswith(f"{head}The answer is")
    (sample,) = samples(coder, prompt=begun, completion=" 4")
    pair = samples(coder, prompt=begun, chosen=[said(" 4")], rejected=" 5")
    for one in (sample, *pair):
        assert one.prompt_ids == samples(coder, prompt=begun)[0].ids
    assert spans(coder, pair[0]) == spans(coder, sample) == [" 4" + coder.chat.end.last]
    unfinished = prompt(coder, ASKED, said("<think>\nIt is"))
    assert unfinished.endswith("<think>\nIt is") and unfinished.count("<think>") == 1


def test_developer_is_the_system_where_the_template_has_only_that():
    only_system = loop("{% if m.role != 'developer' %}" + HEAD + "{{ m.content }}{% endif %}")
    for template, role in ((only_system, "system"), (None, "developer")):
        text = prompt(encoder(template), turn("developer", "Be brief."), ASKED)
        assert text.startswith(f"<|turn|>{role}\nBe brief.")


# ---- tokens ----


def test_token_that_the_model_lacks_is_refused():
    """Gemma 3's tokenizer has an image token that its language model has no embedding for."""
    coder = encoder(tokens="<image>")
    coder.ids_end = len(coder.tokenizer) - 1
    assert prompt(coder, ASKED)
    words = "the model has no embedding for the token '<image>'"
    refused(coder, words, prompt=[turn("user", "See <image>")])


def test_text_of_a_special_token_is_reported_or_stays_text(capsys):
    """The end of an answer is its end either way."""
    coder, as_text = (encoder(special_text=form) for form in ("token", "text"))
    asked = [turn("system", f"{EOS}s"), turn("user", f"What is {EOT}? {EOS}")]
    messages = [*asked, said(f"An {EOT}<|turn|> token.{EOT}")]
    for _ in range(2):
        (sample,) = samples(coder, messages=messages)
    problem = f"rows.jsonl:3: the text {EOS} in the data is read as this special token"
    assert capsys.readouterr().out.count(problem) == 1
    (text,) = samples(as_text, messages=messages)
    tokens = coder.tokenizer.convert_ids_to_tokens(text.ids)
    assert [tokens.count(token) for token in (EOT, "<|turn|>", EOS)] == [3, 3, 0]
    assert coder.tokenizer.decode(text.ids) == coder.tokenizer.decode(sample.ids)
    assert spans(as_text, text) == [f"An {EOT}<|turn|> token.{EOT}"]
    refused(as_text, r"a character beyond U\+FFFFF cannot", messages=[turn("user", "\U00100001")])
    assert not capsys.readouterr().out


def test_characters_that_stand_for_special_tokens_are_refused():
    coder = encoder(special_text="text")
    words = r"a character beyond U\+FFFFF cannot be read with --special_text text"
    refused(coder, words, question="\U00100003")


def test_text_of_a_special_token_stays_text_in_plain_prompts():
    coder = encoder(special_text="text", prompt_format="plain")
    whole = f"{EOT}2+2=4{EOT}!{EOS}"
    for row in (dict(text=whole), dict(prompt=whole[:-9], completion=whole[-9:])):
        ((ids, _),) = encoded(coder, **row)
        tokens = coder.tokenizer.convert_ids_to_tokens(ids)
        assert "".join(tokens) == whole and EOT not in tokens and tokens.count(EOS) == 1


def test_plain_texts_have_one_bos_and_one_eos():
    coder = encoder(bos="<s>", prompt_format="plain")
    for start, end in (("", ""), ("<s>", EOS)):
        asked, answer = f"{start}2+2=", f"4{end}"
        for row in (dict(text=asked + answer), dict(prompt=asked, completion=answer)):
            ((ids, _),) = encoded(coder, **row)
            assert coder.tokenizer.decode(ids) == f"<s>2+2=4{EOS}"
        assert coder.tokenizer.decode(samples(coder, prompt=asked)[0].ids) == "<s>2+2="
    coder = encoder(bos=EOS, prompt_format="plain", special_text="text")  # as GPT-2 has it
    (sample,) = samples(coder, prompt="2+2=", completion="4" + EOS)
    assert coder.tokenizer.decode(sample.ids) == f"{EOS}2+2=4{EOS}"
