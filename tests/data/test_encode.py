"""Rows become exact ids and masks, and a prompt has the same ids in training and in sampling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.groups import BaseArgs
from common.data.encode import Encoder
from common.data.pairs import encode_pair
from common.data.rows import PAIR_COLUMNS, SFT_COLUMNS
from common.model.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
MESSAGES, PAIR, QA, TEXT, INPUT, _ = SFT_COLUMNS
EOT, EOS = "<|end_of_turn|>", "<|eos|>"


def turn(role: str, content: str) -> dict:
    return dict(role=role, content=content)


def encoder(tokenizer=TOKENIZER, **flags) -> Encoder:
    return Encoder(tokenizer, BaseArgs(**flags))


def encode(
    row: dict, columns: tuple[str, ...], train_on_all: bool = False, **flags
) -> tuple[str, list[str]]:
    """Return the whole text and its trained spans."""
    sample = encoder(**flags).sft(row | dict(_source="rows.jsonl:3"), columns, train_on_all)
    assert len(sample.ids) == len(sample.loss_mask)
    stretches, previous = [], False
    for token, trained in zip(sample.ids, sample.loss_mask, strict=True):
        if trained:
            stretches += [[]] if not previous else []
            stretches[-1].append(token)
        previous = trained
    return TOKENIZER.decode(sample.ids), [TOKENIZER.decode(ids) for ids in stretches]


# ---- trained tokens ----


def test_plain_text_is_trained_including_its_eos():
    assert encode(dict(text="abc"), TEXT) == ("abc" + EOS, ["abc" + EOS])


def test_only_the_completion_is_trained_after_a_prompt():
    row = dict(prompt="1+1=", completion="2")
    assert encode(row, PAIR) == ("1+1=2" + EOS, ["2" + EOS])
    start = "<|turn|>user\n1+1=" + EOT + "\n<|turn|>assistant\n"
    assert encode(row, PAIR, prompt_format="chat") == (start + "2" + EOT + "\n", ["2" + EOT])
    row = dict(prompt=[turn("user", "1+1=")], completion=[turn("assistant", "2")])
    assert encode(row, PAIR) == (start + "2" + EOT + "\n", ["2" + EOT])
    assert encode(row | dict(completion="2"), PAIR) == (start + "2" + EOT + "\n", ["2" + EOT])


# ---- preferences ----


def pair(row: dict, columns: tuple[str, ...], **flags) -> list[tuple[str, str]]:
    """Return (prompt, completion) of chosen and rejected, and check that exactly the completion is
    trained."""
    samples = encode_pair(encoder(**flags), row | dict(_source="rows.jsonl:3"), columns)
    for s in samples:
        assert s.loss_mask == [i >= s.prompt_length for i in range(len(s.ids))]
    return [
        (TOKENIZER.decode(s.ids[: s.prompt_length]), TOKENIZER.decode(s.completion_ids))
        for s in samples
    ]


EXPLICIT, IMPLICIT = PAIR_COLUMNS


def test_pairs_with_a_prompt_column_are_encoded():
    row = dict(prompt="1+1=", chosen="2", rejected="3")
    assert pair(row, EXPLICIT) == [("1+1=", "2" + EOS), ("1+1=", "3" + EOS)]
    start = "<|turn|>user\n1+1=" + EOT + "\n<|turn|>assistant\n"
    expected = [(start, "2" + EOT), (start, "3" + EOT)]  # no token follows the end of the turn
    assert pair(row, EXPLICIT, prompt_format="chat") == expected
    row = dict(
        prompt=[turn("user", "1+1=")],
        chosen=[turn("assistant", "2")],
        rejected=[turn("assistant", "3")],
    )
    assert pair(row, EXPLICIT) == expected
    whole = dict(
        prompt="1+1=",
        chosen=row["prompt"] + row["chosen"],
        rejected=row["prompt"] + row["rejected"],
    )
    assert pair(whole, EXPLICIT) == expected  # UltraFeedback's form


def test_pairs_without_a_prompt_column_share_their_common_prefix():
    row = dict(chosen="Q: 1+1? A: it is 2", rejected="Q: 1+1? A: it was 3")
    prompt = "Q: 1+1? A: it "
    assert pair(row, IMPLICIT) == [(prompt, "is 2" + EOS), (prompt, "was 3" + EOS)]
    row = dict(chosen="Q: 1+1? A: two", rejected="Q: 1+1? A: twelve")  # a word is not cut in two
    assert pair(row, IMPLICIT) == [("Q: 1+1? A: ", "two" + EOS), ("Q: 1+1? A: ", "twelve" + EOS)]
    context = [turn("user", "hi"), turn("assistant", "ho"), turn("user", "1+1=")]
    row = dict(
        chosen=context + [turn("assistant", "2")], rejected=context + [turn("assistant", "3")]
    )
    (prompt, chosen), (same, rejected) = pair(row, IMPLICIT)
    assert (
        prompt == same
        and prompt.endswith("1+1=" + EOT + "\n<|turn|>assistant\n")
        and "ho" in prompt
    )
    assert (chosen, rejected) == ("2" + EOT, "3" + EOT)
    assert pair(dict(chosen=row["chosen"], rejected=row["chosen"]), IMPLICIT)[0] == (
        prompt,
        "2" + EOT,
    )


def test_question_and_answer_become_a_chat_with_a_template():
    row = dict(question="Why?", answer="So.")
    assert encode(row, QA) == (
        "<|turn|>user\nWhy?" + EOT + "\n<|turn|>assistant\nSo." + EOT + "\n",
        ["So." + EOT],
    )
    assert encode(row, QA, prompt_format="plain") == ("Why?\nSo." + EOS, ["So." + EOS])


def test_every_assistant_turn_is_trained_with_its_end_of_turn_and_nothing_else():
    row = dict(
        messages=[
            turn("system", "S"),
            turn("user", "a"),
            turn("assistant", "b"),
            turn("user", "b"),
            turn("assistant", " b c\n"),
        ]
    )
    text, trained = encode(row, MESSAGES)
    assert text == TOKENIZER.apply_chat_template(row["messages"], tokenize=False)
    assert trained == ["b" + EOT, " b c\n" + EOT]
    assert encode(row, MESSAGES, train_on_all=True) == (text, [text])


def test_input_and_output_become_prompt_and_completion():
    for flags in ({}, dict(prompt_format="chat")):
        assert encode(dict(input="1+1=", output="2"), INPUT, **flags) == encode(
            dict(prompt="1+1=", completion="2"), PAIR, **flags
        )


def test_prompt_turns_are_not_trained():
    row = dict(
        prompt=[turn("user", "a"), turn("assistant", "b"), turn("user", "c")], completion="d"
    )
    assert encode(row, PAIR)[1] == ["d" + EOT]


def test_system_prompt_precedes_every_chat_without_one():
    for row, columns in (
        (dict(messages=[turn("user", "a"), turn("assistant", "b")]), MESSAGES),
        (dict(question="a", answer="b"), QA),
        (dict(prompt=[turn("user", "a")], completion="b"), PAIR),
    ):
        text, trained = encode(row, columns, system_prompt="S")
        assert text.startswith("<|turn|>system\nS" + EOT + "\n<|turn|>user\na") and trained == [
            "b" + EOT
        ]
    row = dict(messages=[turn("system", "mine"), turn("user", "a"), turn("assistant", "b")])
    assert encode(row, MESSAGES, system_prompt="S") == encode(row, MESSAGES)


# ---- the prompt in training is the prompt in sampling ----

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    texts, texts, st.sampled_from(["auto", "chat", "plain"]), st.sampled_from([None, "Be brief."])
)
def test_training_prompt_equals_the_sampling_prompt(
    prompt, completion, prompt_format, system_prompt
):
    coder = encoder(
        prompt_format=prompt_format,
        system_prompt=system_prompt if prompt_format == "chat" else None,
    )
    rows = [
        (dict(prompt=prompt, completion=completion), PAIR),
        (dict(question=prompt, answer=completion), QA),
    ]
    if prompt_format != "plain":
        history = [turn("user", "x"), turn("assistant", "y"), turn("user", prompt)]
        rows.append((dict(prompt=history, completion=completion, _source="x:1"), PAIR))
    for row, columns in rows:
        sample = coder.sft(row, columns)
        assert sample.ids[: sample.prompt_length] == coder.prompt(row, columns[:1])
        assert (
            not any(sample.loss_mask[: sample.prompt_length])
            and sample.loss_mask[sample.prompt_length]
        )


def test_a_reply_reads_text_and_roles_like_a_prompt():
    """A text cannot end its turn with `--special_text text`; a role that the template does not show
    is refused."""
    end = TOKENIZER.convert_tokens_to_ids(EOT)
    said = [turn("user", f"a{EOT}b")]
    assert encoder(special_text="text").reply(said).count(end) == 1
    assert encoder(special_text="token").reply(said).count(end) == 2
    tokenizer = build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
    )
    with pytest.raises(ValueError, match="leaves it out; change the role"):
        encoder(tokenizer).reply([turn("tool", "2"), turn("user", "on")])


def test_text_after_the_end_of_turn_is_not_trained():
    sample = encoder().sft(dict(question="a", answer="b"), QA)
    assert [TOKENIZER.decode([i]) for i in sample.completion_ids] == ["b", EOT, "\n"]
    assert sample.loss_mask[-3:] == [True, True, False]


def test_malformed_rows_are_refused_by_name():
    for row, columns, what in (
        (dict(prompt="a", completion=3), PAIR, "completion is int"),
        (dict(prompt="a", completion=None), PAIR, "completion is missing"),
        (dict(messages="a"), MESSAGES, "messages must be a list"),
        (dict(messages=[dict(role="user")]), MESSAGES, "turn 1: content: Field required"),
    ):
        with pytest.raises(ValueError, match=f"rows.jsonl:7.*{what}"):
            encoder().sft(row | dict(_source="rows.jsonl:7"), columns)


# ---- overlong and identical pairs ----
