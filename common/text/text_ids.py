r"""Text -> token ids, with places that must lie between two tokens: the ends of prompts and
completions.

For example, a chat of three turns, of which the second one is trained, has two cuts:

    <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n | 5<|im_end|> | \n<|im_start|>user...

`pieces` returns the ids of each part. The first has the ids of the prompt from which the engine
samples, even if one token of the whole text covers the cut: in a vocabulary with `\n5`, the prompt
still ends with `\n`, and the trained part begins with `5`, which is what the model can sample.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise, takewhile

from common.parallel.process import first_line
from common.text.chat import any_of
from common.text.messages import bad_row

# With --special_text text, characters of this private range stand for special tokens of the data.
FIRST = 0x100000
STAND_IN = re.compile("[\U00100000-\U0010ffff]")


class TextIds:
    """Token ids of texts in pieces, by one tokenizer."""

    def __init__(self, tokenizer, ends: Iterable[str] = (), reads_hidden: bool = False):
        """`ends`: tokens that end turns, which may be added tokens that are not special. With
        `reads_hidden` the characters of `hidden` stand for special tokens that are text."""
        self.tokenizer = tokenizer
        self._stand_in = STAND_IN if reads_hidden else any_of(())
        tokens = tokenizer.added_tokens_decoder.values()
        self.special_tokens = [str(token) for token in tokens if token.special]
        self.special = any_of(self.special_tokens)
        # Not all added tokens: Gemma 3 has 6,400, and each `<` in a text would be compared to them.
        self._splits = any_of([*self.special_tokens, *ends])
        self._ids = lru_cache(maxsize=64)(self._ids_of)
        self._bos = [*takewhile(lambda i: i != self._ids("a")[0], tokenizer("a")["input_ids"])]

    def _ids_of(self, text: str, as_text: bool = False) -> list[int]:
        options = dict(split_special_tokens=True) if as_text else {}
        try:
            return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            file = f"{self.tokenizer.name_or_path}/tokenizer.json"
            problem = f"{file} cannot read {text[:20]!r}: {first_line(error)}"
            raise ValueError(problem) from error

    def pieces(
        self, text: str, cuts: Sequence[int], adds_bos: bool = False, follows: bool = False
    ) -> list[list[int]]:
        """Return the ids of the pieces of `text` between the places `cuts`, in characters.

        The first piece is tokenised alone, as a prompt is for sampling; each later one gets the ids
        that it has after the text before it. So `a|b` may have other ids than `ab`. With `adds_bos`
        the tokenizer adds BOS, once; it never adds EOS. `follows`: other text comes before this
        one, so SentencePiece must not add its blank in front. Raises `ValueError` if no token ends
        at a cut."""
        # Nothing before one of these tokens changes the ids after it.
        starts = [0, *(match.start() for match in self._splits.finditer(text))]
        pieces: list[list[int]] = []
        for begin, end in pairwise([0, *cuts, len(text)]):
            pieces.append([])
            literals = chain(*(match.span() for match in self._stand_in.finditer(text, begin, end)))
            for start, stop in pairwise([begin, *literals, end]):
                if self._stand_in.fullmatch(text, start, stop):
                    token = self.special_tokens[ord(text[start]) - FIRST]
                    pieces[-1] += self._after("", token, as_text=True)
                elif start == 0 and not follows:
                    pieces[-1] += self._ids(text[:stop], False) if stop else []
                else:
                    is_behind_literal = self._stand_in.fullmatch(text, start - 1, start)
                    head = text[starts[bisect_left(starts, start) - 1] : start]
                    head = "" if is_behind_literal else head
                    pieces[-1] += self._after(head, text[start:stop])
        if adds_bos and pieces[0][: len(self._bos)] != self._bos:
            pieces[0] = self._bos + pieces[0]
        return pieces

    def _after(self, head: str, text: str, as_text: bool = False) -> list[int]:
        """Return the ids of `text` after `head`. Without `head`, or if one token would cover the
        place between them, return those after other text. With `as_text` special tokens are text.
        Raises `ValueError` if no token ends between them."""
        if not text:
            return []
        for before in filter(None, (head, "a", "\n", ".")):
            ids = self._ids(before, as_text)
            both = self._ids(before + text, as_text)
            if both[: len(ids)] == ids:
                return both[len(ids) :]
        raise ValueError(f"the tokenizer cannot separate {text[:20]!r} from the text before it")

    def hidden(self, row: dict, text: str) -> str:
        """Return a text with a character that stands for each special token in it, which keeps its
        place while the chat template is rendered and the rest is tokenised. Raises `ValueError`
        for a text with such characters of its own."""
        if STAND_IN.search(text):
            problem = "a character beyond U+FFFFF cannot be read with --special_text text"
            raise bad_row(row, problem)
        return self.special.sub(lambda m: chr(FIRST + self.special_tokens.index(m[0])), text)
