r"""Text -> token ids. Training must see the ids that the model would sample, so a prompt is
tokenised as an engine gets it, and the model's turn as a continuation of it.

For example, the vocabulary has a token `\n5`, and a prompt ends in `assistant\n`. Tokenised as one
text, the prompt and the answer `5` would share this token. But the model gets the `\n` in its
prompt and samples `5`."""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise, takewhile

from common.parallel.process import first_line
from common.text.chat import any_of
from common.text.messages import bad_row

# With --special_text text, characters of this private range replace special tokens in the data.
FIRST = 0x100000
STAND_IN = re.compile("([\U00100000-\U0010ffff])")
OTHERS = ("a", "\n", ".")  # `TextIds.after` tries these texts in place of the prompt


class TextIds:
    """Tokenises texts with one tokenizer."""

    def __init__(self, tokenizer, ends: Iterable[str] = (), reads_hidden: bool = False):
        """`ends`: the tokens that end turns; the tokenizer may not call them special.
        `reads_hidden`: texts have been through `hidden`, so its characters are special tokens that
        are read as plain text."""
        self.tokenizer = tokenizer
        self._stand_in = STAND_IN if reads_hidden else re.compile("((?!))")
        tokens = tokenizer.added_tokens_decoder.values()
        self.special_tokens = [str(token) for token in tokens if token.special]
        self.special = any_of(self.special_tokens)
        # A text is cut before each special token and turn end ("parting" tokens), and its parts are
        # tokenised alone, with the ids of the whole: nothing before such a token changes the ids
        # after it, and it takes no characters from before it. Other added tokens do not cut: Gemma
        # 3 has 6,400, and each `<` would be compared with them.
        ends = {*ends}
        free = [x for x in tokens if not (x.lstrip or x.single_word or x.normalized)]
        chosen = {str(x) for x in free if x.special or str(x) in ends}
        others = " ".join(x for x in map(str, tokens) if x not in chosen)
        parting = [x for x in chosen if x not in others]
        self._parting = any_of(parting)
        self._longest = max(map(len, parting), default=0)
        self._scanned: tuple[str, list[int]] = ("", [])  # the last text, its parting tokens
        self._ids = lru_cache(maxsize=512)(self._ids_of_part)
        self._bos = array("i", takewhile(lambda i: i != self._ids("a")[0], self._tokens("a", True)))

    def ids(self, text: str, adds_bos: bool = False) -> array:
        """Return the ids of a text, int32. With `adds_bos`, they begin with BOS if the tokenizer
        adds one; a BOS in the text is not doubled. EOS is never added."""
        ids = self._joined(text, self._starts(text))
        return self._bos + ids if adds_bos and ids[: len(self._bos)] != self._bos else ids

    def after(self, prompt: str, text: str) -> array:
        """Return the ids that the model would sample for `text` after `prompt`: tokenise both
        together and cut off the prompt's ids. If a token would reach across the border, or there is
        no prompt, do the same with another text, such as a line break, in front. Raises
        `ValueError` if tokens reach across the border there, too."""
        before = prompt[[0, *self._starts(prompt)][-1] :] if prompt else ""
        return self._behind(before, text, lambda x: self._joined(x, self._find(x)))

    def hidden(self, row: dict, text: str) -> str:
        """Replace each special token in a text by a stand-in, a private character, so that the chat
        template and the tokenizer do not take it for a token. `ids` turns it back into plain text.
        Raises `ValueError` if the text has such characters itself."""
        if STAND_IN.search(text):
            problem = "a character beyond U+FFFFF cannot be read with --special_text text"
            raise bad_row(row, problem)
        return self.special.sub(lambda m: chr(FIRST + self.special_tokens.index(m[0])), text)

    def _behind(self, before: str, text: str, ids_of: Callable[[str], array]) -> array:
        if not text:
            return array("i")
        for other in filter(None, (before, *OTHERS)):
            ids = ids_of(other)
            both = ids_of(other + text)
            if both[: len(ids)] == ids:
                return both[len(ids) :]
        raise ValueError(f"the tokenizer cannot separate {text[:20]!r} from the text before it")

    # ---- parts between special tokens ----

    def _find(self, text: str, start: int = 0) -> list[int]:
        return [match.start() for match in self._parting.finditer(text, start)]

    def _starts(self, text: str) -> list[int]:
        """Return where the parting tokens of a text begin. The next prompt of a conversation begins
        like the one before: that part is not searched again."""
        before, starts = self._scanned
        known = starts[: bisect_right(starts, shared_length(before, text) - self._longest)]
        starts = known[:-1] + self._find(text, known[-1] if known else 0)
        self._scanned = (text, starts)
        return starts

    def _joined(self, text: str, starts: list[int]) -> array:
        ids = array("i")
        for start, end in pairwise([0, *starts, len(text)]):
            if start < end:
                ids.extend(self._ids(text[start:end]))
        return ids

    def _ids_of_part(self, text: str) -> array:
        first, *rest = self._stand_in.split(text)
        ids = self._tokens(first) if first else array("i")
        for hidden, following in zip(rest[::2], rest[1::2], strict=True):
            token = self.special_tokens[ord(hidden) - FIRST]
            ids += self._behind("", token, lambda x: self._tokens(x, split_special_tokens=True))
            ids += self._behind("", following, self._tokens)
        return ids

    def _tokens(self, text: str, add_special_tokens: bool = False, **options: bool) -> array:
        try:
            ids = self.tokenizer(text, add_special_tokens=add_special_tokens, **options)
            return array("i", ids["input_ids"])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            file = f"{self.tokenizer.name_or_path}/tokenizer.json"
            problem = f"{file} cannot read {text[:20]!r}: {first_line(error)}"
            raise ValueError(problem) from error


def shared_length(one: str, other: str) -> int:
    """Return how many characters two texts share at their start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
