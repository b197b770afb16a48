"""docs/trouble.md quotes messages that the program prints, and names flags that exist."""

import ast
import re

import pytest
from helpers import ROOT
from scripts import all_flags
from torch.distributed.run import get_args_parser

PAGE = (ROOT / "docs/trouble.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]*`[^|]*) \|", PAGE, re.M)
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


def test_named_flags_exist():
    of_scripts, of_torchrun = all_flags(), get_args_parser().format_help()
    named = set(re.findall(r"--([a-z][\w-]*)", re.sub(r"`(?:hf|py-spy) .*?`", "", PAGE)))
    assert len(named) > 10
    assert {flag for flag in named - of_scripts if f"--{flag}" not in of_torchrun} == set()
