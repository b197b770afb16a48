"""Adapters of docs/environments.md for environments of other packages, which are not installed
here."""

import ast
import re

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(class .*?|import .*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_package_has_an_adapter():
    packages = [package for package in ("gymnasium", "openenv") if package in PAGE]
    assert len(packages) == 2 and len(BLOCKS) == 1 + len(packages)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: re.search(r"class (\w+)", code)[1])
def test_a_class_of_the_page_is_an_environment(code):
    compile(code, "docs/environments.md", "exec")
    (environment,) = (node for node in ast.parse(code).body if isinstance(node, ast.ClassDef))
    methods = {node.name: node for node in environment.body if isinstance(node, ast.FunctionDef)}
    for name in ("reset", "step"):
        arguments = methods[name].args
        assert len(arguments.args) == 2 and not arguments.kwonlyargs
    assert "__init__" not in methods  # objects are made without arguments
