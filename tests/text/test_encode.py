"""Rows become exact ids and masks, and a prompt has the same ids in training and in sampling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text.chats import EOS, EOT, encoder, refused, said, samples, spans, turn

ASKED = turn("user", "1+1=")
TWO, THREE = said("2"), said("3")
TALK, SURE = [turn("user", "hi"), said("ho"), ASKED], [turn("user", "Sure?"), THREE]
Q = f"<|turn|>user\n1+1={EOT}\n<|turn|>assistant\n"
HI = Q.replace("1+1=", "hi")
TALKED = f"{HI}ho{EOT}\n{Q}"
CHAT, PLAIN = dict(prompt_format="chat"), dict(prompt_format="plain")
APART = "chosen and rejected do not begin with the same prompt"
A2, A3 = f"2{EOT}", f"3{EOT}"

# Flags and a row, and for each of its samples the prompt and the trained spans.
ENCODED = [
    ({}, dict(text="abc"), [("", "abc" + EOS)]),
    ({}, dict(prompt="1+1=", completion="2"), [("1+1=", "2" + EOS)]),
    (CHAT, dict(prompt="1+1=", completion="2"), [(Q, A2)]),
    ({}, dict(input="1+1=", output="2"), [("1+1=", "2" + EOS)]),
    (CHAT, dict(input="1+1=", output="2"), [(Q, A2)]),
    ({}, dict(question="1+1=", answer="2"), [(Q, A2)]),
    (PLAIN, dict(question="1+1=", answer="2"), [("1+1=\n", "2" + EOS)]),
    ({}, dict(prompt=[ASKED], completion="2"), [(Q, A2)]),
    ({}, dict(prompt=[ASKED], completion=[TWO]), [(Q, A2)]),
    ({}, dict(prompt=TALK, completion="2"), [(TALKED, A2)]),
    ({}, dict(messages=[*TALK, said(" b c\n")]), [(HI, f"ho{EOT}", f" b c\n{EOT}")]),
    # preferences
    ({}, dict(prompt="1+1=", chosen="2", rejected="3"), [("1+1=", "2" + EOS), ("1+1=", "3" + EOS)]),
    (CHAT, dict(prompt="1+1=", chosen="2", rejected="3"), [(Q, A2), (Q, A3)]),
    ({}, dict(prompt=[ASKED], chosen=[TWO], rejected=[THREE]), [(Q, A2), (Q, A3)]),
    # preferences without a prompt; words are not cut in two
    ({}, dict(chosen="Q a 2", rejected="Q a 3"), [("Q a ", "2" + EOS), ("Q a ", "3" + EOS)]),
    ({}, dict(chosen="Q two", rejected="Q twin"), [("Q ", "two" + EOS), ("Q ", "twin" + EOS)]),
    # a transcript: its answers may begin alike
    *(
        (
            {},
            dict(chosen=f"{start}I like 2", rejected=f"{start}I like 3"),
            [(start, "I like 2" + EOS), (start, "I like 3" + EOS)],
        )
        for start in (
            "Human: a\n\nAssistant: ",
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: ",
            "USER: a\nASSISTANT:",
            "Human: a Assistant: b\n\nAI: ",
        )
    ),
    ({}, dict(chosen=[*TALK, TWO], rejected=[*TALK, THREE]), [(TALKED, A2), (TALKED, A3)]),
    ({}, dict(chosen=[*TALK, TWO], rejected=[*TALK, TWO]), [(TALKED, A2), (TALKED, A2)]),
    # one side goes on: the prompt ends before their last shared answer
    ({}, dict(chosen=[ASKED, TWO], rejected=[ASKED, TWO, *SURE]), [(Q, A2), (Q, A2, A3)]),
    ({}, dict(chosen=[ASKED, TWO, *SURE], rejected=[ASKED, TWO]), [(Q, A2, A3), (Q, A2)]),
    # a prompt that the answer repeats
    ({}, dict(prompt=[ASKED], completion=[ASKED, TWO]), [(Q, A2)]),
    ({}, dict(prompt="1+1=", completion=[ASKED, TWO]), [(Q, A2)]),
    ({}, dict(prompt=TALK, completion=[*TALK, TWO]), [(TALKED, A2)]),
    ({}, dict(prompt="1+1=", chosen=[ASKED, TWO], rejected="3"), [(Q, A2), (Q, A3)]),
    ({}, dict(prompt=[ASKED], chosen=[ASKED, TWO], rejected=[THREE]), [(Q, A2), (Q, A3)]),
    ({}, dict(prompt="1+1=", chosen=[ASKED, TWO], rejected=[ASKED, THREE]), [(Q, A2), (Q, A3)]),
]


@pytest.mark.parametrize(("flags", "row", "expected"), ENCODED)
def test_rows_are_encoded(flags, row, expected):
    """No token follows a completion that is scored."""
    coder = encoder(**flags)
    found = samples(coder, **row)
    prompts = [coder.tokenizer.decode(sample.prompt_ids) for sample in found]
    assert prompts == [asked for asked, *_ in expected]
    assert [spans(coder, sample) for sample in found] == [answers for _, *answers in expected]
    assert "chosen" not in row or all(sample.loss_mask[-1] for sample in found)


def test_words_of_both_answers_in_a_prompt_are_said_once(capsys):
    coder = encoder()
    human = "Human: a\n\nAssistant: "
    for start, notes in ((human, 0), ("Q a ", 1), ("Q b ", 0)):
        samples(coder, chosen=f"{start}2", rejected=f"{start}3")
        assert capsys.readouterr().out.count("no column prompt: all words with which") == notes
    refused(coder, APART, chosen="Human: 1?\nAssistant: 1", rejected="Human: 2?\nAssistant: 2")


# ---- the prompt in training is the prompt in sampling ----

characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, min_size=1, max_size=20).filter(str.strip)
formats = st.sampled_from(["auto", "chat", "plain"])


@given(texts, texts, formats, st.sampled_from([None, "Be brief."]))
def test_training_prompt_equals_the_sampling_prompt(asked, answer, prompt_format, system):
    flags = dict(system_prompt=system) if prompt_format == "chat" else {}
    coder = encoder(prompt_format=prompt_format, **flags)
    rows = [dict(prompt=asked, completion=answer), dict(question=asked, answer=answer)]
    if prompt_format != "plain":
        history = [turn("user", "x"), said("y"), turn("user", asked)]
        rows.append(dict(prompt=history, completion=answer))
    for row in rows:
        (sample,) = samples(coder, **row)
        name = next(iter(row))
        assert samples(coder, **{name: row[name]})[0].ids == sample.prompt_ids
        assert sample.loss_mask.index(True) == sample.prompt_length


def test_a_reply_reads_text_and_roles_like_a_prompt():
    """A text cannot end its turn with `--special_text text`; a role that the template does not show
    is refused."""
    end = encoder().tokenizer.convert_tokens_to_ids(EOT)
    messages = [turn("user", f"a{EOT}b")]
    assert encoder(special_text="text").reply(messages).count(end) == 1
    assert encoder(special_text="token").reply(messages).count(end) == 2
    for role in ("tool", "assistant"):
        silent = encoder().tokenizer.chat_template.replace(
            "in messages %}", f"in messages if message.role != '{role}' %}}"
        )
        with pytest.raises(ValueError, match="leaves it out; change the role"):
            encoder(silent).reply([turn("tool", "2"), turn("user", "on")])
