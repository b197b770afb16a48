"""User files: errors name the problem, and the parameters of a reward determine its form."""

import pytest

from common.rewards.registry import reward_form
from common.rewards.user_code import load_callable

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


async def waits(completions, row, ids): ...


class Judge:
    def __call__(self, text, example): ...


@pytest.mark.parametrize(("function", "form"), [
    (lambda completion, row: 0, (False, False)),
    (lambda text, example, scale=1: 0, (False, False)),
    (lambda *anything: 0, (False, False)),
    (lambda completion, row, ids=None: 0, (False, True)),
    (lambda completions, row, **more: 0, (True, False)),
    (waits, (True, True)), (Judge(), (False, False)),
])  # fmt: skip
def test_parameters_determine_the_form(function, form):
    assert reward_form("mine.py:f", function) == form


@pytest.mark.parametrize(("function", "words"), [
    (lambda completion: 0, "too many positional arguments"),
    (lambda completion, row, tokenizer: 0, "missing a required argument: 'tokenizer'"),
    (lambda completion, row, *, scale: 0, "missing a required.* argument: 'scale'"),
    (lambda prompts, completions, **more: 0, "'completions' stands elsewhere"),
    (lambda completion, ids, row: 0, "'ids' stands elsewhere"),
    (Judge, "it is a class; name a function, or an object that can be called"),
    (lambda completion, answer: 0, "'answer' gets the whole row; call it row, and read row"),
])  # fmt: skip
def test_unknown_parameters_are_refused(function, words):
    form = f"^--reward mine.py:f: .*or \\(completions, row\\).*: {words}"
    with pytest.raises(ValueError, match=form) as error:
        reward_form("mine.py:f", function, ("prompt", "answer"))
    assert "\n" not in str(error.value)
