"""Rows of small chats, templates and tokenizers that read them, and the spans that they train."""

from itertools import groupby

import pytest
from helpers import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from common.config.groups import BaseArgs
from common.packs.sample import Sample
from common.text.columns import PAIR_COLUMNS, PROMPT_COLUMNS, SFT_COLUMNS
from common.text.encode import Encoder
from common.text.pairs import encode_pair

EOT, EOS = "<|end_of_turn|>", "<|eos|>"  # of the tiny tokenizer
SOURCE = dict(_source="rows.jsonl:3")


def turn(role: str, content: object, **more: object) -> dict:
    return dict(role=role, content=content, **more)


def said(content: object, **more: object) -> dict:
    return turn("assistant", content, **more)


TOOL = dict(type="function", function=dict(name="add", parameters=dict(type="object")))
CALL = dict(type="function", id="abcdefghi", function=dict(name="add", arguments=dict(a=1, b=1)))
ASKED = turn("user", "Why hi, what is in it?")
CALLS = [ASKED, said(None, tool_calls=[CALL]), turn("tool", "2"), said("It is 2.")]

# ---- templates ----

HEAD, END = "{{ '<|turn|>' + m.role + '\n' }}", "{{ '<|end_of_turn|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
CALL_TEXTS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}"
)


def loop(turn: str, prompt: str = PROMPT) -> str:
    """Return a template from the text of a message `m`."""
    return "{% for m in messages %}" + turn + "{% endfor %}" + prompt


def chat(text: str = "{{ m.content }}") -> str:
    """Return a template like that of the tiny model from the text between head and end of turn."""
    return loop(HEAD + text + END)


# Reads all that a template can: tools, thoughts, calls, and a switch.
READS_ALL = (
    "{% if brief %}{{ 'Brief!\n' }}{% endif %}"
    "{% if tools %}{{ '<|turn|>tools\n' + tools | tojson + '<|end_of_turn|>\n' }}{% endif %}"
    + chat("{{ (m.reasoning_content or '') + m.content }}" + CALL_TEXTS)
)


def encoder(template: str | None = None, tokens: str = "", bos=None, **flags: object) -> Encoder:
    """Return an encoder of the tiny tokenizer with a template, its own by default, and further
    tokens. It adds BOS, if any, to plain text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.add_tokens(tokens.split())
    if bos:
        tokenizer.add_special_tokens(dict(bos_token=bos))
        ids = [(bos, tokenizer.bos_token_id)]
        adds_bos = TemplateProcessing(f"{bos} $A", special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = adds_bos
    return Encoder(tokenizer, BaseArgs(**flags))


# ---- encoded rows ----


def samples(coder: Encoder, train_on: str = "completion", **row: object) -> list[Sample]:
    """Return what a script makes of a row: [chosen, rejected], the sequences of a supervised row,
    or a prompt."""
    row |= SOURCE
    choices = (*PAIR_COLUMNS, *SFT_COLUMNS, *PROMPT_COLUMNS)
    columns = next(columns for columns in choices if row.keys() >= {*columns})
    if columns in PAIR_COLUMNS:
        return encode_pair(coder, row, columns)
    if columns in SFT_COLUMNS:
        return coder.sft(row, columns, train_on)
    ids = coder.prompt(row, columns)
    return [Sample(ids, bytes(len(ids)))]


def encoded(coder: Encoder, **row: object) -> list[tuple[list[int], list[bool]]]:
    return [([*x.ids], [*map(bool, x.loss_mask)]) for x in samples(coder, **row)]


def refused(coder: Encoder, words: str, **row: object) -> None:
    """Require that a row is refused in one line with its place and these words, a pattern."""
    with pytest.raises(ValueError, match=rf"^rows\.jsonl:3: .*{words}") as error:
        samples(coder, **row)
    assert "\n" not in str(error.value)


def parts(sample: Sample) -> list[tuple[bool, list[int]]]:
    """Return the parts of a sample: whether each is trained, and its ids."""
    found = groupby(zip(sample.loss_mask, sample.ids, strict=True), lambda token: token[0])
    return [(bool(is_trained), [i for _, i in part]) for is_trained, part in found]


def spans(coder: Encoder, sample: Sample) -> list[str]:
    """Return the texts of the trained parts of a sample."""
    return [coder.tokenizer.decode(ids) for is_trained, ids in parts(sample) if is_trained]


def prompt(coder: Encoder, *messages: dict, **row: object) -> str:
    """Return the text from which the next turn is sampled."""
    return coder.tokenizer.decode(samples(coder, prompt=[*messages], **row)[0].ids)
