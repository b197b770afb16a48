"""Text -> token ids, with places that must lie between two tokens: the ends of prompts and completions."""

from bisect import bisect_left
from collections.abc import Container, Sequence

Encoded = tuple[list[int], list[int], list[int]]  # ids of a text, and where each token starts and ends in it
ANCHORS = ("a", "\n", ".")  # a text that is tokenised as a continuation follows one of them


def pieces_of(
    tokenizer, text: str, cuts: Sequence[int], special: bool = False, added: Container[int] = ()
) -> list[list[int]]:  # fmt: skip
    """Return the ids of the pieces of `text` between the places `cuts`, in characters.

    Together they are the ids of the whole text. Only if one token would cover a cut is the text before the cut
    tokenised alone, as a prompt is, and the text behind it as a continuation. With `special` the tokenizer adds BOS,
    once; it never adds EOS. `added`: the tokenizer's added tokens, which save work; they do not change the result.
    """
    if not cuts and not special:
        return [tokenizer(text, add_special_tokens=False)["input_ids"]]
    encoded = _encode(tokenizer, text, special)
    bounds = [0]
    for number, cut in enumerate(cuts):
        bound = _bound(tokenizer, text, cut, encoded, special, added)
        if bound is None:
            before = pieces_of(tokenizer, text[:cut], cuts[:number], special, added)
            later = [place - cut for place in cuts[number + 1 :]]
            return before + continuation(tokenizer, text[cut:], later, added)
        bounds.append(bound)
    ids, _, _ = encoded
    return [ids[start:end] for start, end in zip(bounds, [*bounds[1:], len(ids)], strict=True)]


def _encode(tokenizer, text: str, special: bool) -> Encoded:
    """Return the ids of a text, and the places where the characters of each token start and end."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if special and ids and ids[-1] == tokenizer.eos_token_id and offsets[-1] == (0, 0):
        ids, offsets = ids[:-1], offsets[:-1]
    if special and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:  # the text has its own BOS
        ids, offsets = ids[1:], offsets[1:]
    return ids, [start for start, _ in offsets], [end for _, end in offsets]


def _bound(
    tokenizer, text: str, cut: int, encoded: Encoded, special: bool = False, added: Container[int] = ()
) -> int | None:  # fmt: skip
    """Return the number of tokens before `cut`; None if the text before it, alone, has other tokens."""
    ids, starts, ends = encoded
    count = bisect_left(starts, cut)
    is_between = (count == len(ids) or starts[count] == cut) and (count == 0 or ends[count - 1] == cut)
    if is_between and not _looks_ahead(text, cut):
        return count
    last = next((i for i in range(count - 1, -1, -1) if ids[i] in added), None)
    if is_between and last is not None:  # nothing before an added token depends on what follows it
        tail = text[ends[last] : cut]
        if _encode(tokenizer, tail, special=False)[0] == ids[last + 1 : count]:
            return count
    # Some tokenizers trim the places of their tokens, and some tokens swallow the white space behind them.
    return count if ids[:count] == _encode(tokenizer, text[:cut], special)[0] else None


def _looks_ahead(text: str, cut: int) -> bool:
    """Return whether the tokens before `cut` may depend on the text behind it: tokenizers group digits, and split the
    last blank from others if a word follows."""
    blanks = cut >= 2 and text[cut - 2 : cut].isspace()
    return blanks or (text[cut - 1 : cut].isalnum() and text[cut : cut + 1].isalnum())


def continuation(tokenizer, text: str, cuts: Sequence[int], added: Container[int] = ()) -> list[list[int]]:
    """Return the pieces of a text that follows other text: without BOS or the blank that SentencePiece adds."""
    for anchor in ANCHORS:
        whole = anchor + text
        if _bound(tokenizer, whole, len(anchor), _encode(tokenizer, whole, special=False)) is not None:
            places = [len(anchor), *(cut + len(anchor) for cut in cuts)]
            return pieces_of(tokenizer, whole, places, added=added)[1:]
    raise ValueError(f"the tokenizer cannot separate {text[:20]!r} from the text before it")
