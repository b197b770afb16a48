"""The program in a completion: which of its fenced blocks, and the source in front of it."""

import ast
import builtins
import re
from functools import lru_cache

from extras.code.cases import AssertTest, CallTest, StdinTest, Test, tested_names

LIST_ITEM = r"^([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]*)?)"  # before a fence
BLOCK = re.compile(
    rf"(?:{LIST_ITEM})?```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)
PARSED = 50_000  # longest code that is parsed, in characters: the parser is slow
CUTS = 10  # attempts to cut what follows a function


def extract_program(completion: str, row: dict, tests: list[Test]) -> str:
    """Return the last fenced block that is labelled as Python, parses and defines a tested name or,
    for tests of stdin, is a program (`is_program`); the last one if none is. Blocks without a label
    count if none has one; without blocks the whole of `completion` does.

    HumanEval's prompt goes in front: the program may continue its function, or define it again. The
    names of `typing`, which LeetCode provides, go in front of the methods of APPS."""
    blocks = code_blocks(completion)
    if not blocks:
        return assemble(completion, row, tests, cut=True)
    programs = [assemble(code, row, tests) for code in blocks]
    if len(blocks) == 1:
        return programs[0]
    valid = [i for i, program in enumerate(programs) if parsed(program)[0]]
    names = tested_names(tests)
    stdin_tests = [test for test in tests if isinstance(test, StdinTest)]
    fitting = valid
    if names:
        continues = [stub_of(tests) and is_indented(code) for code in blocks]
        fitting = [i for i in valid if continues[i] or names & defined(blocks[i])]
    elif stdin_tests:
        has_input = any(test.input.strip() for test in stdin_tests)
        defined_in_any = set().union(*map(defined, blocks))
        fitting = [i for i in valid if is_program(blocks[i], defined_in_any, has_input)] or valid
    return programs[fitting[-1] if fitting else -1]


def code_blocks(completion: str) -> list[str]:
    """Return the fenced blocks that are labelled as Python or, if there are none, those without a
    label."""
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
    """Return `code` behind the source that it continues or needs. `cut`: drop the prose, or the
    unfinished function, behind HumanEval's function."""
    start = stub_of(tests)
    if start and row["entry_point"] in defined(code):
        return after_future(code, start)
    if start:
        program = f"{row['prompt']}\n{code}"
        return without_rest(program) if cut else program
    if any(isinstance(test, CallTest) and test.is_leetcode for test in tests):
        return after_future(code, "from typing import *")
    return code


def stub_of(tests: list[Test]) -> str:
    """Return the start of the program, if HumanEval's prompt is one; else ""."""
    test = tests[0]
    return test.setup if isinstance(test, AssertTest) and test.candidate else ""


def after_future(code: str, start: str) -> str:
    """Return `code` with `start` in front, but behind imports of `__future__`."""
    tree, _ = parsed(code)
    ends = [n.end_lineno for n in tree.body if is_future(n)] if tree else []
    lines = code.removeprefix("\ufeff").split("\n")
    lines.insert(max(ends, default=0), start)
    return "\n".join(lines)


def is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def without_rest(program: str) -> str:
    """Return the program up to a line before which it parses; all of it if `CUTS` syntax errors do
    not lead to one."""
    shorter = program
    for _ in range(CUTS):
        tree, line = parsed(shorter)
        if tree:
            return shorter
        lines = shorter.split("\n")
        shorter = "\n".join(lines[: min(line, len(lines)) - 1])
    return program


def is_indented(code: str) -> bool:
    return code.lstrip("\n").startswith((" ", "\t"))


# ---- the kind of a block ----


def is_program(code: str, defined_in_any: set[str], has_input: bool) -> bool:
    """Return whether a block is a program for tests of stdin: it uses no name that only another
    block defines, as a test of its functions would (`defined_in_any`: the names that any block
    defines), and reads stdin if the tests have input, else prints."""
    if defined_in_any & unbound(code):
        return False
    return reads_stdin(code) if has_input else prints(code)


def prints(code: str) -> bool:
    """Return whether a program names `print` or `stdout`."""
    attributes = {node.attr for node in nodes_of(code, ast.Attribute)}
    return bool({"print", "stdout"} & (read_names(code) | attributes))


def reads_stdin(code: str) -> bool:
    """Return whether a program names `input`, `stdin`, `fileinput` or `open(0)`, and does not
    replace `sys.stdin`."""
    stdins = [n for n in nodes_of(code, ast.Attribute) if n.attr in ("stdin", "__stdin__")]
    if any(isinstance(node.ctx, ast.Store) for node in stdins):
        return False
    for call in nodes_of(code, ast.Call):
        first = [n.value for n in call.args if isinstance(n, ast.Constant)]
        if getattr(call.func, "id", "") == "open" and 0 in first:
            return True
    imported = {alias.name for alias in nodes_of(code, ast.alias)}
    takes_input = "input" in read_names(code) - defined(code)
    return bool(stdins or imported & {"stdin", "fileinput"} or takes_input)


def defined(code: str) -> set[str]:
    """Return the names of functions, methods, classes and assigned variables."""
    names = nodes_of(code, ast.Name)
    stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    blocks = nodes_of(code, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return stored | {block.name for block in blocks}


def read_names(code: str) -> set[str]:
    names = nodes_of(code, ast.Name)
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def unbound(code: str) -> set[str]:
    """Return the names that are read but neither bound here nor built in."""
    imports = nodes_of(code, ast.alias)
    bound = {alias.asname or alias.name.partition(".")[0] for alias in imports}
    bound |= {argument.arg for argument in nodes_of(code, ast.arg)}
    bound |= {handler.name for handler in nodes_of(code, ast.ExceptHandler)}
    return read_names(code) - defined(code) - bound - set(dir(builtins))


def nodes_of(code: str, *kinds: type[ast.AST]) -> list:
    """Return the nodes of these kinds in a program; none if it cannot be parsed."""
    return [node for node in all_nodes(code) if isinstance(node, kinds)]


@lru_cache(8)  # several questions about each block
def all_nodes(code: str) -> list[ast.AST]:
    tree, _ = parsed(code)
    return list(ast.walk(tree)) if tree else []


def parsed(code: str) -> tuple[ast.Module | None, int]:
    """Return the tree; or None and the line of the syntax error, 0 if unknown."""
    if len(code) > PARSED:
        return None, 0
    try:
        return ast.parse(code), 0
    except SyntaxError as error:
        return None, error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return None, 0
