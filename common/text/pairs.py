"""Preference rows -> pairs of samples (chosen, rejected), for dpo.py, rm.py and their like."""

import os
import re
from itertools import takewhile

from common.packs.sample import Sample
from common.text.encode import Encoder
from common.text.messages import IMAGE, bad_row, messages_field, prompt_apart, text_field

# The start of a text that is a whole conversation (`Human: 1+1=? Assistant: 2`), and of a reply.
TRANSCRIPT = re.compile(r"\s*(?:human|user):", re.IGNORECASE)
REPLY = re.compile(r"\n\s*(?:assistant|ai|bot|model|gpt|chatgpt):\s*", re.IGNORECASE)


def encode_pair(encoder: Encoder, row: dict, columns: tuple[str, ...]) -> list[Sample]:
    """Encode [chosen, rejected] of a preference row. The prompt is in a column of its own, or is
    what both sides begin with. Sides that are messages may repeat the prompt of the column."""
    if "prompt" not in columns:
        row = _split_prompt(row)
        if isinstance(row["prompt"], str) and not TRANSCRIPT.match(row["prompt"]):
            note = "no column prompt: all words with which chosen and rejected begin are the prompt"
            encoder.say_once(f"{note}, also if they are of both answers", kind="prompt")
    elif messages_field(row, "prompt") is None and _has_prompt(row):
        text = text_field(row, "prompt").strip()
        row = _split_prompt(row)
        contents = [message["content"].replace(IMAGE, "").strip() for message in row["prompt"]]
        if text not in contents:
            raise bad_row(row, "chosen and rejected do not begin with column prompt")
    elif encoder.chat:
        row = prompt_apart(row, "prompt", ("chosen", "rejected"))
    return [encoder.completion(row, "prompt", side) for side in ("chosen", "rejected")]


def _has_prompt(row: dict) -> bool:
    """Return whether both sides are messages and begin with a prompt."""
    sides = [messages_field(row, side) for side in ("chosen", "rejected")]
    return all(messages and messages[0]["role"] != "assistant" for messages in sides)


def _split_prompt(row: dict) -> dict:
    """Move the start that `chosen` and `rejected` share into `prompt`. Of messages, it is whole
    messages; of texts, the text up to the last white space before they differ, or, in a transcript,
    up to the last shared `Assistant:`. Raises `ValueError` if they share nothing."""
    chosen = messages_field(row, "chosen")
    rejected = messages_field(row, "rejected")
    if (chosen is None) != (rejected is None):
        raise bad_row(row, "one of chosen and rejected lists messages, the other does not")
    if chosen is None:
        chosen = text_field(row, "chosen")
        rejected = text_field(row, "rejected")
        start = os.path.commonprefix([chosen, rejected])
        ends = [i for i, character in enumerate(start, 1) if character.isspace()]
        if TRANSCRIPT.match(start):
            ends = [reply.end() for reply in REPLY.finditer(start)]
        shared = max(ends, default=0)
        has_prompt = bool(start[:shared].strip())
    else:
        pairs = zip(chosen, rejected, strict=False)
        shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if shared == min(len(chosen), len(rejected)):  # one side continues the other
            turns = [i for i in range(shared) if chosen[i]["role"] == "assistant"]
            shared = turns[-1] if turns else 0
        answers = (*chosen[shared : shared + 1], *rejected[shared : shared + 1])
        has_prompt = shared > 0 and all(answer["role"] == "assistant" for answer in answers)
    if not has_prompt:
        raise bad_row(row, "chosen and rejected do not begin with the same prompt")
    return row | dict(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])
