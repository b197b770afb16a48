"""The tests of a row: the common form of each dataset's columns, and malformed rows."""

import json

import pytest

from extras.code import cases
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
    assert parse_tests(row(**columns)) == tests and cases.tested_names(tests) == names
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


@pytest.mark.parametrize("columns, message", [
    ({}, "no tests: expected one of the columns input_output, tests, test_list, test"),
    (dict(tests=None), "no tests"), (dict(tests=[]), "tests: empty"), (dict(tests="[]"), "empty"),
    (dict(tests="[{"), "tests: "), (dict(tests="[" * 100_000), "tests: "),
    (dict(tests="{}"), "empty"), (dict(tests=3), "tests: 'int' object is not iterable"),
    (dict(tests=["assert f(1) == 1", 3]), "source: Input should be a valid string"),
    (dict(tests=["assert f(1) == "]), "tests: invalid syntax"), (dict(tests=["f(1)"]), "no assert"),
    (dict(tests=[""]), "no assert"), (dict(tests=["assert f('\0')"]), "null bytes"),
    (dict(tests=[dict(input="1", output="1", stdin="")]), "stdin: Unexpected keyword"),
    (dict(tests=[dict(input="1", output="1", testtype="functional")]), "testtype: Unexpected"),
    (dict(tests=[dict(input="1")]), "output: Field required"),
    (dict(tests=[{}]), "input: Field required"),
    (dict(tests=[dict(input="1", output=1)]), "output: Input should be a valid string"),
    (dict(tests=[dict(function="f", args=[1])]), "lacks result"),
    (dict(tests=[dict(function="f", args="1", result=1)]), "args: Input should be a valid list"),
    (dict(tests=[dict(function="f", kwargs=[], result=1)]), "kwargs: Input should be a valid dict"),
    (dict(tests=[dict(function="f(", args=[], result=1)]), "tests: '\\(' was never closed"),
    (dict(tests=[dict(function="f", args=[], result=1, output="1")]), "output: Unexpected keyword"),
    (dict(input_output="x"), "input_output: "), (dict(input_output=[]), "input_output: "),
    (dict(input_output=dict(inputs=["1"])), "outputs: Input should be a valid list"),
    (dict(input_output=dict(inputs=["1"], outputs=[])), "input_output: zip"),
    (dict(input_output=dict(inputs=[], outputs=[])), "input_output: empty"),
    (dict(input_output=dict(inputs=[1], outputs=["1"])), "input: Input should be a valid string"),
    (dict(input_output=dict(inputs=[1], outputs=[1], fn_name="f")), "args: Input should be"),
    (dict(input_output=dict(inputs=[[1]], outputs=[1], fn_name="f()")), "'f\\(\\)' is not a name"),
    (dict(test_list=[]), "empty"), (dict(test_list="assert f(1)"), "test_list: "),
    (dict(test_list=["assert f(1"]), "test_list: "),
    (dict(test_list=["assert f(1)"], test_setup_code="x ="), "test_list: invalid syntax"),
    (dict(test_list=["assert f(1)"], test_imports="import math"), "test_list: "),
    (dict(test="def check(candidate): pass"), "None is not a name"),
    (dict(test="def check(candidate): pass", entry_point="f()"), "'f\\(\\)' is not a name"),
    (dict(test="assert f(1)", entry_point="f"), r"does not define check\(candidate\)"),
    (dict(test="def check(", entry_point="f"), "test: '\\(' was never closed"),
])  # fmt: skip
def test_malformed_rows_are_refused_by_name(columns, message):
    with pytest.raises(ValueError, match=f"^train.jsonl:7: .*{message}"):
        parse_tests(row(**columns))
