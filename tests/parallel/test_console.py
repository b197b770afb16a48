"""Text of models, data and file names reaches a terminal without its control characters, in any
encoding."""

import io
import sys

import pytest

from common.parallel.process import print_any_text, visible

OTHER = "two\nlines\twith é, 漢字, ⟦ ⟧, a \\ and the joiners of 👩\u200d💻 and می\u200cخواهم"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("over\rwritten \x08 \x7f \x9b31m \0", r"over\rwritten \x08 \x7f \x9b31m \x00"),
        ("\u202egnp.exe \u2066 \u2069 \u200f", r"\u202egnp.exe \u2066 \u2069 \u200f"),
        ("a\u200bb\ufeff", r"a\u200bb\ufeff"),
        (OTHER, OTHER),
    ],
)
def test_control_characters_are_visible(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", rb"\u27e6\xe9\udcff"), ("latin-1", b"\\u27e6\xe9\\udcff")]
)
def test_every_encoding_prints_every_text(encoding, shown, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    print_any_text()
    print("⟦é\udcff", end="", flush=True)
    assert sys.stdout.buffer.getvalue() == shown
