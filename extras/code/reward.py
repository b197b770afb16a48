"""The `code` rewards: whether the program in a completion (program_text.py) passes the tests of its
row (cases.py).

The program gets inputs alone. Its outputs are compared here. Asserts run in a second confined
process, the judge: the functions they call are stand-ins, whose calls are relayed to the program.
`extras/code/sandbox/program.py` runs both."""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from extras.code.cases import AssertTest, CallTest, StdinTest, Test, parse_tests
from extras.code.program_text import extract_program
from extras.code.sandbox import child
from extras.code.sandbox.program import Limits, Program, ProgramError, run_program

FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
TOLERANCE = 1e-6  # of floats in stdout: absolute up to 1, then relative
JUDGE = Path(child.__file__).with_name("run_tests.py").read_text(encoding="utf-8")


def passes(
    completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False
) -> tuple[float, dict[str, str]]:
    """Return 1 if the program in `completion` passes all tests of `row`, else 0 with the first test
    that fails, at which it stops, as `feedback`.

    Raises `ValueError` naming the row if the tests are malformed or cannot run with any program.
    """
    with closing(results(completion, row, limits, unsafe)) as verdicts:
        failed = next((test for test, passed in verdicts if not passed), None)
    return (1.0, {}) if failed is None else (0.0, dict(feedback=f"it fails {failed}"))


def fraction(
    completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False
) -> float:
    """Return the fraction of the tests of `row` that the program in `completion` passes. Raises as
    `passes` does."""
    verdicts = [passed for _, passed in results(completion, row, limits, unsafe)]
    return sum(verdicts) / len(verdicts)


def results(
    completion: str, row: dict, limits: Limits | None, unsafe: bool
) -> Generator[tuple[Test, bool], None, None]:
    """Yield each test and whether it passes: tests of stdin first, then the others, which share one
    process. All share the program's time, and fail once it is used up."""
    limits = limits or Limits()
    tests = parse_tests(row)
    source = extract_program(completion, row, tests)
    calls = []
    for test in tests:
        if not isinstance(test, StdinTest):
            calls.append(test)
        elif limits.seconds <= 0:
            yield test, False
        else:
            outcome = run_program(source, test.input, with_room(limits, [test]), unsafe)
            limits = replace(limits, seconds=limits.seconds - outcome.seconds)
            yield test, outcome.status == "ok" and same_output(outcome.stdout, test.output)
    if limits.seconds > 0:
        yield from call_results(source, calls, row, limits, unsafe)
    else:
        yield from ((test, False) for test in calls)


def call_results(
    source: str, tests: list[CallTest | AssertTest], row: dict, limits: Limits, unsafe: bool
) -> Iterator[tuple[Test, bool]]:
    """Yield each test and whether it passes in one process that runs `source`."""
    if not tests:
        return
    with ExitStack() as stack:
        judge = None
        if any(isinstance(test, AssertTest) for test in tests):
            judge = start_judge(stack, limits, unsafe)  # before the clock of the program starts
        try:
            program = stack.enter_context(Program(source, with_room(limits, tests), unsafe))
        except ProgramError:  # the source does not run
            yield from ((test, False) for test in tests)
            return
        if judge:
            judge.child.deadline = program.child.deadline
            judge.child.beside = program.child
        for test in tests:
            if isinstance(test, CallTest):
                yield test, check_call(program, test)
            else:
                yield test, check_assert(program, judge, test, row)


def start_judge(stack: ExitStack, limits: Limits, unsafe: bool) -> Program:
    """Start the judge, which gets the program's deadline later. Its questions may be long: the
    tests make them."""
    limits = replace(limits, seconds=60.0, output_bytes=16 * limits.output_bytes)
    try:
        return stack.enter_context(Program(JUDGE, limits, unsafe))
    except ProgramError as error:
        raise RuntimeError(f"the judge did not start: {error}") from error


def with_room(limits: Limits, tests: list[Test]) -> Limits:
    """Return `limits` with room for an output as long as the expected one."""
    size = max(len(repr(test)) for test in tests)
    return replace(limits, output_bytes=max(limits.output_bytes, 4 * size))


def same_output(text: str, expected: str) -> bool:
    """Return whether two outputs have the same lines, except for white space at their ends and
    blank last lines. Within a line, floats may differ by `TOLERANCE`."""
    return all_pairs(same_line, lines(text), lines(expected))


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    return all_pairs(same_token, re.split(r"(\s+)", line), re.split(r"(\s+)", expected))


def all_pairs(same: Callable[[Any, Any], bool], values: Sequence, expected: Sequence) -> bool:
    """Return whether there are as many values as expected, and each is the `same`."""
    return len(values) == len(expected) and all(map(same, values, expected))


def same_token(token: str, expected: str) -> bool:
    """Return whether two words are equal or, if the expected one has a decimal point or an
    exponent, nearly equal numbers."""
    if token == expected:
        return True
    if expected.lstrip("+-").isdigit() or not all(map(FLOAT.fullmatch, (token, expected))):
        return False
    return abs(float(token) - float(expected)) <= TOLERANCE * max(1.0, abs(float(expected)))


def check_call(program: Program, test: CallTest) -> bool:
    function = test.function
    if test.is_leetcode:
        function = f"getattr(Solution(), {function!r}) if 'Solution' in globals() else {function}"
    try:
        value = program.call(function, test.args, test.kwargs)
    except ProgramError:
        return False
    return any(same(value, result) for result in test.results)


def same(value: object, expected: object) -> bool:
    """Return whether two values are equal as JSON: a tuple is a list and an int may equal a float,
    but a bool is no number. Two NaN are equal."""
    if isinstance(expected, list):
        return isinstance(value, list | tuple) and all_pairs(same, value, expected)
    if isinstance(expected, dict):
        has_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return has_keys and all(same(value[key], expected[key]) for key in expected)
    if type(expected) in (int, float):
        are_nan = value != value and expected != expected
        return type(value) in (int, float) and (value == expected or are_nan)
    return type(value) is type(expected) and value == expected


def check_assert(program: Program, judge: Program, test: AssertTest, row: dict) -> bool:
    if program.dead:  # the judge may still wait for its answer
        return False
    arguments = [test.source, test.setup, test.candidate]
    try:
        verdict = judge.call("judge", arguments, answer=program.exchange)
    except ProgramError as error:  # either process died or took too long
        if error.kind == "raised":  # the judge itself
            raise RuntimeError(f"{row['_source']}: {error}") from error
        return False
    if not isinstance(verdict, bool):
        raise ValueError(f"{row['_source']}: the test cannot run: {verdict}")
    return verdict


passes.check = fraction.check = parse_tests
