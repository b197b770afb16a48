"""The judge, with a stand-in for the program under test: its questions and its handling of the
answers."""

from pathlib import Path

import pytest
from helpers import PATIENCE

from extras.code.sandbox import child, program
from extras.code.sandbox.child import encode
from extras.code.sandbox.program import Limits, Program

pytestmark = pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))
JUDGE = Path(child.__file__).with_name("run_tests.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server():
    with Program(JUDGE, Limits(seconds=PATIENCE)) as process:
        yield process


@pytest.fixture
def judge(server):
    """`judge(source, answers, ...)` returns the verdict and the questions asked. An answer is a
    value, the message of the program's process about an object, or the names of the classes of an
    exception."""

    def run(
        source: str, answers: list, setup: str = "", candidate: str | None = None
    ) -> tuple[bool | str, list]:
        left, questions = list(answers), []

        def answer(question: dict) -> dict:
            questions.append(question)
            value = left.pop(0) if left else RuntimeError("it asks more")
            if isinstance(value, Exception):
                return {"error": [[kind.__name__ for kind in type(value).__mro__], str(value)]}
            return {"value": value if isinstance(value, dict) else encode(value)}

        verdict = server.call("judge", [source, setup, candidate], answer=answer)
        assert not left, "it asked less"
        return verdict, questions

    return run


def call(expression: str, *args: object, **kwargs: object) -> dict:
    return dict(
        call=expression,
        args=encode(list(args)),
        kwargs={name: encode(v) for name, v in kwargs.items()},
    )


def test_case_passes_if_nothing_is_raised(judge):
    source = "assert f(1, x=(2,)) == {3}"
    assert judge(source, [{3}]) == (True, [call("f", 1, x=(2,))])
    for wrong in ({4}, [3], ValueError("no")):
        assert judge(source, [wrong]) == (False, [call("f", 1, x=(2,))])
    assert judge("raise SystemExit\nassert f(1)", []) == (False, [])


def test_candidate_comes_from_the_program_despite_a_setup_definition(judge):
    check = "def check(candidate):\n    assert candidate(1) == 2\ncheck(f)"
    setup = "def f(x):\n    pass\ndef twice(x): return 2 * x"
    assert judge(check, [2], setup, "f") == (True, [call("f", 1)])
    assert judge("assert twice(f(1)) == 4", [2], setup, "f") == (True, [call("f", 1)])
    assert judge("assert twice(1) == 2 and f(1) is None", [3], setup, "f")[0] is False


def test_objects_are_identified_by_their_expressions(judge):
    source = "a = A(1)\na.x = 2\nassert g(a, [a.x]) == 3 and a.y(4) == 5"
    a = {"object": "__objects__[0]"}
    verdict, questions = judge(source, [a, None, 2, 3, {"object": "__objects__[0].y"}, 5])
    assert verdict is True and questions == [
        call("A", 1),
        dict(call="setattr", args=[a, "x", 2], kwargs={}),
        dict(call="__objects__[0].x"),
        dict(call="g", args=[a, [2]], kwargs={}),
        dict(call="__objects__[0].y"),
        call("__objects__[0].y", 4),
    ]


def test_equality_does_not_depend_on_the_program(judge):
    thing = {"object": "__objects__[0]"}
    assert judge("assert f() == 1", [thing])[0] is False
    assert judge("a = f()\nassert a == a and a != f()", [thing, thing])[0] is True
    assert judge("assert not f()", [thing])[0] is False
    assert (
        judge("assert f().__len__() == 1", [thing])[0] is False
    )  # names with underscores belong to the stand-in


class Own(KeyError):
    pass


class Wide(UnicodeDecodeError):
    """Exception that cannot be constructed from a message alone."""

    def __init__(self):
        super().__init__("utf-8", b"", 0, 1, "x")


@pytest.mark.parametrize("raised, caught", [
    (ZeroDivisionError("x"), "ZeroDivisionError"), (Own("x"), "KeyError"), (Wide(), "UnicodeError"),
    (type("Own", (Exception,), {})("x"), "Exception"), (StopIteration("x"), "StopIteration"),
])  # fmt: skip
def test_exception_becomes_its_most_derived_built_in_class(judge, raised, caught):
    source = (
        "try:\n    f()\nexcept BaseException as e:\n    kind = type(e).__name__\nassert kind == "
        + repr(caught)
    )
    assert judge(source, [raised])[0] is True


@pytest.mark.parametrize(
    "malformed",
    [{"set": [[]]}, {"a": 1}, {"int": "x"}, {"complex": [1]}, {"dict": [1]}, {"object": 1, "b": 2}],
)  # fmt: skip
def test_malformed_answer_is_wrong(judge, malformed):
    assert judge("assert f() != 1", [malformed])[0] is False


@pytest.mark.parametrize(
    "source, why",
    [
        ("assert 1 == 1", "it calls no function of the program"),
        ("assert f(1) == y", "it needs the value of y, which it does not define"),
        ("assert isinstance(f(1), Thing)", "it needs the value of Thing, which it does not define"),
        (
            "try:\n    f()\nexcept Own:\n    pass\nassert 1",
            "it needs the value of Own, which it does not define",
        ),
        (
            "import nothing_like_this\nassert f()",
            "ModuleNotFoundError: No module named 'nothing_like_this'",
        ),
        ("assert f(lambda x: x)", "a function cannot be passed to the program"),
        (
            "try:\n    f(open)\nexcept TypeError:\n    pass\nassert True",
            "a builtin_function_or_method cannot be passed",
        ),
    ],
)
def test_unrunnable_test_gives_the_reason_without_questions(judge, source, why):
    verdict, questions = judge(source, [])
    assert isinstance(verdict, str) and verdict.startswith(why) and questions == []
    assert judge("assert f()", [1])[0] is True, "the next test starts afresh"


@pytest.mark.parametrize(
    "source, asked",
    [
        (
            "assert sum(10, 15) == 6",
            call("sum", 10, 15),
        ),  # a built-in name: the first innermost call on the left
        ("assert set(filter([1])) == set([6])", call("filter", [1])),
        (
            "assert math.floor(f(2.5)) == 6",
            call("f", 2.5),
        ),  # modules of the standard library need no import
        ("def helper(x):\n    return f(x)\nassert helper(1) == 6", call("f", 1)),
        ("assert [f(i) for i in (1,)] == [6]", call("f", 1)),
    ],
)
def test_tested_name_is_resolved_to_the_program(judge, source, asked):
    value = [6] if "filter" in source else 6
    assert judge(source, [value]) == (True, [asked])
