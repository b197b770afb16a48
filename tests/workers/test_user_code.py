"""Functions and classes of a user's file; errors name the problem."""

import json
import sys

import pytest
import yaml

from common.workers.user_code import load_callable

FILES = {
    "good.py": "class Thing: ...\ndef f(x): return x + 1\nnumber = 3\n",
    "missing.py": "import nonesuch",
    "leaves.py": "raise SystemExit(0)",
    "raises.py": "raise RuntimeError('first\\nsecond')",
    "notes.txt": "def f(): ...",
}


@pytest.fixture
def folder(tmp_path):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("name", "words"), [
    ("absent.py:f", "no file "), ("good:f", "the form is path/to/file.py:name"),
    ("good.py:absent", "has no function absent"), ("good.py:number", "has no function number"),
    ("notes.txt:f", "that ends in .py"),
    ("missing.py:f", "fails to import: ModuleNotFoundError: No module named 'nonesuch'"),
    ("leaves.py:f", "fails to import: SystemExit"),
    ("raises.py:f", "fails to import: RuntimeError: first"),
])  # fmt: skip
def test_errors_name_the_problem(name, words, folder):
    with pytest.raises(ValueError) as error:
        load_callable("--reward", f"{folder}/{name}")
    assert str(error.value).startswith(f"--reward {folder}/{name}: ")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_functions_and_classes_are_loaded_from_a_file(folder):
    assert load_callable("--reward", f"{folder}/good.py:f")(1) == 2
    assert isinstance(load_callable("--environment", f"{folder}/good.py:Thing"), type)


def test_files_beside_it_are_imported_unless_their_name_is_taken(tmp_path, monkeypatch, capsys):
    """Then a line says so, once."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "mine.py"
    for name in ("json", "yaml", "unread", "helper_beside"):
        (tmp_path / f"{name}.py").write_text("TWO = 2\n")
    file.write_text("import json, yaml.nodes\nfrom helper_beside import TWO\ndef f(): return TWO\n")
    for _ in range(2):
        assert load_callable("--reward", f"{file}:f")() == 2
    lines = capsys.readouterr().out.splitlines()
    for line, module in zip(lines, (json, yaml), strict=True):
        found = f"import {module.__name__} finds {module.__file__}, not the file in {tmp_path}"
        assert line == f"warning: --reward {file}:f: {found}; rename that file"
