"""Does a model-written program pass the tests of its row (see `code_test_forms.py` for what those may be)?

Programs only ever see inputs. Outputs are compared here; asserts run in a second confined process, the judge, where
what they call is a stand-in whose calls are relayed to the program's process. `common/sandbox.py` runs both.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from common.code_test_forms import AssertTest, CallTest, StdinTest, parse_tests, stub
from common.sandbox import Limits, Program, ProgramError, run_program

BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
JUDGE = Path(__file__).with_name("judge.py").read_text(encoding="utf-8")


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
    """The last fenced block of Python, or without one all of `completion`; HumanEval's prompt in front, so that it may
    continue its function or define it again."""
    blocks = [
        code for info, code in BLOCK.findall(completion) if info.strip().lower() in ("", "python", "python3", "py")
    ]
    program = blocks[-1] if blocks else completion
    return f"{row['prompt']}\n{program}" if stub(row) else program


# ---- verdicts ----


def results(completion: str, row: dict, limits: Limits | None, unsafe: bool) -> Iterator[bool]:
    """Whether each test passes: those of stdin first, then the others, which share one process."""
    tests, source, limits = parse_tests(row), extract_program(completion, row), limits or Limits()
    for test in tests:
        if isinstance(test, StdinTest):
            room = replace(
                limits, output_bytes=max(limits.output_bytes, 2 * len(test.output.encode("utf-8", "replace")))
            )
            outcome = run_program(source, test.input, room, unsafe)
            yield outcome.status == "ok" and lines(outcome.stdout) == lines(test.output)
    calls = [test for test in tests if not isinstance(test, StdinTest)]
    if not calls:
        return
    with ExitStack() as stack:
        try:
            program = stack.enter_context(Program(source, limits, unsafe))
        except ProgramError:  # the source does not run
            yield from (False for _ in calls)
            return
        asserts = any(isinstance(test, AssertTest) for test in calls)
        judge = stack.enter_context(Program(JUDGE, limits, unsafe)) if asserts else None
        for test in calls:
            if isinstance(test, CallTest):
                yield check_call(program, test)
            else:
                yield check_assert(program, judge, test, row)


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
