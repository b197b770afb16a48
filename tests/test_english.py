"""Plain English: docstrings do not open with words that hide the subject, and no text has a banned
phrase."""

import ast
import re
from pathlib import Path

from helpers import ROOT

OPENERS = re.compile(r"(What|Of|As|Its|Until|Those|Nobody)\b")
BANNED = re.compile(
    r"\b(nobody|everyone|in work(?!\.)|is told|told of|lets go|what came of)\b", re.IGNORECASE
)
PLACES = (
    "*.py",
    "*.md",
    "common/**/*.py",
    "tools/*.py",
    "exercises/*.*",
    "site/*.py",
    "tests/**/*.py",
    "bench/**/*.py",
    "docs/**/*.md",
)


def docstrings(source: str) -> list[str]:
    """Return the string statements of a file: docstrings of modules, classes, functions and
    fields."""
    nodes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def offences(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    opened = (
        [line for line in docstrings(text) if OPENERS.match(line)] if path.suffix == ".py" else []
    )
    return [line.splitlines()[0] for line in opened] + BANNED.findall(
        " ".join(text.replace("#", " ").split())
    )


def test_texts_have_no_offences():
    files = {path for place in PLACES for path in ROOT.glob(place)} - {Path(__file__)}
    found = {str(path): offences(path) for path in sorted(files)}
    assert len(found) > 200 and {path: lines for path, lines in found.items() if lines} == {}
