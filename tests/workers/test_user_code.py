"""Functions and classes of a user's file; errors name the problem."""

import pytest

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
