"""Prompts and answers in every form are the same conversation, or refused in one line."""

import json
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.chats import (
    ASKED,
    CALL,
    EOS,
    EOT,
    READS_ALL,
    TOOL,
    encoder,
    refused,
    said,
    samples,
    spans,
    turn,
)

import dpo
import kto
import rm
import sft
from common.text.messages import messages_field

SCRIPTS = dict(sft=sft, kto=kto, dpo=dpo, rm=rm)
ARGS = {name: module.Args(prompt_format="chat") for name, module in SCRIPTS.items()}
BRIEF = "Be brief."
CODERS = {x: encoder(READS_ALL, prompt_format="chat", system_prompt=x) for x in (None, BRIEF)}
SYSTEM = turn("system", BRIEF)
Q = ASKED["content"]
SOURCE = dict(_source="rows.jsonl:3")

# ---- forms of a row ----

PROMPTS = {
    "text": Q,
    "messages": [ASKED],
    "JSON": json.dumps([ASKED]),
    "system": [SYSTEM, ASKED],
    "system JSON": json.dumps([SYSTEM, ASKED]),
}
# Where the system text stands if the prompt has none.
PLACES = {
    "": {},
    "column system": dict(system=BRIEF),
    "column system_prompt": dict(system_prompt=BRIEF),
    "flag": {},
}


def answers(text: str) -> dict[str, object]:
    """Return an answer in its forms, which may repeat the prompt."""
    lists = {
        "messages": [said(text)],
        "repeats": [ASKED, said(text)],
        "system": [SYSTEM, ASKED, said(text)],
    }
    return dict(text=text) | lists | {f"{k} JSON": json.dumps(v) for k, v in lists.items()}


def outcome(script: str, flags: dict, **row: object) -> list | str:
    """Return the prompts and trained texts of a script's samples, or why the row is refused."""
    module, args = SCRIPTS[script], ARGS[script]
    coder = CODERS[flags.get("system_prompt")]
    columns = tuple(name for name in row if not name.startswith("system"))
    try:
        group = module.encode_row(row | SOURCE, columns, coder, args)
    except ValueError as error:
        assert str(error).startswith("rows.jsonl:3: ") and "\n" not in str(error)
        return str(error)
    return [(coder.tokenizer.decode(s.prompt_ids), *spans(coder, s)) for s in group]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("names", [("prompt", "completion"), ("question", "answer")])
def test_each_form_of_a_prompt_and_of_an_answer_is_one_conversation(names, place):
    """An answer as JSON text may be a text that was asked for: it is messages if it repeats the
    prompt, or if the prompt is JSON text, too."""
    flags = dict(system_prompt=BRIEF) if place == "flag" else {}
    for asked, answer in product(PROMPTS, answers("4")):
        if names[0] == "question" and "JSON" in asked:
            continue
        has_system = place or "system" in asked + answer
        messages = [*([SYSTEM] if has_system else []), ASKED, said("4")]
        expected = outcome("sft", {}, messages=messages)
        row = dict(zip(names, (PROMPTS[asked], answers("4")[answer]), strict=True)) | PLACES[place]
        for script in ("sft", "kto")[: 1 if names[0] == "question" else 2]:
            label = dict(label=True) if script == "kto" else {}
            found = outcome(script, flags, **row, **label)
            if answer == "messages JSON" and "JSON" not in asked:
                if asked == "text":
                    assert found == [(expected[0][0], answers("4")[answer] + EOT)]
                else:
                    assert f"column {names[1]} is JSON text of messages, column" in found
            else:
                assert found == expected, (script, asked, answer)


@pytest.mark.parametrize("place", ["", "column system"])
def test_each_form_of_a_pair_is_one_conversation(place):
    """Sides with other system messages are refused, and so are a text and messages without a
    prompt."""
    sides = [*product(answers(""), answers(""))]
    for asked, (chosen, rejected) in product((None, *PROMPTS), sides):
        row = dict(chosen=answers("4")[chosen], rejected=answers("5")[rejected]) | PLACES[place]
        row |= {} if asked is None else dict(prompt=PROMPTS[asked])
        found = outcome("dpo", {}, **row)
        others = ("kto", "rm") if chosen == rejected else ()
        assert all(outcome(script, {}, **row) == found for script in others)
        whole = [side for side in (chosen, rejected) if side.startswith(("repeats", "system"))]
        systems = {"system" in side for side in whole}
        has_one_system = len(systems) < 2 or "system" in (asked or "")
        literal = [
            x for x in (chosen, rejected) if x == "messages JSON" and "JSON" not in f"{asked}"
        ]
        if asked is None:
            is_read = len(whole) == 2 and has_one_system
        else:
            is_read = has_one_system and not (literal and (asked != "text" or whole))
        if not is_read:
            assert isinstance(found, str), (asked, chosen, rejected)
            continue
        has_system = place or "system" in f"{asked} {chosen} {rejected}"
        start = [*([SYSTEM] if has_system else []), ASKED]
        for side, text, sample in zip((chosen, rejected), "45", found, strict=True):
            (expected,) = outcome("sft", {}, messages=[*start, said(text)])
            if side in literal:
                expected = (expected[0], answers(text)[side] + EOT)
            assert sample == expected, (asked, chosen, rejected)


# ---- other JSON ----

KEYS = """role content from value weight train type text name id tool_call_id tool_calls function
arguments function_call reasoning_content reasoning thinking image url image_url parameters
""".split()
WORDS = ["a\nb", "", "\ud800"]
WORDS += "user system assistant tool gpt function_call text image".split()
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text()
)
json_values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)
calls = st.lists(
    st.fixed_dictionaries(
        dict(function=st.fixed_dictionaries(dict(name=leaves, arguments=json_values))),
        optional=dict(id=json_values, index=json_values),
    ),
    max_size=2,
)
odd_messages = st.lists(
    st.fixed_dictionaries(
        dict(role=st.sampled_from(WORDS), content=st.sampled_from(["x", ""]) | json_values),
        optional={key: json_values for key in KEYS[2:]} | dict(tool_calls=calls | json_values),
    )
    | json_values,
    min_size=1,
    max_size=4,
)


@settings(max_examples=50)
@given(odd_messages, json_values)
def test_any_json_is_read_or_refused_in_a_short_line(messages, tools):
    coder = CODERS[None]
    for columns in (
        dict(messages=messages),
        dict(messages=messages[:1], tools=tools),
        dict(prompt=json.dumps(messages)),
        dict(prompt=tools),
        dict(prompt=[ASKED], completion=messages),
    ):
        try:
            samples(coder, **columns)
        except ValueError as error:
            (line,) = str(error).splitlines()
            assert line.startswith("rows.jsonl:3: ") and len(line) < 500


def test_a_long_reason_is_cut():
    row = dict(messages=[turn("user", [{"type": "x" * 10_000}])]) | SOURCE
    with pytest.raises(ValueError, match=r"content.0: Input tag 'x+ \[\.\.\.\] .*'text'") as error:
        messages_field(row, "messages")
    assert len(str(error.value)) < 1100


# ---- JSON text that is no conversation ----

EDGES, HI = '[{"from": "a", "value": "b"}]', json.dumps([said("hi")])
DIALOGUE = json.dumps([ASKED, said("hi")])


@pytest.mark.parametrize("prompt_format", ["plain", "chat"])
@pytest.mark.parametrize("text", [EDGES, HI, DIALOGUE, '[{"role": "user"}]'])
@pytest.mark.parametrize("names", [("prompt", "completion"), ("question", "answer")])
def test_an_answer_that_is_json_stays_text(names, text, prompt_format):
    coder = encoder(prompt_format=prompt_format)
    (sample,) = samples(coder, **dict(zip(names, ("List the edges.", text), strict=True)))
    assert spans(coder, sample) == [text + (EOT if prompt_format == "chat" else EOS)]


@pytest.mark.parametrize(
    ("column", "text"), [("question", DIALOGUE), ("prompt", HI), ("prompt", EDGES)]
)
def test_a_question_that_is_json_stays_text(column, text):
    coder = encoder(prompt_format="chat")
    asked = samples(coder, **{column: text})[0].ids
    assert f"<|turn|>user\n{text}{EOT}" in coder.tokenizer.decode(asked)


def test_json_text_that_may_be_either_is_refused():
    coder = encoder(prompt_format="chat")
    mixed = json.dumps([turn("narrator", "x"), ASKED])
    words = "JSON text of messages, but message 1 has another form or an unknown role; give a list"
    for row in (dict(prompt=mixed), dict(chosen=mixed, rejected=mixed)):
        refused(coder, words, **row)
    words = "column completion is JSON text of messages, column prompt is a list; make the answer"
    for text in (HI, DIALOGUE.replace("Why hi", "Why")):
        refused(coder, words, prompt=[ASKED], completion=text)


# ---- empty texts ----

EMPTY = ("", " \n", EOT, EOS)
BLANK = [
    *((dict(text=text), "column text is empty") for text in EMPTY),
    *(
        (dict(prompt=prompt) | answer, "column prompt is empty")
        for prompt in ("", " \n", EOT, [], [turn("user", "")], [SYSTEM, turn("user", " ")])
        for answer in ({}, dict(completion="2"), dict(chosen="2", rejected="3"))
    ),
    *((dict(question=text), "column question is empty") for text in EMPTY),
    *(
        (row, "column (completion|answer|output|chosen|rejected) is empty")
        for text in EMPTY
        for row in (
            dict(prompt="1+1=", completion=text),
            dict(prompt=[ASKED], completion=[said(text)]),
            dict(prompt=[ASKED], completion=[ASKED, said(text)]),
            dict(prompt=[ASKED, said("2")], completion=text),
            dict(question="1+1=", answer=text),
            dict(input="1+1=", output=text),
            dict(prompt="1+1=", chosen=text, rejected="3"),
            dict(prompt="1+1=", rejected=text, chosen="3"),
            dict(rejected=[ASKED, said(text)], chosen=[ASKED, said("3")]),
        )
    ),
    *(
        (dict(messages=[*messages]), rf"turn {turn} \(\w+\): it is empty")
        for turn, messages in (
            (2, [ASKED, said("")]),
            (2, [ASKED, said("<think>\n\n</think>\n")]),
            (2, [ASKED, said(EOT), ASKED, said("2")]),
            (4, [ASKED, said("2"), ASKED, said(" ")]),
            (1, [turn("user", ""), said("2")]),
        )
    ),
]


@pytest.mark.parametrize("prompt_format", ["auto", "chat"])
@pytest.mark.parametrize(("row", "words"), BLANK)
def test_empty_texts_are_refused_by_every_script(row, words, prompt_format):
    refused(encoder(prompt_format=prompt_format), words, **row)


def test_turns_with_a_call_or_a_thought_or_without_weight_may_be_empty():
    coder = encoder(READS_ALL)
    for turns in ([said("", thinking="R")], [said(None, tool_calls=[CALL])]):
        (sample,) = samples(coder, messages=[ASKED, *turns])
        (scored,) = [
            coder.completion(
                dict(prompt=[ASKED], completion=turns) | SOURCE, "prompt", "completion"
            )
        ]
        assert spans(coder, sample) == spans(coder, scored)
    (sample,) = samples(coder, messages=[ASKED, said("", weight=0), ASKED, said("2")])
    assert spans(coder, sample) == ["2" + EOT]
    (sample,) = samples(coder, train_on="last", messages=[ASKED, said(""), ASKED, said("2")])
    assert spans(coder, sample) == ["2" + EOT]
    assert samples(coder, prompt=[ASKED, said(""), turn("tool", "")])


def test_columns_beside_text_are_said(capsys):
    coder = encoder(READS_ALL)
    columns = dict(system="S", system_prompt="S", tools=[TOOL], chat_template_kwargs=dict(x=1))
    for _ in range(2):
        (sample,) = samples(coder, text="a", **columns)
        assert spans(coder, sample) == ["a" + EOS]
    said = [f"not used in training: {name}, beside the column text" for name in columns]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(said)
