"""Does a model-written program pass the tests of its row (see `test_cases.py` for what those may be)?

Programs only ever see inputs. Outputs are compared here; asserts run in a second confined process, the judge, where
what they call is a stand-in whose calls are relayed to the program's process. `common/sandbox/program.py` runs both.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from common.rewards.test_cases import (
    AssertTest,
    CallTest,
    StdinTest,
    Test,
    parse_tests,
    stub,
    tested_names,
    tests_column,
)
from common.sandbox import child
from common.sandbox.program import Limits, Program, ProgramError, run_program

LISTED = r"^([ \t]*(?:[-*+]|\d+[.)])?[ \t]*)"  # before a fence: the item of a list that it stands in
BLOCK = re.compile(rf"(?:{LISTED})?```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
PARSED = 50_000  # characters of a completion that are looked at as Python: the parser takes its time
JUDGE = Path(child.__file__).with_name("judge.py").read_text(encoding="utf-8")


def passes(completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False) -> float:
    """1 if the program in `completion` passes all tests of `row`, else 0. Stops at the first that fails.

    Raises `ValueError` naming the row if the tests are malformed or cannot run, whatever the program does.
    """
    with closing(results(completion, row, limits, unsafe)) as each:
        return float(all(each))


def fraction(completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False) -> float:
    """The part of the tests of `row` that the program in `completion` passes. Raises as `passes`."""
    each = list(results(completion, row, limits, unsafe))
    return sum(each) / len(each)


def extract_program(completion: str, row: dict) -> str:
    """The last fenced block that is labelled as Python, parses and defines what is tested; the last one, if none does;
    of those without a label, if none has one; without any, all of `completion`.

    HumanEval's prompt stands in front: the program may continue its function, or define it again. In front of the
    methods of APPS stand the names of `typing`, which LeetCode provides.
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
    programs, names = [assemble(code, row) for code in blocks], tested_names(row) if len(blocks) > 1 else set()
    for code, program in zip(reversed(blocks), reversed(programs), strict=True):
        continued = stub(row) and code.lstrip("\n")[:1] in (" ", "\t")
        if len(blocks) > 1 and parsed(program)[0] and (not names or continued or names & defined(code)):
            return program
    return programs[-1]


def assemble(code: str, row: dict, cut: bool = False) -> str:
    """`code` with what stands in front of it. `cut`: without the prose or the started function after HumanEval's."""
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
    """`code` with `start` in front, but behind its imports of `__future__`."""
    tree, _ = parsed(code)
    ends = [n.end_lineno for n in tree.body if getattr(n, "module", "") == "__future__"] if tree else []
    each = code.removeprefix("\ufeff").split("\n")
    each.insert(max(ends, default=0), start)
    return "\n".join(each)


def parsed(code: str) -> tuple[ast.Module | None, int]:
    """The tree, or the line at which it ends to be Python."""
    try:
        return (ast.parse(code), 0) if len(code) <= PARSED else (None, 0)
    except SyntaxError as error:
        return None, error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return None, 0


def defined(code: str) -> set[str]:
    """The names of the functions, methods and classes, and of what is assigned."""
    tree, _ = parsed(code)
    nodes = list(ast.walk(tree)) if tree else []
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    return functions | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


# ---- verdicts ----


def results(completion: str, row: dict, limits: Limits | None, unsafe: bool) -> Iterator[bool]:
    """Whether each test passes: those of stdin first, then the others, which share one process. All of them share the
    program's time; those that get none of it are not passed."""
    tests, source, limits = parse_tests(row), extract_program(completion, row), limits or Limits()
    for test in tests:
        if isinstance(test, StdinTest):
            if limits.seconds <= 0:
                yield False
                continue
            outcome = run_program(source, test.input, with_room(limits, [test]), unsafe)
            limits = replace(limits, seconds=limits.seconds - outcome.seconds)
            yield outcome.status == "ok" and lines(outcome.stdout) == lines(test.output)
    calls = [test for test in tests if not isinstance(test, StdinTest)]
    if not calls or limits.seconds <= 0:
        yield from (False for _ in calls)
        return
    with ExitStack() as stack:
        judge = None
        if any(isinstance(test, AssertTest) for test in calls):  # before the program: its clock does not run yet
            judge = start_judge(stack, limits, unsafe)
        try:
            program = stack.enter_context(Program(source, with_room(limits, calls), unsafe))
        except ProgramError:  # the source does not run
            yield from (False for _ in calls)
            return
        if judge:
            judge.child.deadline, judge.child.beside = program.child.deadline, program.child
        for test in calls:
            if isinstance(test, CallTest):
                yield check_call(program, test)
            else:
                yield check_assert(program, judge, test, row)


def start_judge(stack: ExitStack, limits: Limits, unsafe: bool) -> Program:
    """Its clock is set to the program's later. It may put long questions: the tests make them, not the program."""
    judge = Program(JUDGE, replace(limits, seconds=60.0, output_bytes=16 * limits.output_bytes), unsafe)
    try:
        return stack.enter_context(judge)
    except ProgramError as error:
        raise RuntimeError(f"the judge did not start: {error}") from error


def with_room(limits: Limits, tests: list[Test]) -> Limits:
    """`limits` with room for an output that is as long as the expected one is."""
    sizes = [limits.output_bytes]
    for test in tests:
        if isinstance(test, StdinTest):
            sizes.append(2 * len(test.output.encode("utf-8", "replace")))
        else:
            sizes.append(4 * len(test.source if isinstance(test, AssertTest) else str(test.results)))
    return replace(limits, output_bytes=max(sizes))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def check_call(program: Program, test: CallTest) -> bool:
    try:
        value = program.call(test.function, test.args, test.kwargs)
    except ProgramError:
        return False
    return any(same(value, result) for result in test.results)


def same(value: object, expected: object) -> bool:
    """Equal as JSON: tuples are lists, an int may be the same float, but a bool is no number. Two NaN are the same."""
    if isinstance(expected, list):
        lists = isinstance(value, list | tuple) and len(value) == len(expected)
        return lists and all(same(v, e) for v, e in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(same(value[k], expected[k]) for k in value)
        )
    if type(expected) in (int, float):
        return type(value) in (int, float) and (value == expected or value != value and expected != expected)
    return type(value) is type(expected) and value == expected


def check_assert(program: Program, judge: Program, test: AssertTest, row: dict) -> bool:
    if program.dead:  # the judge may still wait for an answer of it
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
