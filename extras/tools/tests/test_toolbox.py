"""The tools of one episode: results and errors as the model reads them."""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pandas
import pytest
import torch

from extras.tools.schemas import schema_of, tool_schemas
from extras.tools.tests.episodes import make_args, written
from extras.tools.toolbox import (
    Outcome,
    Toolbox,
    load_toolbox,
    settings_of,
    text_of,
    wrong_arguments,
)


def begin(*tools: str, seconds: float = 60.0, **row: object) -> Toolbox:
    args = make_args(tools=tools, environment_timeout=seconds)
    toolbox = load_toolbox(settings_of(args))()
    toolbox.begin(dict(row, tools=tool_schemas(args)))
    return toolbox


def test_results_and_errors(tmp_path):
    file = written(tmp_path)
    toolbox = begin(str(file), f"{file}:Shelf", first="cup")
    assert toolbox.call("add", dict(a=1)) == Outcome("2")
    assert toolbox.call("put", dict(item="é")) == Outcome('["cup", "é"]')
    assert toolbox.call("put", dict(item="x")).text == '["cup", "é", "x"]', "no state"
    cut = toolbox.call("put", dict(item="\ud800" + 4000 * "a"))
    end = "aa\n[the first 4000 of 4022 characters]"
    assert cut.cut and cut.text.startswith('["cup", "é", "x", "?a') and cut.text.endswith(end)
    for name, arguments, problem, words in (
        ("nix", {}, "unknown", "error: unknown tool nix; there are: add, put"),
        ("add", dict(a="1"), "wrong_arguments", "error: argument a: '1' is not of type 'integer'"),
        ("add", {}, "wrong_arguments", "error: arguments: 'a' is a required property"),
        ("add", dict(a=1, c=2), "wrong_arguments", "error: arguments: Additional properties"),
        ("add", [1], "wrong_arguments", "error: the arguments are not an object"),
        ("add", dict(a=10**5000), "raised", "error: ValueError: Exceeds the limit"),
    ):
        outcome = toolbox.call(name, arguments)
        assert outcome.problem == problem and outcome.text.startswith(words), outcome


@dataclass
class Place:
    name: str
    at: object


def some_letters():
    yield from "ab"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "0.5"),
        (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
        ({np.int64(1): np.True_, None: 2}, '{"1": true, "null": 2}'),
        (torch.tensor([1, 2]), "[1, 2]"),
        ({"b", "a"}, '["a", "b"]'),
        ([Decimal("1.50"), Fraction(1, 3)], '["1.50", "1/3"]'),
        (Place("hall", date(2026, 1, 2)), '{"name": "hall", "at": "2026-01-02"}'),
        (b"a\xff", "a\\xff"),
        ({(1, 2): 3}, '{"[1, 2]": 3}'),
        (some_letters(), '["a", "b"]'),
        ({"b": 1, "a": 2}.keys(), '["b", "a"]'),
        ((1, None, "é", 0.5), '[1, null, "é", 0.5]'),
        ("as\nit is", "as\nit is"),
        (pandas.DataFrame(dict(a=[1, 2])), "   a\n0  1\n1  2"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_model_can_read_what_a_function_returns(value, text):
    assert text_of(value) == text


HINTS = {
    int: [1, -2],
    float: [0.5, 2],
    str: ["", "a"],
    list[int | None]: [[None, 1]],
    dict[str, int | None]: [dict(a=None, b=1)],
    tuple[int, str]: [[1, "a"]],
    list[int] | str | None: [None, [1], "a"],
    Literal["a", None]: [None, "a"],
    Literal["a", "b"] | None: [None, "b"],
    Any: [None, 1, [dict(a=1)]],
}


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_what_a_schema_allows_can_be_sent(hint):
    """A value of another type than the hint's is refused, and the error names it."""

    def tool(x):
        """Do it.

        Args:
            x: what is used
        """

    tool.__annotations__["x"] = hint
    schema = schema_of("--tools", "tool", tool, is_method=False)["function"]["parameters"]
    assert not any(wrong_arguments(schema, dict(x=value)) for value in HINTS[hint])
    if hint is not Any:
        assert wrong_arguments(schema, dict(x=dict(z=[]))).startswith("argument x")
    if None not in HINTS[hint]:
        assert wrong_arguments(schema, dict(x=None)).startswith("argument x: None is not")


def test_a_schema_fetches_nothing(tmp_path):
    (tmp_path / "any.json").write_text("true")
    uri = (tmp_path / "any.json").as_uri()
    toolbox = begin(str(written(tmp_path)))
    for part in (dict(a={"$ref": uri}), dict(a={"$dynamicRef": uri})):
        toolbox.schemas["add"]["parameters"]["properties"] = part
        outcome = toolbox.call("add", dict(a=1))
        assert outcome.problem == "wrong_arguments" and uri in outcome.text
    toolbox.schemas["add"]["parameters"]["properties"] = dict(a={"$ref": "#/$defs/number"})
    toolbox.schemas["add"]["parameters"]["$defs"] = dict(number=dict(type="integer"))
    assert toolbox.call("add", dict(a=1)).text == "2"
    assert toolbox.call("add", dict(a="1")).problem == "wrong_arguments"
