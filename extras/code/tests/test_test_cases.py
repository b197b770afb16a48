"""The tests of a row: the common form of each dataset's columns, and malformed rows."""

import json

import pytest

from extras.code import cases as forms  # pytest would collect some of its functions as tests
from extras.code.cases import AssertTest, CallTest, StdinTest, parse_tests, stub


def row(**columns) -> dict:
    return dict(_source="train.jsonl:7", **columns)


STUB = 'def f(x):\n    """Adds one."""\n'
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


# (columns, the tests, the names of which a program must define one)
FORMS = [
    (dict(tests=[dict(input="1", output="2")]), [StdinTest("1", "2")], set()),
    (dict(tests=json.dumps([dict(input="1", output="2")])), [StdinTest("1", "2")], set()),
    (dict(tests=[dict(function="f", result=None)]), [CallTest("f", [], {}, [None])], {"f"}),
    (dict(tests=[dict(function="a.f", args=[1], kwargs=dict(x=2), result=3)]),
     [CallTest("a.f", [1], dict(x=2), [3])], set()),
    (dict(tests=["assert f(1) == g.h(2)", dict(input="", output="")]),
     [AssertTest("assert f(1) == g.h(2)"), StdinTest("", "")], {"f"}),
    (dict(input_output=dict(inputs=["1", ["2", "3"]], outputs=["4", ["5"]])),
     [StdinTest("1", "4"), StdinTest("2\n3", "5")], set()),
    (dict(input_output=dict(inputs=[[1], [2]], outputs=[3, [4]], fn_name="f")),
     [CallTest("f", [1], {}, [3], True), CallTest("f", [2], {}, [[4]], True)], {"f"}),
    (dict(input_output=json.dumps(dict(inputs=[[1], [2]], outputs=[[3], [4]], fn_name="f"))),
     # wrapped, or not
     [CallTest("f", [1], {}, [[3], 3], True), CallTest("f", [2], {}, [[4], 4], True)], {"f"}),
    (dict(test_list=["assert f(1)", "assert g(2)"], test_setup_code="x = 1",
          test_imports=["import math"]),
     [AssertTest("assert f(1)", "import math\nx = 1"),
      AssertTest("assert g(2)", "import math\nx = 1")], {"f", "g"}),
    (dict(test=CHECK, entry_point="f", prompt=STUB),
     [AssertTest(f"{CHECK}\n\ncheck(f)\n", STUB, "f")], {"f"}),
    (dict(test=CHECK, entry_point="f", prompt="Write f."),
     [AssertTest(f"{CHECK}\n\ncheck(f)\n", "", "f")], {"f"}),
]  # fmt: skip


@pytest.mark.parametrize("columns, tests, names", FORMS)
def test_columns_are_parsed_into_tests(columns, tests, names):
    assert parse_tests(row(**columns)) == tests and forms.tested_names(tests) == names
    nulls = dict.fromkeys(["input_output", "tests", "test_list", "test"])
    assert parse_tests(row(**nulls | columns)) == tests, "a table gives every row all columns"


def test_null_keys_of_a_table_are_ignored():
    empty = dict(function=None, args=None, kwargs=None, result=None, input=None, output=None)
    tests = [empty | dict(input="1", output="2"), empty | dict(function="f", args=[1])]
    assert parse_tests(row(tests=tests)) == [StdinTest("1", "2"), CallTest("f", [1], {}, [None])]


@pytest.mark.parametrize(
    "prompt, source",
    [(STUB, STUB), ("def f(x):\n    # adds one\n", "def f(x):\n    # adds one\n\n    pass\n"),
     ("Write f.", ""), ("def g(x): pass", ""), ([dict(role="user", content=STUB)], ""), (None, "")],
)  # fmt: skip
def test_stub_is_extracted_from_the_prompt(prompt, source):
    assert stub(prompt, "f") == source


# ---- malformed rows ----


@pytest.mark.parametrize(
    "columns, message",
    [
        ({}, "no tests: expected one of the columns input_output, tests, test_list, test"),
        (dict(tests=None), "no tests"),
        (dict(tests=[]), "tests is empty"),
        (dict(tests="[]"), "tests is empty"),
        (dict(tests="[{"), "tests is not JSON"),
        (dict(tests="[" * 100_000), "tests is not JSON"),
        (dict(tests="{}"), "tests is a dict, not a list"),
        (dict(tests=3), "tests is a int, not a list"),
        (dict(tests=["assert f(1) == 1", 3]), r"tests\[1\] is a int"),
        (dict(tests=["assert f(1) == "]), r"tests\[0\] does not parse as Python"),
        (dict(tests=["f(1)"]), r"tests\[0\] has no assert"),
        (dict(tests=[""]), r"tests\[0\] has no assert"),
        (dict(tests=[dict(input="1", output="1", stdin="")]), r"tests\[0\] has unknown keys stdin"),
        (dict(tests=[dict(input="1")]), r"tests\[0\] lacks output"),
        (dict(tests=[{}]), r"tests\[0\] lacks input, output"),
        (dict(tests=[dict(input="1", output=1)]), r"tests\[0\]: output is not a str"),
        (dict(tests=[dict(function="f", args=[1])]), r"tests\[0\] lacks result"),
        (dict(tests=[dict(function="f", args="1", result=1)]), r"tests\[0\]: args is not a list"),
        (
            dict(tests=[dict(function="f", kwargs=[], result=1)]),
            r"tests\[0\]: kwargs is not a dict",
        ),
        (
            dict(tests=[dict(function="f(", args=[], result=1)]),
            r"tests\[0\]: function does not parse",
        ),
        (dict(tests=[dict(function="f", args=[], result=1, output="1")]), "unknown keys output"),
        (dict(input_output="x"), "input_output is not JSON"),
        (dict(input_output=[]), "input_output is a list, not an object"),
        (dict(input_output=dict(inputs=["1"])), "needs lists inputs and outputs"),
        (dict(input_output=dict(inputs=["1"], outputs=[])), "has 1 inputs and 0 outputs"),
        (dict(input_output=dict(inputs=[], outputs=[])), "input_output is empty"),
        (
            dict(input_output=dict(inputs=[1], outputs=["1"])),
            r"inputs\[0\] is neither text nor a list of lines",
        ),
        (
            dict(input_output=dict(inputs=[1], outputs=[1], fn_name="f")),
            "inputs are lists of arguments",
        ),
        (
            dict(input_output=dict(inputs=[[1]], outputs=[1], fn_name="f()")),
            "fn_name is not a name",
        ),
        (dict(test_list=[]), "test_list is empty"),
        (dict(test_list="assert f(1)"), "test_list is not a list of strings"),
        (dict(test_list=["assert f(1"]), r"test_list\[0\] does not parse"),
        (dict(test_list=["assert f(1)"], test_setup_code="x ="), "test_setup_code does not parse"),
        (
            dict(test_list=["assert f(1)"], test_imports="import math"),
            "test_imports is not a list of strings",
        ),
        (dict(test="def check(candidate): pass"), "entry_point is not a name"),
        (dict(test="def check(candidate): pass", entry_point="f()"), "entry_point is not a name"),
        (dict(test="assert f(1)", entry_point="f"), r"test does not define check\(candidate\)"),
        (dict(test="def check(", entry_point="f"), "test does not parse"),
    ],
)
def test_malformed_rows_are_refused_by_name(columns, message):
    with pytest.raises(ValueError, match=f"^train.jsonl:7: .*{message}"):
        parse_tests(row(**columns))
