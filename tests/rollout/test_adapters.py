"""Adapters of docs/environments.md for environments of other packages, which are not installed
here."""

import ast
import re

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(class .*?|import .*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: re.search(r"class (\w+)", code)[1])
def test_a_class_of_the_page_is_an_environment(code):
    assert len(BLOCKS) == 3  # of a user's own, Gymnasium, OpenEnv
    (environment,) = (node for node in ast.parse(code).body if isinstance(node, ast.ClassDef))
    methods = {node.name: node for node in environment.body if isinstance(node, ast.FunctionDef)}
    for name in ("reset", "step"):
        arguments = methods[name].args
        assert len(arguments.args) == 2 and not arguments.kwonlyargs
    assert "__init__" not in methods  # objects are made without arguments
