"""`--stop`: texts that end a turn of the model at the token that completes one of them.

The text is the decoded turn, without the tokens that are no text. A stop string may span tokens,
and a token may have only some of the bytes of a character. To look at every new token in constant
time, only the last tokens are decoded."""

from collections.abc import Sequence, Set

# before a stop string: decoders change the text of the first tokens, and some tokens are no text
MORE_TOKENS = 16


class StopStrings:
    def __init__(self, strings: Sequence[str], tokenizer, silent_ids: Set[int]):
        """`silent_ids`: tokens that are no text."""
        self.strings = strings
        self.tokenizer = tokenizer
        self.silent_ids = silent_ids
        # SentencePiece decodes a run of byte tokens as a whole: one false byte spoils all
        byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
        byte_ids = {i for token, i in tokenizer.get_vocab().items() if token in byte_tokens}
        self.joined_ids = byte_ids | silent_ids
        # a token of text has at least one byte
        self.window = max(len(string.encode()) for string in strings) + MORE_TOKENS

    def end_of_turn(self, ids: list[int], start: int, seen: int) -> int | None:
        """Return the end of the turn `ids[start:]`: the place behind the first token, of those
        behind place `seen`, that completes a stop string. None if there is none."""
        ends = range(seen + 1, len(ids) + 1)
        return next((end for end in ends if self.is_complete(ids, start, end)), None)

    def is_complete(self, ids: list[int], start: int = 0, end: int | None = None) -> bool:
        """Return whether the last token of the turn `ids[start:end]` completes a stop string, if no
        earlier token does."""
        end = len(ids) if end is None else end
        if end == start or ids[end - 1] in self.silent_ids:
            return False
        first = max(start, end - self.window)
        while first > start and ids[first] in self.joined_ids:
            first -= 1
        text_ids = [token for token in ids[first:end] if token not in self.silent_ids]
        text = self.tokenizer.decode(text_ids, skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def without_stop(self, text: str) -> str:
        """Return the text of a turn up to the first stop string."""
        places = [text.index(string) for string in self.strings if string in text]
        return text[: min(places, default=None)]
