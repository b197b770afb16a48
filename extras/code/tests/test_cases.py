"""The tests of a row: test_rewards.py has their forms; malformed ones are refused."""

import pytest

from extras.code.cases import CallTest, StdinTest, parse_tests


def row(**columns) -> dict:
    return dict(_source="train.jsonl:7", **columns)


def test_nulls_of_a_table_are_ignored():
    """It gives every row all columns, and every test the keys of all."""
    empty = dict(function=None, args=None, kwargs=None, result=None, input=None, output=None)
    tests = [empty | dict(input="1", output="2"), empty | dict(function="f", args=[1])]
    columns = dict.fromkeys(["input_output", "test_list", "test"]) | dict(tests=tests)
    assert parse_tests(row(**columns)) == [StdinTest("1", "2"), CallTest("f", [1], {}, [None])]


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
