"""The packages of common/ form layers: a package imports only from lower layers and itself, so that
it can be understood without the higher ones, and modules have no import cycle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT

LAYERS = [
    "objectives parallel",
    "config",
    "data",
    "model metrics",
    "rewards",
    "rollout",
    "evaluate",
    "train",
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages.split()}
FILES = sorted([*ROOT.glob("*.py"), *ROOT.glob("common/**/*.py")])
PACKAGES = sorted(path for path in FILES if path.name == "__init__.py")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {dotted(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """Return the project's modules that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found & NAMES - {"common", dotted(path)}


def package(name: str) -> str:
    return name.split(".")[1]


def imported_at_the_top(path: Path) -> set[str]:
    """Return the project's modules that a file imports when it is loaded."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom):
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found & NAMES if name.count(".") == 2}


def test_training_knows_neither_rollouts_nor_rewards():
    names = {name for path in ROOT.glob("common/train/*.py") for name in imported(path)}
    assert {package(name) for name in names if name.count(".") == 2}.isdisjoint(
        {"rollout", "rewards"}
    )


def test_package_imports_only_from_lower_layers():
    assert {package(dotted(path)) for path in PACKAGES if dotted(path) != "common"} == LEVEL.keys()
    edges = {
        (dotted(path), name)
        for path in FILES
        if dotted(path).count(".") == 2
        for name in imported(path)
    }
    wrong = {
        (one, other)
        for one, other in edges
        if other.count(".") == 2
        and package(one) != package(other)
        and LEVEL[package(one)] <= LEVEL[package(other)]
    }
    assert wrong == set()


def test_imports_have_no_cycle_and_no_script_is_imported():
    """A module may import in a function what is built on it: an interface its implementation."""
    TopologicalSorter({dotted(path): imported_at_the_top(path) for path in FILES}).prepare()
    graph = {dotted(path): imported(path) for path in FILES}
    scripts = {name for name in NAMES if "." not in name}
    assert {name: found & scripts for name, found in graph.items() if found & scripts} == {}


@pytest.mark.parametrize("path", PACKAGES, ids=dotted)
def test_package_docstring_is_one_sentence(path):
    (docstring,) = tree(path).body
    text = docstring.value.value
    assert text.endswith(".") and ". " not in " ".join(text.split())


def test_objectives_take_tensors_and_numbers():
    wrong = set()
    for path in ROOT.glob("common/objectives/*.py"):
        for function in (
            node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)
        ):
            arguments = function.args
            names = {
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            }
            if names & {"args", "meter", "model", "policy"} or arguments.vararg:
                wrong.add(f"{dotted(path)}.{function.name}")
    assert wrong == set()
