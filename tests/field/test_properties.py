"""Conversations of any shape, in the templates and tokenizers of real models, are encoded as their
models would sample them, or refused in one line. tests/field/oracle.py states what that is."""

import functools
import re
from collections import Counter

import pytest
from field.families import FAMILIES, TRL, TRL_FAMILIES, Family
from field.oracle import check_sft, is_turn, renderings, squeezed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from common.config.groups import BaseArgs
from common.text.encode import Encoder

EXAMPLES = 12  # conversations for each family
few = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
               suppress_health_check=list(HealthCheck))  # fmt: skip


@functools.cache
def encoder_of(family: Family) -> Encoder:
    return family.encoder()


def with_packages(families: list[Family]) -> list:
    """Return the families as parameters. Those whose files are not here are skipped."""
    missing = pytest.mark.skip(reason="the tokenizer or template is not here; run make field")
    marks = [[] if family.available() else missing for family in families]
    names = [f"{family.template.parent.name}-{family.name}" for family in families]
    return [
        pytest.param(family, id=i, marks=mark)
        for family, i, mark in zip(families, names, marks, strict=True)
    ]


each_family = pytest.mark.parametrize("family", with_packages(FAMILIES + TRL_FAMILIES))


@pytest.mark.skipif(not TRL.is_dir(), reason="the templates of TRL are not here; run make field")
def test_every_template_of_trl_is_a_family():
    files = {file for file in TRL.glob("*.jinja") if not file.stem.endswith("_training")}
    assert {family.template for family in TRL_FAMILIES} == files


# ---- conversations ----

NUMBER = dict(a=dict(type="integer", description="first"))
PARAMETERS = dict(type="object", properties=NUMBER, required=["a"])
ADD = dict(name="add", description="Add numbers.", parameters=PARAMETERS)
TOOL = dict(type="function", function=ADD)
CALL = dict(type="function", id="abcdefghi", function=dict(name="add", arguments=dict(a=7)))
QUESTIONS = ["Is 3 in 43?", "hi", "k, t?", "  What is it? \n", "Ça va, 世界 🙂?", "1\n\n2\n",
             "a [b] <c> {d}"]  # fmt: skip
ANSWERS = [
    "in", "hi", "k", "t", "3", "It is 7.", " padded\n", "Très bien 👍🏽", "好", "a\n\n- b\n- c",
    "e\u0301", "<b>2</b>", "",
]  # fmt: skip
THOUGHTS = ["Is it in?", "hi", "k\n\nt", "3 and 43: in.", " 好 \n"]


@st.composite
def conversations(draw) -> tuple[list[dict], dict]:
    """Return messages that end with a turn of the model, and the other columns of the row."""
    messages, row = [], {}
    role = draw(st.sampled_from([None, None, "system", "developer"]))
    if role:
        text = draw(st.sampled_from(["Be brief.", " Answer in rhyme.\n", "好"]))
        messages.append(turn(role, text))
    if draw(st.integers(0, 9)) == 0:
        messages.append(turn("assistant", "Hello."))
    calls = draw(st.integers(0, 3)) == 0
    if calls:
        row["tools"] = [TOOL]
    for _ in range(draw(st.integers(1, 3))):
        text = st.text(max_size=8).map(plain).filter(str.strip)
        messages.append(turn("user", draw(st.sampled_from(QUESTIONS) | text)))
        if calls and draw(st.booleans()):
            said = draw(st.sampled_from(["", "Let me add."]))
            messages.append(turn("assistant", said, tool_calls=[CALL]))
            messages.append(turn("tool", "is 7", name="add", tool_call_id=CALL["id"]))
        messages.append(answer(draw(st.sampled_from(ANSWERS) | text), draw))
    return messages, row


def turn(role: str, content: str, **more: object) -> dict:
    return dict(role=role, content=content, **more)


def plain(text: str) -> str:
    """Return a text without parts of special tokens."""
    return "".join(c for c in text if c.isprintable() and c not in "<>[]|{}")


def answer(text: str, draw) -> dict:
    forms = ["none", "none"] if text else []  # a turn without any text is refused
    form = draw(st.sampled_from([*forms, "reasoning_content", "inline"]))
    thought = draw(st.sampled_from(THOUGHTS))
    if form == "inline":
        return turn("assistant", f"<think>\n{thought}\n</think>\n\n{text}")
    return turn("assistant", text, **({} if form == "none" else {form: thought}))


def refused(error: ValueError) -> None:
    """Require one line that names the row and the turn, or what the template refuses."""
    what = r"turn \d+ \(\w+\)|the chat template refuses the messages|column tools"
    assert re.fullmatch(f"x:1: ({what}): .+", str(error)), str(error)


# ---- properties ----


@each_family
def test_conversations_are_encoded_as_they_are_sampled_or_refused(family):
    encoder, counts = encoder_of(family), Counter()

    @few
    @given(conversations())
    def check(conversation):
        messages, row = conversation
        try:
            check_sft(family, encoder, messages, **row)
        except ValueError as error:
            counts["refused"] += 1
            refused(error)
            return
        counts["encoded"] += 1
        check_completion(family, encoder, messages, row)

    check()
    assert counts["encoded"] >= EXAMPLES / 5, counts


def check_completion(family: Family, encoder: Encoder, messages: list[dict], row: dict) -> None:
    """Require of a completion: the ids of the last sequence of `sft`, all of them trained after the
    prompt of sampling."""
    row = row | dict(_source="x:1")
    sequences = encoder.sft(row | dict(messages=messages), ("messages",))
    asked, said = messages[:-1], messages[-1]

    def completion(said: dict):
        pair = row | dict(prompt=asked, completion=[said])
        return encoder.completion(pair, "prompt", "completion")

    try:
        sample = completion(said)
    except ValueError:
        assert sequences[0].turns_left_out, "a trained turn is refused as a completion"
        return
    assert sample.prompt_ids == encoder.prompt(row | dict(prompt=asked), ("prompt",))
    assert sample.ids == sequences[-1].ids
    length = sample.prompt_length
    assert all(sample.loss_mask[length:]) and not any(sample.loss_mask[:length])
    text = said["content"].rstrip()  # blanks before the end of a turn go with it
    with_end = completion(said | dict(content=text + encoder.chat.end.token))
    assert with_end.ids == completion(said | dict(content=text)).ids, "the end of a turn is doubled"
    parts = [turn | dict(content=[dict(type="text", text=turn["content"])]) for turn in messages]
    listed = encoder.sft(row | dict(messages=parts), ("messages",))
    assert [x.ids for x in listed] == [x.ids for x in sequences], "content as parts"


@each_family
def test_a_turn_is_continued_from_the_prompt_of_sampling(family):
    encoder, tokenizer = encoder_of(family), encoder_of(family).tokenizer

    @few
    @given(st.sampled_from(QUESTIONS[:4]), st.sampled_from(["It is", "in ", "k\n", "好"]),
           st.sampled_from(["7", " seven.", "in", "\nt"]))  # fmt: skip
    def check(question, begun, rest):
        prompt = [turn("user", question), turn("assistant", begun)]
        row = dict(prompt=prompt, completion=[turn("assistant", rest)], _source="x:1")
        sample = encoder.completion(row, "prompt", "completion")
        assert sample.prompt_ids == encoder.prompt(row, ("prompt",))
        assert is_turn(family, tokenizer, [*sample.completion_ids], turn("assistant", rest))
        text = tokenizer.decode([*sample.prompt_ids])
        starts = renderings(tokenizer, prompt[:1], add_generation_prompt=True)
        assert any(squeezed(text).startswith(squeezed(start)) for start in starts)
        assert squeezed(text).endswith(squeezed(begun))

    check()


@each_family
def test_plain_text_has_one_bos_and_one_eos(family):
    tokenizer = encoder_of(family).tokenizer
    plain_encoder = Encoder(tokenizer, BaseArgs(prompt_format="plain"))
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    @few
    @given(st.sampled_from(QUESTIONS + ANSWERS), st.booleans(), st.booleans(),
           st.sampled_from(ANSWERS))  # fmt: skip
    def check(text, starts, ends, completion):
        assume(text and completion)
        given_text = (bos or "") * starts + text + eos * ends
        (sample,) = plain_encoder.sft(dict(text=given_text, _source="x:1"), ("text",))
        assert all(sample.loss_mask) and sample.ids[-1] == tokenizer.eos_token_id
        assert sample.ids.count(tokenizer.eos_token_id) == 1 + (bos == eos and starts)
        if bos and bos != eos:
            assert sample.ids.count(tokenizer.bos_token_id) == (adds_bos or starts)
        row = dict(prompt=(bos or "") * starts + text, completion=completion + eos * ends)
        row |= dict(_source="x:1")
        (sample,) = plain_encoder.sft(row, ("prompt", "completion"))
        assert sample.prompt_ids == plain_encoder.prompt(row, ("prompt",))
        assert sample.completion_ids.count(tokenizer.eos_token_id) == 1
        said = tokenizer.decode([*sample.completion_ids[:-1]])
        assert squeezed(said) == squeezed(completion)

    check()
