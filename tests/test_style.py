"""Code that a reader follows line by line: limits for the scripts and common/."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

from helpers import ROOT

SCRIPTS = sorted(ROOT.glob("*.py"))
MODULES = sorted(ROOT.glob("common/**/*.py"))
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@cache
def sources() -> dict[str, str]:
    """Return the text of each file by its path."""
    files = [*SCRIPTS, *MODULES]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for name, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            yield name, node


def places(is_one: Callable[[ast.AST], bool]) -> list[str]:
    """Return the file and the line of the nodes for which `is_one` is true."""
    return [f"{name}:{node.lineno}" for name, node in nodes() if is_one(node)]


def test_lines_are_short():
    lines = {
        f"{name}:{number}": line
        for name, text in sources().items()
        for number, line in enumerate(text.splitlines(), 1)
    }
    assert {place: line for place, line in lines.items() if len(line) > 100} == {}


def test_files_and_main_are_short():
    sizes = {name: len(text.splitlines()) for name, text in sources().items()}
    assert {n: size for n, size in sizes.items() if size > (350 if "/" in n else 400)} == {}
    mains = {
        name: node.end_lineno - node.lineno + 1
        for name, node in nodes()
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    }
    assert {name: size for name, size in mains.items() if size > 130} == {}


def has_several(node: ast.AST) -> bool:
    """Return whether a statement is `a, b = x, y`, other than the swap `a, b = b, a`."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names), *_], value=ast.Tuple(elts=values)):
            return {ast.unparse(x) for x in names} != {ast.unparse(x) for x in values}
    return False


def test_an_assignment_has_one_expression():
    assert places(has_several) == []
    (*fine, bad) = ast.parse("a, b = b, a\na, b = f()\na = b = 1, 2\na, b = 1, 2").body
    assert not any(map(has_several, fine)) and has_several(bad)


def test_few_expressions_assign_a_name():
    found = places(lambda node: isinstance(node, ast.NamedExpr))
    assert len(found) <= 30, found


def test_few_comprehensions_have_two_loops():
    found = places(lambda node: isinstance(node, COMPREHENSIONS) and len(node.generators) > 1)
    assert len(found) <= 15, found


def test_no_two_modules_have_one_name():
    names = Counter(path.stem for path in MODULES if path.stem != "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def looks_at_args(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name(id="args"), *_]):
            return True
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id="args"), kind]):
            return "Args" in ast.unparse(kind)
    return False


def test_only_config_looks_at_the_type_of_args():
    """Other packages get values, or flags that all callers have."""
    found = places(looks_at_args)
    assert [place for place in found if not place.startswith("common/config/")] == []
