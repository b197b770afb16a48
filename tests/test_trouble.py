"""docs/trouble.md quotes messages that the program prints."""

import ast
import re

import pytest
from helpers import ROOT

ROWS = re.findall(r"^\| ([^|]*`[^|]*) \|", (ROOT / "docs/trouble.md").read_text(), re.M)
QUOTES = [quote for row in ROWS for quote in re.findall(r"`([^`]+ [^`]+)`", row)]
OF_LIBRARIES = {"Name or service not known", "CUDA out of memory"}


@pytest.fixture(scope="module")
def texts() -> str:
    """The literal text of all modules; a null character stands for what is filled in."""
    files = [*ROOT.glob("common/**/*.py"), *ROOT.glob("extras/**/*.py")]
    found = []
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.JoinedStr):
            found.append(
                "".join(
                    getattr(part, "value", "\0") if isinstance(part, ast.Constant) else "\0"
                    for part in node.values
                )
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("quote", sorted({*QUOTES} - OF_LIBRARIES))
def test_quoted_message_exists(quote, texts):
    for part in re.split(r"[\d.]+|: | \.\.\. ", quote):
        if part.strip():
            assert part.strip() in texts, part
