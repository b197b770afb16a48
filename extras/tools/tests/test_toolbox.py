"""The tools of one episode: results and errors as the model reads them; the interpreter, which is
built in."""

import json
import re

import pytest
from helpers import ROOT

from extras.code.sandbox import program
from extras.tools import python_tool
from extras.tools import toolbox as toolbox_module
from extras.tools.schemas import tool_schemas
from extras.tools.tests.episodes import make_args
from extras.tools.toolbox import Outcome, Toolbox, load_toolbox, settings_of

PAGE = ROOT / "extras/tools/README.md"


def begin(*tools: str, seconds: float = 60.0, **row: object) -> Toolbox:
    args = make_args(tools=tools, environment_timeout=seconds)
    toolbox = load_toolbox(settings_of(args))()
    toolbox.begin(dict(row, tools=tool_schemas(args)))
    return toolbox


def test_results_and_errors(file):
    toolbox = begin(str(file), f"{file}:Shelf", first="cup")
    assert toolbox.call("add", dict(a=1)) == Outcome("2")
    assert toolbox.call("put", dict(item="é")) == Outcome('["cup", "é"]')
    assert toolbox.call("put", dict(item="x")).text == '["cup", "é", "x"]', "no state"
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


def test_a_long_result_is_cut_with_a_note(file, monkeypatch):
    monkeypatch.setattr(toolbox_module, "MAX_OUTPUT", 5)
    outcome = begin(f"{file}:Shelf", first="").call("put", dict(item="\ud800abc"))
    assert outcome == Outcome('["", \n[the first 5 of 12 characters]', cut=True)


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


@confined
def test_python_has_a_time_limit():
    outcome = begin("python", seconds=0.5).call("python", dict(code="while True: pass"))
    assert outcome.problem == "timed_out" and "0.4 s: time limit" in outcome.text


def test_python_is_refused_where_it_cannot_be_confined(monkeypatch):
    monkeypatch.setattr(program, "problem", lambda: "this is plan9")
    with pytest.raises(ValueError, match="--tools python: this is plan9; --unsafe_code_execution"):
        python_tool.require_confinement(unsafe=False)
    python_tool.require_confinement(unsafe=True)


def test_search_of_the_page_finds_the_text_of_the_words(tmp_path, monkeypatch):
    pytest.importorskip("bm25s")
    (code,) = re.findall("```python\n(# search.py.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "search.py").write_text(code)
    texts = "Paris is the capital of France", "Berlin is the capital of Germany", "Cats sleep"
    rows = "".join(json.dumps(dict(text=text)) + "\n" for text in texts)
    (tmp_path / "corpus.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    toolbox = begin("search.py")
    found = toolbox.call("search", dict(query="capital of France", count=2)).text
    assert found == "Paris is the capital of France\n\nBerlin is the capital of Germany"
    assert toolbox.call("search", dict(query="zebra", count=99)).text == ""
