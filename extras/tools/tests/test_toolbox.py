"""The tools of one episode: results and errors as the model reads them; the interpreter, which is
built in."""

import os
import signal
import tempfile
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pandas
import pytest
import torch
from processes import Clock

from extras.code.sandbox import process, program
from extras.tools import python_tool
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


confined = pytest.mark.skipif(program.problem() is not None, reason="programs are not confined")


@confined
def test_python_keeps_its_state_until_it_ends():
    toolbox = begin("python", seconds=5.0)

    def run(code):
        outcome = toolbox.call("python", dict(code=code))
        return outcome.text, outcome.problem

    assert run("x = 3\nprint('x')\nx * 2") == ("x\n6", "")
    assert run("def f():\n    return x + 1") == ("", "") and run("f()") == ("4", "")
    assert run("1 / 0") == ("ZeroDivisionError: division by zero", "")
    assert run("import os\nos.fork()")[0].startswith("PermissionError")
    assert run("x") == ("3", "")
    assert run("import os\nos._exit(3)") == (
        "error: RuntimeError: exit code 3; the interpreter was restarted without its state",
        "raised",
    )
    assert run("x") == ("NameError: name 'x' is not defined", "")
    folder = toolbox.owners["python"].object.program.child.folder
    toolbox.close()
    with pytest.raises(FileNotFoundError):
        open(folder)


SPOILED = dict(
    run=("import sys; sys._getframe(1).f_globals['run'] = None", ""),
    forged=("import os\nfor fd in range(3, 4000):\n    try:\n        "
            "os.write(fd, b'{\"value\":[9,\"x\"]}\\n')\n    except OSError: pass", "malformed"),
    memory=("x = []\nwhile True: x.append('x' * 10**7)", ""),
    time=("while True: pass", "0.3 s: time limit"),
    output=("for i in range(300): print('x' * 10**7)", "xxx"),
)  # fmt: skip


@confined
@pytest.mark.parametrize("kind", SPOILED)
def test_whatever_a_program_does_the_next_call_is_answered(kind, monkeypatch, tmp_path):
    """Afterwards no process and no folder is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    toolbox = begin("python")
    assert toolbox.call("python", dict(code="1")).text == "1"
    interpreter = toolbox.owners["python"].object
    if kind == "time":
        interpreter.seconds = 0.3
    code, said = SPOILED[kind]
    outcome = toolbox.call("python", dict(code=code))
    interpreter.seconds = 60.0
    assert said in outcome.text and (kind != "output" or outcome.cut)
    later = [toolbox.call("python", dict(code="6 * 7")).text for _ in range(2)]
    assert later[1] == "42", (outcome, later)
    assert len(list(tmp_path.glob("onefile-sandbox-*"))) <= 1
    toolbox.close()
    assert list(tmp_path.glob("onefile-sandbox-*")) == []


@confined
def test_an_interpreter_is_stopped_between_calls():
    code = """
import threading, time
done = []
def work():
    while True:
        time.sleep(0.001)
        done.append(1)
threading.Thread(target=work, daemon=True).start()
"""
    toolbox = begin("python")
    assert toolbox.call("python", dict(code=code)).text == ""
    pid = toolbox.owners["python"].object.program.child.process.pid
    assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT).si_status == signal.SIGSTOP
    assert int(toolbox.call("python", dict(code="time.sleep(0.1); len(done)")).text) > 0
    toolbox.close()


@confined
def test_python_that_starts_late_costs_one_call(monkeypatch):
    """The start counts to the time of the call, which is shorter than that of the process."""
    clock, start = Clock(monkeypatch, process, python_tool), process.Child._start
    delay = [70.0, 30.0]

    def start_slowly(*arguments):
        start(*arguments)
        clock.ahead += delay.pop()

    monkeypatch.setattr(process.Child, "_start", start_slowly)
    toolbox = begin("python", seconds=60.0)
    assert toolbox.call("python", dict(code="1")).text == "1"
    toolbox.owners["python"].object.close()
    outcome = toolbox.call("python", dict(code="1"))
    assert outcome == Outcome("error: 48 s: the interpreter did not start", "timed_out")
    toolbox.close()


def test_python_is_refused_where_it_cannot_be_confined(monkeypatch):
    monkeypatch.setattr(program, "problem", lambda: "this is plan9")
    with pytest.raises(ValueError, match="--tools python: this is plan9; --unsafe_code_execution"):
        python_tool.require_confinement(unsafe=False)
    python_tool.require_confinement(unsafe=True)
