"""Schemas from files, and the tools of a row; wrong ones are refused in one line."""

import pytest
from field.families import CHATML, IM_END, ours

from extras.tools.schemas import tool_schemas, tool_selector
from extras.tools.sources import name_of
from extras.tools.tasks import PYTHON_TOOL
from extras.tools.tests.episodes import make_args, written


def test_tools_are_public_functions_with_a_docstring_and_methods(tmp_path):
    pytest.importorskip("extras.code")
    file = written(tmp_path)
    schemas = tool_schemas(make_args(tools=(str(file), f"{file}:Shelf", "python")))
    assert [name_of(schema) for schema in schemas] == ["add", "put", "python"]
    parameters = schemas[0]["function"]["parameters"]
    assert parameters["required"] == ["a"] and parameters["properties"]["b"]["type"] == "integer"


def test_the_task_has_the_schema_of_the_tool():
    """So a prompt has the same ids in sft.py and in grpo.py."""
    pytest.importorskip("extras.code")
    (schema,) = tool_schemas(make_args(tools=("python",)))
    schema["function"].pop("return")
    assert schema == PYTHON_TOOL


def test_a_row_selects_tools(tmp_path):
    file = written(tmp_path)
    tokenizer = ours("qwen2_5", "builtin", IM_END, CHATML, IM_END[0]).load()
    select = tool_selector(make_args(tools=(str(file), f"{file}:Shelf")), tokenizer)

    def names(**row):
        return list(map(name_of, select(dict(row, _source="rows:3"))))

    assert names() == names(tools=None) == ["add", "put"]
    assert names(tools=["add"]) == names(tools='["add"]') == ["add"] and names(tools=[]) == []
    assert names(tools=[dict(type="function", function=dict(name="put"))]) == ["put"]
    for tools, words in (
        (["nix"], "rows:3: column tools: unknown tool nix; --tools has add, put"),
        (7, "rows:3: column tools must list JSON schemas"),
        ("[", "rows:3: column tools is not JSON"),
    ):
        with pytest.raises(ValueError, match=words):
            names(tools=tools)


DOCUMENTED = 'def f(a):\n    """F.\n\n    Args:\n        a: one\n    """\n'


@pytest.mark.parametrize(("text", "tools", "words"), [
    (DOCUMENTED, ["{}"], "--tools .*my.py: f: Argument a is missing a type hint in function f"),
    ("def f(a: int):\n    pass\n", ["{}:f"], "f: Cannot generate JSON schema for f because it"),
    ('def f(a: int):\n    """F."""\n', ["{}"], "f: .*no description for the argument 'a'"),
    ('async def f():\n    """F."""\n', ["{}"], "f: not a plain function"),
    ("x = 1\n", ["{}"], "no public function with a docstring; write one"),
    ("class A:\n    pass\n", ["{}:A"], "no public method; write one"),
    ("1 / 0\n", ["{}"], "my.py fails to import: ZeroDivisionError"),
    ("", ["{}.py"], "no file .*my.py.py"), ("", ["{}:nix"], "my.py has no function nix"),
    ('def python():\n    """P."""\n', ["{}", "python"], "name python is taken by"),
    ("", ["calculator"], "unknown; there are python, mcp:COMMAND, path/to/file.py"),
])  # fmt: skip
def test_wrong_tools_are_refused(tmp_path, text, tools, words):
    if "python" in tools:
        pytest.importorskip("extras.code")
    (tmp_path / "my.py").write_text(text)
    args = make_args(tools=tuple(tool.format(tmp_path / "my.py") for tool in tools))
    with pytest.raises(ValueError, match=words) as caught:
        tool_schemas(args)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--tools ")
