"""The `code` rewards: whether a program that a model wrote passes the tests of its row (test_cases.py).

The program gets inputs alone. Its outputs are compared here. Asserts run in a second confined process, the judge: the
functions they call are stand-ins, whose calls are relayed to the program. `common/sandbox/program.py` runs both.
"""

import ast
import builtins
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from common.rewards.test_cases import AssertTest, CallTest, StdinTest, parse_tests, stub, tested_names, tests_column
from common.sandbox import child
from common.sandbox.program import Limits, Program, ProgramError, run_program

LISTED = r"^([ \t]*(?:[-*+]|\d+[.)])?[ \t]*)"  # before a fence: the start of a list item
BLOCK = re.compile(rf"(?:{LISTED})?```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
TOLERANCE = 1e-6  # of floats in stdout: absolute up to 1, then relative
PARSED = 50_000  # longest code that is parsed, in characters: the parser is slow
JUDGE = Path(child.__file__).with_name("judge.py").read_text(encoding="utf-8")


def passes(completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False) -> float:
    """Return 1 if the program in `completion` passes all tests of `row`, else 0. Stops at the first that fails.

    Raises `ValueError` naming the row if the tests are malformed or cannot run with any program.
    """
    with closing(results(completion, row, limits, unsafe)) as each:
        return float(all(each))


def fraction(completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False) -> float:
    """Return the fraction of the tests of `row` that the program in `completion` passes. Raises as `passes` does."""
    each = list(results(completion, row, limits, unsafe))
    return sum(each) / len(each)


def extract_program(completion: str, row: dict) -> str:
    """Return the last fenced block that is labelled as Python, parses and defines a tested name or, for tests of stdin,
    is a program (`is_program`); the last one if none is. Blocks without a label count if none has one; without blocks
    the whole of `completion` does.

    HumanEval's prompt goes in front: the program may continue its function, or define it again. The names of `typing`,
    which LeetCode provides, go in front of the methods of APPS.
    """
    labelled, unlabelled = [], []
    for indent, info, code in BLOCK.findall(completion):
        code = re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE) if indent else code
        label = info.strip().lower().split(maxsplit=1)[:1]
        if not label:
            unlabelled.append(code)
        elif label[0].startswith("python") or label[0] == "py":
            labelled.append(code)
    blocks = labelled or unlabelled
    if not blocks:
        return assemble(completion, row, cut=True)
    programs = [assemble(code, row) for code in blocks]
    if len(blocks) == 1:
        return programs[0]
    names = tested_names(row)
    whole = [i for i, program in enumerate(programs) if parsed(program)[0]]
    if names:
        continued = [i for i in whole if stub(row) and blocks[i].lstrip("\n")[:1] in (" ", "\t")]
        found = [i for i in whole if i in continued or names & defined(blocks[i])]
    else:
        has_input = any(test.input.strip() for test in parse_tests(row))
        in_any = set().union(*map(defined, blocks))
        found = [i for i in whole if is_program(blocks[i], in_any, has_input)] or whole
    return programs[found[-1] if found else -1]


def is_program(code: str, in_any: set[str], has_input: bool) -> bool:
    """Return whether a block is a program for tests of stdin: it uses no name that only another block defines, as a
    test of its functions would (`in_any`: the names that any block defines), and reads stdin if the tests have input,
    else prints."""
    return not in_any & unbound(code) and (reads_stdin(code) if has_input else prints(code))


def prints(code: str) -> bool:
    """Return whether a program names `print` or `stdout`."""
    nodes = nodes_of(code)
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return bool({"print", "stdout"} & (loaded(nodes) | attributes))


def reads_stdin(code: str) -> bool:
    """Return whether a program names `input`, `stdin`, `fileinput` or `open(0)`, and does not replace `sys.stdin`."""
    nodes = nodes_of(code)
    stdins = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("stdin", "__stdin__")]
    if any(isinstance(node.ctx, ast.Store) for node in stdins):
        return False
    opened = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "open"]
    opens_0 = any(isinstance(n, ast.Constant) and n.value == 0 for call in opened for n in call.args)
    imported = {alias.name for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for alias in n.names}
    return bool(stdins or opens_0 or imported & {"stdin", "fileinput"}) or "input" in loaded(nodes) - defined(code)


def assemble(code: str, row: dict, cut: bool = False) -> str:
    """Return `code` behind the source that it continues or needs. `cut`: drop the prose, or the unfinished function,
    behind HumanEval's function."""
    if start := stub(row):
        if row["entry_point"] in defined(code):
            return after_future(code, start)
        program = shorter = f"{row['prompt']}\n{code}"
        for _ in range(10 if cut else 0):
            tree, line = parsed(shorter)
            if tree:
                return shorter
            lines = shorter.split("\n")
            shorter = "\n".join(lines[: min(line, len(lines)) - 1])
        return program
    if tests_column(row) == "input_output" and tested_names(row):
        return after_future(code, "from typing import *")
    return code


def after_future(code: str, start: str) -> str:
    """Return `code` with `start` in front, but behind imports of `__future__`."""
    tree, _ = parsed(code)
    ends = [n.end_lineno for n in tree.body if getattr(n, "module", "") == "__future__"] if tree else []
    each = code.removeprefix("\ufeff").split("\n")
    each.insert(max(ends, default=0), start)
    return "\n".join(each)


def parsed(code: str) -> tuple[ast.Module | None, int]:
    """Return the tree; or None and the line of the syntax error, 0 if unknown."""
    try:
        return (ast.parse(code), 0) if len(code) <= PARSED else (None, 0)
    except SyntaxError as error:
        return None, error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return None, 0


@lru_cache(8)  # several questions about each block
def nodes_of(code: str) -> list[ast.AST]:
    """Return all nodes of a program; none if it cannot be parsed."""
    tree, _ = parsed(code)
    return list(ast.walk(tree)) if tree else []


def defined(code: str) -> set[str]:
    """Return the names of functions, methods, classes and assigned variables."""
    nodes = nodes_of(code)
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return functions | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def loaded(nodes: list[ast.AST]) -> set[str]:
    """Return the names that are read."""
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def unbound(code: str) -> set[str]:
    """Return the names that are read but neither bound here nor built in."""
    nodes = nodes_of(code)
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name.partition(".")[0] for n in imports for alias in n.names}
    names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    names |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler)}
    return loaded(nodes) - defined(code) - names - set(dir(builtins))


# ---- verdicts ----


def results(completion: str, row: dict, limits: Limits | None, unsafe: bool) -> Iterator[bool]:
    """Yield whether each test passes: tests of stdin first, then the others, which share one process. All share the
    program's time, and fail once it is used up."""
    tests, source, limits = parse_tests(row), extract_program(completion, row), limits or Limits()
    for test in tests:
        if isinstance(test, StdinTest):
            if limits.seconds <= 0:
                yield False
                continue
            outcome = run_program(source, test.input, with_room(limits, [test]), unsafe)
            limits = replace(limits, seconds=limits.seconds - outcome.seconds)
            yield outcome.status == "ok" and same_output(outcome.stdout, test.output)
    calls = [test for test in tests if not isinstance(test, StdinTest)]
    if not calls or limits.seconds <= 0:
        yield from (False for _ in calls)
        return
    with ExitStack() as stack:
        asserts = any(isinstance(test, AssertTest) for test in calls)
        judge = start_judge(stack, limits, unsafe) if asserts else None  # before the clock of the program starts
        try:
            program = stack.enter_context(Program(source, with_room(limits, calls), unsafe))
        except ProgramError:  # the source does not run
            yield from (False for _ in calls)
            return
        if judge:
            judge.child.deadline, judge.child.beside = program.child.deadline, program.child
        for test in calls:
            is_call = isinstance(test, CallTest)
            yield check_call(program, test) if is_call else check_assert(program, judge, test, row)


def start_judge(stack: ExitStack, limits: Limits, unsafe: bool) -> Program:
    """Start the judge, which gets the program's deadline later. Its questions may be long: the tests make them."""
    judge = Program(JUDGE, replace(limits, seconds=60.0, output_bytes=16 * limits.output_bytes), unsafe)
    try:
        return stack.enter_context(judge)
    except ProgramError as error:
        raise RuntimeError(f"the judge did not start: {error}") from error


def with_room(limits: Limits, tests: list[StdinTest | CallTest | AssertTest]) -> Limits:
    """Return `limits` with room for an output as long as the expected one."""
    sizes = [limits.output_bytes]
    for test in tests:
        if isinstance(test, StdinTest):
            sizes.append(2 * len(test.output.encode("utf-8", "replace")))
        else:
            sizes.append(4 * len(test.source if isinstance(test, AssertTest) else str(test.results)))
    return replace(limits, output_bytes=max(sizes))


def same_output(text: str, expected: str) -> bool:
    """Return whether two outputs have the same lines, except for white space at their ends and blank last lines. Within
    a line, floats may differ by `TOLERANCE`."""
    ours, theirs = lines(text), lines(expected)
    return ours == theirs or (len(ours) == len(theirs) and all(map(same_line, ours, theirs)))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_line(line: str, expected: str) -> bool:
    ours, theirs = re.split(r"(\s+)", line), re.split(r"(\s+)", expected)
    return len(ours) == len(theirs) and all(map(same_token, ours, theirs))


def same_token(token: str, expected: str) -> bool:
    """Return whether two words are equal or, if the expected one has a decimal point or an exponent, nearly equal
    numbers."""
    if token == expected:
        return True
    if not FLOAT.fullmatch(token) or not FLOAT.fullmatch(expected) or expected.lstrip("+-").isdigit():
        return False
    return abs(float(token) - float(expected)) <= TOLERANCE * max(1.0, abs(float(expected)))


def check_call(program: Program, test: CallTest) -> bool:
    try:
        value = program.call(test.function, test.args, test.kwargs)
    except ProgramError:
        return False
    return any(same(value, result) for result in test.results)


def same(value: object, expected: object) -> bool:
    """Return whether two values are equal as JSON: a tuple is a list and an int may equal a float, but a bool is no
    number. Two NaN are equal."""
    if isinstance(expected, list):
        lists = isinstance(value, list | tuple) and len(value) == len(expected)
        return lists and all(same(v, e) for v, e in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        dicts = isinstance(value, dict) and value.keys() == expected.keys()
        return dicts and all(same(value[k], expected[k]) for k in expected)
    if type(expected) in (int, float):
        return type(value) in (int, float) and (value == expected or value != value and expected != expected)
    return type(value) is type(expected) and value == expected


def check_assert(program: Program, judge: Program, test: AssertTest, row: dict) -> bool:
    if program.dead:  # the judge may still wait for its answer
        return False
    try:
        verdict = judge.call("judge", [test.source, test.setup, test.candidate], answer=program.exchange)
    except ProgramError as error:  # either process died or took too long
        if error.kind == "raised":  # the judge itself
            raise RuntimeError(f"{row['_source']}: {error}") from error
        return False
    if not isinstance(verdict, bool):
        raise ValueError(f"{row['_source']}: the test cannot run: {verdict}")
    return verdict


passes.check = fraction.check = parse_tests
