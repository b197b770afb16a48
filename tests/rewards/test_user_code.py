"""User files: errors name the problem, and the parameters of a reward determine its form."""

import sys

import pytest

from common.rewards.user_code import load_callable, reward_form
from tests.rewards.pools import opened

FILES = {
    "good.py": "made = []\nmade.append(1)\nclass Thing: ...\ndef f(x): return x + 1\nnumber = 3\n",
    "missing.py": "import nonesuch",
    "syntax.py": "def f(:",
    "leaves.py": "raise SystemExit(0)",
    "base.py": "raise BaseException('no')",
    "raises.py": "raise RuntimeError('first\\nsecond')",
    "notes.txt": "def f(): ...",
}


@pytest.fixture
def folder(tmp_path):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent.py:f", "no file "),
        ("good:f", "; did you mean {folder}/good.py:f?"),
        ("good.py:absent", "has no function absent"),
        ("good.py:Things", "has no function Things; did you mean Thing?"),
        ("good.py:number", "has no function number"),
        ("notes.txt:f", "is not a Python file"),
        ("missing.py:f", "fails to import: ModuleNotFoundError: No module named 'nonesuch'"),
        ("syntax.py:f", "fails to import: SyntaxError"),
        ("leaves.py:f", "fails to import: SystemExit"),
        ("base.py:f", "fails to import: BaseException: no"),
        ("raises.py:f", "fails to import: RuntimeError: first"),
    ],
)
def test_errors_name_the_problem(name, words, folder):
    with pytest.raises(ValueError) as error:
        load_callable("--reward", f"{folder}/{name}")
    assert str(error.value).startswith(f"--reward {folder}/{name}: ")
    assert words.format(folder=folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_functions_and_classes_are_loaded_from_a_file(folder):
    assert load_callable("--reward", f"{folder}/good.py:f")(1) == 2
    assert isinstance(load_callable("--environment", f"{folder}/good.py:Thing"), type)


# ---- files beside it ----

SIBLINGS = {
    "mine.py": "import first_helper\nimport json\ndef f(completion, row):\n    import late_helper\n"
    "    return first_helper.g(completion) + late_helper.ONE\n",
    "first_helper.py": "import yaml\nfrom second_helper import part\n"
    "def g(text): return part.TWO * len(text)\n",
    "late_helper.py": "ONE = 1.0\n",
    "second_helper/__init__.py": "",
    "second_helper/part.py": "TWO = 2.0\n",
}


@pytest.fixture
def siblings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "second_helper").mkdir()
    for file, text in SIBLINGS.items():
        (tmp_path / file).write_text(text)
    yield tmp_path
    for name in ("first_helper", "late_helper", "second_helper", "second_helper.part"):
        sys.modules.pop(name, None)


def test_files_beside_it_can_be_imported_in_the_run_and_in_worker_processes(siblings, capsys):
    spec = f"{siblings}/mine.py:f"
    assert load_callable("--reward", spec)("abc", {}) == 7
    with opened(spec, 1) as pool:
        assert pool.map([("abc", {})])[0].value == 7
    assert capsys.readouterr().out == ""


# ---- the forms of a reward ----


async def waits(completions, row, ids): ...


class Judge:
    def __call__(self, text, example): ...


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (lambda completion, row: 0, (False, False)),
        (lambda text, example, scale=1: 0, (False, False)),
        (lambda *anything: 0, (False, False)),
        (lambda completion, row, ids: 0, (False, True)),
        (lambda completion, row, ids=None: 0, (False, True)),
        (lambda completions, row, **more: 0, (True, False)),
        (waits, (True, True)),
        (Judge(), (False, False)),
    ],
)
def test_parameters_determine_the_form(function, form):
    assert reward_form("mine.py:f", function) == form


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 0, "too many positional arguments"),
        (lambda completion: 0, "too many positional arguments"),
        (lambda completion, row, tokenizer: 0, "missing a required argument: 'tokenizer'"),
        (lambda completion, row, ids, scale: 0, "missing a required argument: 'scale'"),
        (lambda completion, row, *, scale: 0, "missing a required.* argument: 'scale'"),
        (lambda prompts, completions, **more: 0, "'completions' stands elsewhere"),
        (lambda completion, ids, row: 0, "'ids' stands elsewhere"),
        (lambda completion, row, *, ids: 0, "too many positional arguments"),
        (lambda row, completion: 0, "'row' stands elsewhere"),
        (Judge, "it is a class; name a function, or an object that can be called"),
        (
            lambda completion, answer: 0,
            "'answer' gets the whole row; call it row, and read row\\['answer'\\]",
        ),
        (
            type("OfNumber", (Judge,), dict(columns=5))(),
            "its attribute columns is 5, not a tuple of names",
        ),
    ],
)
def test_unknown_parameters_are_refused(function, words):
    with pytest.raises(
        ValueError, match=f"^--reward mine.py:f: .*or \\(completions, row\\).*: {words}"
    ) as error:
        reward_form("mine.py:f", function, ("prompt", "answer"))
    assert "\n" not in str(error.value)
