"""The `code` rewards: does the program in a completion (program_text.py) pass its row's tests
(cases.py)?

The program only gets inputs. Its stdout is compared here. Values of its functions are compared in a
second confined process, the judge, which calls them. `extras/code/sandbox/program.py` runs both."""

import re
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

from extras.code.cases import AssertTest, StdinTest, Test, parse_tests
from extras.code.program_text import extract_program
from extras.code.sandbox.program import Limits, run_program, run_tests

FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
TOLERANCE = 1e-6  # of floats in stdout: absolute up to 1, then relative


def passes(
    completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False
) -> tuple[float, dict[str, str]]:
    """Return 1 if the program in `completion` passes all tests of `row`. Else stop at the first
    test that fails, and return 0 with this test as `feedback`.

    Raises `ValueError` naming the row if the tests are malformed or cannot run with any program."""
    with closing(results(completion, row, limits or Limits(), unsafe)) as verdicts:
        failed = next((test for test, passed in verdicts if not passed), None)
    return (1.0, {}) if failed is None else (0.0, dict(feedback=f"it fails {failed}"))


def fraction(
    completion: str, row: dict, limits: Limits | None = None, unsafe: bool = False
) -> float:
    """Return the fraction of the tests of `row` that the program in `completion` passes. Raises as
    `passes` does."""
    verdicts = [passed for _, passed in results(completion, row, limits or Limits(), unsafe)]
    return sum(verdicts) / len(verdicts)


def results(
    completion: str, row: dict, limits: Limits, unsafe: bool
) -> Generator[tuple[Test, bool], None, None]:
    """Yield each test and whether it passes. Tests of stdin come first; the others share one
    process. All together have the program's time: tests fail once it is used up."""
    tests = parse_tests(row)
    source = extract_program(completion, row, tests)
    others = []
    for test in tests:
        if not isinstance(test, StdinTest):
            others.append(test)
        elif limits.seconds <= 0:
            yield test, False
        else:
            outcome = run_program(source, test.input, with_room(limits, [test]), unsafe)
            limits = replace(limits, seconds=limits.seconds - outcome.seconds)
            yield test, outcome.status == "ok" and same_output(outcome.stdout, test.output)
    calls = list(map(as_call, others)) if limits.seconds > 0 else []
    with closing(run_tests(source, calls, with_room(limits, tests), unsafe)) as verdicts:
        for test in others:
            verdict = next(verdicts, False)
            if isinstance(verdict, str):
                raise ValueError(f"{row['_source']}: the test cannot run: {verdict}")
            yield test, verdict


def as_call(test: Test) -> tuple:
    """Return a test in the form that `run_tests` takes."""
    if isinstance(test, AssertTest):
        return "run", test.source, test.setup, test.candidate
    function = test.function
    if test.is_leetcode:
        function = f"getattr(Solution(), {function!r}) if 'Solution' in globals() else {function}"
    return "call", function, test.args, test.kwargs, test.results


def with_room(limits: Limits, tests: list[Test]) -> Limits:
    """Return `limits` with room for an output at least as long as the expected one."""
    size = max(len(repr(test)) for test in tests)
    return replace(limits, output_bytes=max(limits.output_bytes, 4 * size))


def same_output(text: str, expected: str) -> bool:
    """Return whether two outputs have the same lines. White space at their ends and blank last
    lines do not count, and floats may differ by `TOLERANCE`."""
    words, expected_words = (words_of(output) for output in (text, expected))
    return len(words) == len(expected_words) and all(map(same_word, words, expected_words))


def words_of(text: str) -> list[str]:
    """Return the words of a text and the white space between them."""
    lines = (line.rstrip() for line in text.rstrip().split("\n"))
    return re.split(r"(\s+)", "\n".join(lines))


def same_word(word: str, expected: str) -> bool:
    """Return whether two words are equal. If the expected one has a decimal point or an exponent,
    nearly equal numbers are equal too."""
    if word == expected:
        return True
    if expected.lstrip("+-").isdigit() or not all(map(FLOAT.fullmatch, (word, expected))):
        return False
    return abs(float(word) - float(expected)) <= TOLERANCE * max(1.0, abs(float(expected)))


passes.check = fraction.check = parse_tests
