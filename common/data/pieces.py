"""Text -> token ids, with places that must lie between two tokens: the ends of prompts and
completions."""

from bisect import bisect_left
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import NamedTuple

ANCHORS = ("a", "\n", ".")  # a text that is tokenised as a continuation follows one of them


class Tokens(NamedTuple):
    """Tokens of a text: their ids, and where each one starts and ends in it."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def pieces_of(
    tokenizer, text: str, cuts: Sequence[int], adds_bos: bool = False, added: Container[int] = (),
) -> list[list[int]]:  # fmt: skip
    """Return the ids of the pieces of `text` between the places `cuts`, in characters.

    Together they are the ids of the whole text. Only if one token would cover a cut is the text
    before the cut tokenised alone, as a prompt is, and the text behind it as a continuation. With
    `adds_bos` the tokenizer adds BOS, once; it never adds EOS. `added`: the tokenizer's added
    tokens, which save work; they do not change the result."""
    if not cuts and not adds_bos:
        return [tokenizer(text, add_special_tokens=False)["input_ids"]]
    tokens = _tokens(tokenizer, text, adds_bos)
    bounds = [0]
    for number, cut in enumerate(cuts):
        bound = _bound(tokenizer, text, cut, tokens, adds_bos, added)
        if bound is None:
            before = pieces_of(tokenizer, text[:cut], cuts[:number], adds_bos, added)
            later = [place - cut for place in cuts[number + 1 :]]
            return before + continuation(tokenizer, text[cut:], later, added)
        bounds.append(bound)
    bounds.append(len(tokens.ids))
    return [tokens.ids[start:end] for start, end in pairwise(bounds)]


def _tokens(tokenizer, text: str, adds_bos: bool) -> Tokens:
    encoded = tokenizer(text, add_special_tokens=adds_bos, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    offsets = encoded["offset_mapping"]
    first = 0
    last = len(ids)
    if adds_bos and ids and ids[-1] == tokenizer.eos_token_id and offsets[-1] == (0, 0):
        last -= 1
    if adds_bos and last > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        first = 1  # the text has its own BOS
    offsets = offsets[first:last]
    return Tokens(ids[first:last], [start for start, _ in offsets], [end for _, end in offsets])


def _bound(
    tokenizer, text: str, cut: int, tokens: Tokens, adds_bos: bool, added: Container[int]
) -> int | None:
    """Return the number of tokens before `cut`; None if the text before it, alone, has other
    tokens."""
    ids, starts, ends = tokens
    count = bisect_left(starts, cut)
    is_start = count == len(ids) or starts[count] == cut
    is_end = count == 0 or ends[count - 1] == cut
    if is_start and is_end:
        if not _looks_ahead(text, cut):
            return count
        # nothing before an added token depends on what follows it
        last = next((i for i in reversed(range(count)) if ids[i] in added), None)
        if last is not None:
            tail = _tokens(tokenizer, text[ends[last] : cut], adds_bos=False)
            if tail.ids == ids[last + 1 : count]:
                return count
    # Some tokenizers trim the places of their tokens, and some tokens swallow the white space
    # behind them.
    alone = _tokens(tokenizer, text[:cut], adds_bos)
    return count if ids[:count] == alone.ids else None


def _looks_ahead(text: str, cut: int) -> bool:
    """Return whether the tokens before `cut` may depend on the text behind it: tokenizers group
    digits, and split the last blank from others if a word follows."""
    has_blanks = cut >= 2 and text[cut - 2 : cut].isspace()
    return has_blanks or (text[cut - 1 : cut].isalnum() and text[cut : cut + 1].isalnum())


def continuation(
    tokenizer, text: str, cuts: Sequence[int], added: Container[int] = ()
) -> list[list[int]]:
    """Return the pieces of a text that follows other text: without BOS or the blank that
    SentencePiece adds."""
    for anchor in ANCHORS:
        whole = anchor + text
        start = len(anchor)
        tokens = _tokens(tokenizer, whole, adds_bos=False)
        if _bound(tokenizer, whole, start, tokens, adds_bos=False, added=()) is not None:
            places = [start, *(start + cut for cut in cuts)]
            _, *pieces = pieces_of(tokenizer, whole, places, added=added)
            return pieces
    raise ValueError(f"the tokenizer cannot separate {text[:20]!r} from the text before it")
