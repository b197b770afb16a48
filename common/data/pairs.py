"""Preference rows -> pairs of samples, for the scripts that score completions."""

from common.data.encode import Encoder
from common.data.messages import IMAGE, bad_row, messages_field, text_field
from common.data.sample import Sample


def encode_pair(encoder: Encoder, row: dict, columns: tuple[str, ...]) -> list[Sample]:
    """Encode [chosen, rejected] of a preference row. The prompt has its own column or is the start
    of both. Messages of a side may repeat the prompt."""
    if "prompt" not in columns:
        row = _split_prompt(row)
    elif isinstance(row["prompt"], str) and _has_prompt(row, "chosen", "rejected"):
        text = row["prompt"].strip()
        row = _split_prompt(row)
        contents = [message["content"].replace(IMAGE, "").strip() for message in row["prompt"]]
        if text not in contents:
            raise bad_row(row, "chosen and rejected do not begin with column prompt")
    return [encoder.completion(row, "prompt", side) for side in ("chosen", "rejected")]


def _has_prompt(row: dict, *sides: str) -> bool:
    """Return whether each side is messages that begin with those of a prompt."""
    firsts = [(messages_field(row, side) or [dict(role="assistant")])[0] for side in sides]
    return all(message["role"] != "assistant" for message in firsts)


def _split_prompt(row: dict) -> dict:
    """Return the row with the shared start of `chosen` and `rejected` as `prompt`: whole messages,
    or text up to the last white space before they differ. Raises `ValueError` if they share
    nothing."""
    chosen = messages_field(row, "chosen")
    rejected = messages_field(row, "rejected")
    if (chosen is None) != (rejected is None):
        raise bad_row(row, "one of chosen and rejected lists messages, the other does not")
    if chosen is None:
        chosen = text_field(row, "chosen")
        rejected = text_field(row, "rejected")
        shared = _shared(chosen, rejected)
        while shared and not chosen[shared - 1].isspace():
            shared -= 1
        has_prompt = bool(chosen[:shared].strip())
    else:
        shared = _shared(chosen, rejected)
        if shared == min(len(chosen), len(rejected)):  # one continues the other: before its answer
            turns = [
                i for i, message in enumerate(chosen[:shared]) if message["role"] == "assistant"
            ]
            shared = turns[-1] if turns else 0
        answers = (*chosen[shared : shared + 1], *rejected[shared : shared + 1])
        has_prompt = shared > 0 and all(answer["role"] == "assistant" for answer in answers)
    if not has_prompt:
        raise bad_row(row, "chosen and rejected do not begin with the same prompt")
    return row | dict(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])


def _shared(a: str | list, b: str | list) -> int:
    """Return the number of characters or messages at which both start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
