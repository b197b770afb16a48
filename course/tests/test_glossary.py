"""One notation: every letter of an equation is in course/glossary.md once, and no equation defines
it in another way."""

import ast
import re
from pathlib import Path

import pytest
from helpers import ROOT

GREEK = "alpha|beta|gamma|delta|epsilon|eta|lambda|mu|phi|pi|rho|sigma|tau|theta"
SYMBOL = re.compile(
    rf"(?<![\w'`.])(?<!\w-)(?<!--)(?!a\b)({GREEK}|KL|[A-Za-z]\d?)(?![A-Za-z0-9'])"
)  # "a": article
DEFINITION = re.compile(r"([A-Za-z]\w*(?:\(\w+\))?) = (.+)")
BLOCK = re.compile(r"(?:^ {4,}\S.*\n?)+", re.MULTILINE)
PLACES = ("docs/*.md", "course/*.md", "course/lessons/*.md", "*.py", "common/objectives/*.py")
FILES = sorted({path for place in PLACES for path in ROOT.glob(place)})
MODULES = [*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py")]
PEFT = {"lora_A", "lora_B"}  # a library's names
SUFFIX = re.compile(r"(?:[a-z]\w*|[A-Z])_(\d?[A-Zt][A-Z\d]{0,2})")  # not of CONSTANTS


def table(title: str) -> list[list[str]]:
    """Return the rows of the table under a heading of the glossary."""
    page = (ROOT / "course/glossary.md").read_text()
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [
        re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")
    ][2:]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def plain(equation: str) -> str:
    """Return an equation without spaces and without the subscripts of tokens and completions."""
    return re.sub(r"_[a-z](?![a-z])|\s", "", equation)


def equations(text: str) -> list[str]:
    """Return the indented blocks with an equation, without fenced code."""
    blocks = BLOCK.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return [block for block in blocks if " = " in block and not re.search("torchrun|python", block)]


def offences(text: str, known: dict[str, list[str]]) -> list[str]:
    """Return the letters of a text that are not known, and the definitions that contradict the
    known ones."""
    found = []
    for block in equations(text):
        found += sorted({name for name in SYMBOL.findall(block) if name not in known})
        for part in re.split(r"\s{2,}|;\s|\n", re.sub(r"[ \t]+=\s+", " = ", block)):
            if (match := DEFINITION.fullmatch(part)) and (letter := SYMBOL.match(match[1])):
                allowed = tuple(map(plain, known.get(letter[1], [])))
                if allowed and not plain(match[2]).startswith(allowed):
                    found.append(part)
    return found


KNOWN = {SYMBOL.match(name)[1]: names(row[2]) for row in table("Symbols") for name in names(row[0])}


def test_every_letter_has_one_row():
    rows = [{SYMBOL.match(name)[1] for name in names(row[0])} for row in table("Symbols")]
    assert len(KNOWN) > 40 and sum(map(len, rows)) == len(KNOWN)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_equations_use_the_glossary(path):
    text = path.read_text()
    if path.suffix == ".py":
        nodes = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Module | ast.FunctionDef)
        ]
        text = "\n\n".join(ast.get_docstring(node) or "" for node in nodes)
    assert offences(text, KNOWN) == []


@pytest.mark.parametrize(
    "clash", ["r_i   = pi(y_i) / pi_old(y_i)", "L = -h_t", "c_t = 1/M", "L = x   w = min(2, c)"]
)
def test_clash_is_found(clash):
    assert len(offences(f"    {clash}\n", KNOWN)) == 1


def suffixes(path: Path) -> set[str]:
    """Return the sizes in the shapes of a module's tensors: P and G of `rewards_PG`."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found |= {node.arg or "" for node in nodes if isinstance(node, ast.arg | ast.keyword)}
    matches = map(SUFFIX.fullmatch, found - PEFT)
    return {size for match in matches if match for size in match[1]}


def test_every_suffix_has_one_meaning():
    rows = [(name, row[1]) for row in table("Shapes") for name in names(row[0])]
    assert sorted(name for name, _ in rows) == sorted(set().union(*map(suffixes, MODULES)))
    assert [cell for _, cell in rows if ";" in cell] == []


@pytest.mark.parametrize(
    "title", ["Symbols", "Words in equations", "Terms", "Words of the program"]
)
def test_names_are_in_the_code(title):
    for *_, code in table(title):
        sources = [(ROOT / name).read_text() for name in re.findall(r"\(\.\./(\S+\.py)\)", code)]
        assert [
            name for name in names(code) if not any(name in source for source in sources)
        ] == [], code
