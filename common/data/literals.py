"""The text of a special token in the data, such as <|im_end|> in a question, kept as text:
--special_text text.

A character that stands for the text keeps its place while the chat template is rendered and the
rest is tokenised."""

import re
from collections.abc import Container, Sequence

from common.data.pieces import ANCHORS, continuation, pieces_of

FIRST = 0x100000  # of a private range of Unicode
_STAND_INS = re.compile("[\U00100000-\U0010ffff]")


def hidden(source: str, text: str, tokens: Sequence[str]) -> str:
    """Return a text with a stand-in for each of the special tokens in it. Raises `ValueError` for a
    text with stand-ins of its own; `source` is its row."""
    if _STAND_INS.search(text):
        problem = "a character beyond U+FFFFF cannot be read with --special_text text"
        raise ValueError(f"{source}: {problem}")
    for number, token in enumerate(tokens):
        text = text.replace(token, chr(FIRST + number))
    return text


def pieces_with_literals(
    tokenizer,
    text: str,
    cuts: Sequence[int],
    adds_bos: bool,
    added: Container[int],
    tokens: Sequence[str],
) -> list[list[int]]:
    """Return what `pieces_of` does, for a text with stand-ins for `tokens`."""
    pieces: list[list[int]] = [[]]
    place = 0
    for end in [*(match.start() for match in _STAND_INS.finditer(text)), len(text)]:
        chunk = text[place:end]
        inner = [cut - place for cut in cuts if place <= cut <= end]
        if place == 0:
            first, *others = pieces_of(tokenizer, chunk, inner, adds_bos, added)
        elif chunk:
            first, *others = continuation(tokenizer, chunk, inner, added)
        else:
            first, *others = [[] for _ in range(len(inner) + 1)]
        pieces[-1] += first
        pieces += others
        if end < len(text):
            pieces[-1] += _as_text(tokenizer, tokens[ord(text[end]) - FIRST])
        place = end + 1
    return pieces


def _as_text(tokenizer, token: str) -> list[int]:
    """Return the ids of the characters of a special token, behind other text."""
    options = dict(add_special_tokens=False, split_special_tokens=True)
    for anchor in ANCHORS:
        head = tokenizer(anchor, **options)["input_ids"]
        ids = tokenizer(anchor + token, **options)["input_ids"]
        if ids[: len(head)] == head:
            return ids[len(head) :]
    problem = f"the tokenizer cannot separate {token} from the text before it"
    raise ValueError(f"--special_text text: {problem}")
