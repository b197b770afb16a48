"""Finding the program in a completion: which fenced block it is, and what must stand before it."""

import ast
import builtins
import re
from collections import defaultdict
from functools import lru_cache

from extras.code.cases import AssertTest, CallTest, StdinTest, Test, tested_names

LIST_ITEM = r"^([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]*)?)"  # before a fence
BLOCK = re.compile(
    rf"(?:{LIST_ITEM})?```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
FUTURE = re.compile(r"^from __future__ import (?:\([^)]*\))?.*\n", re.MULTILINE)
PARSED = 50_000  # longer code, in characters, is not parsed, because the parser is slow
CUTS = 10  # attempts to cut off what follows a function


def extract_program(completion: str, row: dict, tests: list[Test]) -> str:
    """Return the program of a completion: its last fenced block that is labelled as Python, parses,
    and defines a tested name or, for tests of stdin, is a program (`is_program`). If no block does
    all this, it is the last one. Blocks without a label count only if none has one. Without blocks
    the whole `completion` is the program.

    HumanEval's prompt goes in front, since the program may continue its function or define it
    again. In front of a method of APPS go the names of `typing`, which LeetCode provides."""
    blocks = code_blocks(completion)
    if not blocks:
        return assemble(completion, row, tests, cut=True)
    programs = [assemble(code, row, tests) for code in blocks]
    valid = [i for i, program in enumerate(programs) if parsed(program)[0]]
    if tested := tested_names(tests):
        is_stub = bool(stub_of(tests))
        continues = [is_stub and code.lstrip("\n").startswith((" ", "\t")) for code in blocks]
        valid = [i for i in valid if continues[i] or tested & names_in(blocks[i])["defined"]]
    elif inputs := [test.input for test in tests if isinstance(test, StdinTest)]:
        has_input = any(map(str.strip, inputs))
        defined = set().union(*(names_in(code)["defined"] for code in blocks))
        valid = [i for i in valid if is_program(blocks[i], defined, has_input)] or valid
    return programs[valid[-1] if valid else -1]


def code_blocks(completion: str) -> list[str]:
    """Return the fenced blocks labelled as Python or, if there are none, those without a label."""
    labelled = []
    unlabelled = []
    for indent, info, code in BLOCK.findall(completion):
        if indent:
            code = re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE)
        words = info.lower().split()
        if not words:
            unlabelled.append(code)
        elif words[0].startswith("python") or words[0] == "py":
            labelled.append(code)
    return labelled or unlabelled


# ---- the source in front ----


def assemble(code: str, row: dict, tests: list[Test], cut: bool = False) -> str:
    """Return `code` behind the source that it continues or needs. `cut`: drop what follows
    HumanEval's function, such as prose or an unfinished function."""
    start = stub_of(tests)
    if start and row["entry_point"] not in names_in(code)["defined"]:
        program = f"{row['prompt']}\n{code}"
        return without_rest(program) if cut else program
    if any(isinstance(test, CallTest) and test.is_leetcode for test in tests):
        start = "from typing import *"
    if not start:
        return code
    code = code.removeprefix("\ufeff")
    return "".join([*FUTURE.findall(code), start, "\n", FUTURE.sub("", code)])


def stub_of(tests: list[Test]) -> str:
    """Return HumanEval's prompt, if it is the start of the program; else ""."""
    test = tests[0]
    return test.setup if isinstance(test, AssertTest) and test.candidate else ""


def without_rest(program: str) -> str:
    """Return the program without its last lines, as many as it takes to parse; all of it if `CUTS`
    cuts at syntax errors do not suffice."""
    shorter = program
    for _ in range(CUTS):
        tree, line = parsed(shorter)
        if tree:
            return shorter
        lines = shorter.split("\n")
        shorter = "\n".join(lines[: min(line, len(lines)) - 1])
    return program


# ---- the kind of a block ----


def is_program(code: str, defined_in_any: set[str], has_input: bool) -> bool:
    """Return whether a block is a program for tests of stdin: it reads stdin, if the tests have
    input, without replacing it; else it prints. It uses no name that only another block defines, as
    a test of its functions would. `defined_in_any`: the names that any block defines."""
    names = names_in(code)
    own = names["defined"] | names["bound"] | set(dir(builtins))
    if defined_in_any & (names["read"] - own):
        return False
    if not has_input:
        return bool({"print", "stdout"} & (names["read"] | names["used"]))
    takes_input = "input" in names["read"] - names["defined"]
    reads = takes_input or {"stdin", "fileinput"} & (names["used"] | names["bound"])
    return bool(reads) and not names["replaced"]


@lru_cache(8)  # several questions about each block
def names_in(code: str) -> dict[str, set[str]]:
    """Return the names in a program by how they are used; none if it cannot be parsed."""
    names: dict[str, set[str]] = defaultdict(set)
    tree, _ = parsed(code)
    nodes = ast.walk(tree) if tree else ()
    for node in nodes:
        match node:
            case ast.Name(id=name):
                names["read" if isinstance(node.ctx, ast.Load) else "defined"].add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names["defined"].add(node.name)
            case ast.arg(arg=name) | ast.ExceptHandler(name=name):
                names["bound"].add(name)
            case ast.alias(name=name, asname=other):
                names["bound"] |= {name, other or name.partition(".")[0]}
            case ast.Attribute(attr=name, ctx=ast.Load()):
                names["used"].add(name)
            case ast.Attribute(attr="stdin"):
                names["replaced"].add("stdin")
            case ast.Call(func=ast.Name(id="open"), args=[ast.Constant(value=0), *_]):
                names["used"].add("stdin")
    return names


def parsed(code: str) -> tuple[ast.Module | None, int]:
    """Return the syntax tree, or None and the line of the syntax error (0 if unknown)."""
    if len(code) > PARSED:
        return None, 0
    try:
        return ast.parse(code), 0
    except SyntaxError as error:
        return None, error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return None, 0
