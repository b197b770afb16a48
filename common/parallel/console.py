"""Text of models, data and file names on a terminal: it controls no terminal, and every encoding
can print it."""

import io
import re
import sys

# Control characters but line feed and tab, marks of direction, and characters without width that
# belong to no word.
UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]"
)


def visible(text: str) -> str:
    r"""Return text whose control characters are escapes, such as \x1b. Line feeds and tabs stay."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_any_text() -> None:
    """Make stdout and stderr print characters that their encoding lacks as escapes. Programs call
    it first."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has others
            stream.reconfigure(errors="backslashreplace")
