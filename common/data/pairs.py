"""Preference rows -> pairs of samples, for the scripts that score completions."""

from collections import Counter
from collections.abc import Callable

from common.config.groups import BaseArgs
from common.data.encode import Encoder, truncate
from common.data.messages import IMAGE, messages_field, text_field
from common.data.rows import encode_each
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
            problem = "chosen and rejected do not begin with column prompt"
            raise ValueError(f"{row['_source']}: {problem}")
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
        problem = "one of chosen and rejected lists messages, the other does not"
        raise ValueError(f"{row['_source']}: {problem}")
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
        problem = "chosen and rejected do not begin with the same prompt"
        raise ValueError(f"{row['_source']}: {problem}")
    return row | dict(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])


def _shared(a: str | list, b: str | list) -> int:
    """Return the number of characters or messages at which both start."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def encode_pairs(
    rows: list[dict], encode: Callable[[dict], list[Sample]], args: BaseArgs
) -> tuple[list[list[Sample]], Counter]:
    """Encode rows to [chosen, rejected] or [completion] of at most `--max_length` tokens, and count
    the rows that were dropped or changed, by reason. Pairs whose chosen and rejected are the same
    are dropped. `--overlong` applies; with `--on_bad_row skip` its errors are drops. Raises
    `ValueError` naming the row."""
    pairs = []
    counts = Counter()
    is_strict = args.on_bad_row == "error"
    for row, pair in encode_each(rows, encode, args.on_bad_row):
        length = max(len(sample.ids) for sample in pair)
        if length > args.max_length:
            if args.overlong == "error" and is_strict:
                problem = f"{length} tokens exceed --max_length {args.max_length}"
                raise ValueError(f"{row['_source']}: {problem}; set --overlong drop or truncate")
            prompt_length = max(sample.prompt_length for sample in pair)
            if args.overlong != "truncate" or prompt_length >= args.max_length:
                counts["dropped as too long (--max_length)"] += 1
                continue
            counts["truncated (--max_length)"] += 1
            pair = [truncate(sample, args.max_length) for sample in pair]
        if len(pair) == 2 and pair[0].ids == pair[1].ids:
            counts["with chosen = rejected, dropped"] += 1
            continue
        pairs.append(pair)
    return pairs, counts
