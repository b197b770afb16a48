"""The exercises mark right solutions as right and wrong ones as wrong, with the case that they
violate."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from processes import environment

from course.exercises.bugs import BUGS
from course.exercises.fragments import replace
from course.exercises.holes import CASES, EXERCISES
from course.exercises.mark import SYS_PATH, answer, cut_ends, parsed, planted, worksheet


def mark(*flags: object) -> list[str]:
    """Run `course/exercises/mark.py` and return the lines that it prints."""
    command = [sys.executable, ROOT / "course/exercises/mark.py", *map(str, flags)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(COLUMNS="200"), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def write(work: Path, name: str, text: str) -> None:
    number = [exercise.name for exercise in EXERCISES].index(name) + 1
    (work / f"{number:02d}_{name}.py").write_text(text)


def by_name(name: str):
    return next(exercise for exercise in EXERCISES if exercise.name == name)


def test_sections_of_the_exercises_are_those_of_the_primer():
    headings = re.findall(r"^## (.*)$", (ROOT / "course/primer.md").read_text(), re.MULTILINE)
    assert {exercise.section for exercise in EXERCISES} <= set(headings)


@pytest.mark.parametrize("exercise", [*EXERCISES, *BUGS], ids=lambda exercise: exercise.name)
def test_tests_of_an_exercise_exist(exercise):
    for test in exercise.tests:
        file, _, name = test.rpartition("::")
        function = name.partition("[")[0]
        assert f"\ndef {function}(" in (ROOT / (file or CASES)).read_text(), test


@pytest.mark.slow
def test_all_right_solutions_pass_and_each_wrong_one_fails_its_own_test():
    assert len(EXERCISES) == 24 and len(BUGS) == 4
    assert all(len(exercise.wrong) == 3 for exercise in EXERCISES)
    assert mark("--check")[-1] == "28 of 28 right, 76 of 76 caught"


@pytest.mark.slow
def test_each_solution_is_marked_and_affects_no_other(tmp_path):
    """Solutions: right with a helper and an import of its own; wrong; errors at import and in a
    test; a loop without end; the end of the process; a function that is not there; a mended
    script."""
    gae, kl, clip = (answer(by_name(name)) for name in ("gae", "kl", "clip"))
    helper = "import operator\n\n\ndef product(a, b):\n    return operator.mul(a, b)\n"
    write(tmp_path, "gae", gae.replace("gae_lambda * A", "product(gae_lambda, A)") + helper)
    write(tmp_path, "kl", kl.replace("/ 2", "/ 3"))
    write(tmp_path, "dft", "def loss(:\n")
    write(tmp_path, "clip", clip.replace("rho_T = ", "rho_T = unknown + "))
    write(tmp_path, "pass_at_k", "def pass_at_k(n, c, k):\n    while True:\n        pass\n")
    write(tmp_path, "dpo", "import os\n\n\ndef loss(pairs, args):\n    os._exit(0)\n")
    write(
        tmp_path, "importance", "def importance_weights(*_, **__):\n    raise KeyboardInterrupt\n"
    )
    write(tmp_path, "ipo", "def another():\n    pass\n")
    (tmp_path / "bug_4.py").write_text((ROOT / "rloo.py").read_text())
    names = ("gae", "kl", "dft", "clip", "pass_at_k", "dpo", "ipo", "importance", "bug_4", "bug_1")
    lines = mark("--work", tmp_path, "--limit", 3, *names)
    verdict = r"^(?:\d\d )?(\w+) +((?:right|wrong|error|not begun).*)$"
    found = dict(re.findall(verdict, "\n".join(lines), re.MULTILINE))
    assert found.pop("clip").partition("line ")[0] == "error: "
    assert found == {
        "gae": "right",
        "kl": "wrong: near d = 0, k2 and k3 must agree",
        "dft": "error: line 1: SyntaxError: invalid syntax (05_dft.py, line 1)",
        "pass_at_k": "error: no result after 3 s: a loop without end?",
        "dpo": "error: the solution ended Python",
        "importance": "error: the solution ended Python",
        "ipo": "error: NameError: the file does not define preference_loss",
        "bug_4": "right",
        "bug_1": "not begun",
    }
    after = lines[next(i for i, line in enumerate(lines) if "wrong: near" in line) :]
    assert after[2] == "tests/objectives/test_cases.py::test_k2_and_k3_agree_near_0"
    assert after[4].startswith("assert ")


def test_files_are_written_once_and_unknown_names_are_refused(tmp_path):
    """No test runs for an exercise that is not begun."""
    assert mark("--work", tmp_path, "gae") == ["19 gae             not begun"]
    path = tmp_path / "19_gae.py"
    assert path.read_text() == worksheet(19, by_name("gae"))
    path.write_text(path.read_text() + "# mine\n")
    assert mark("--work", tmp_path)[-1].startswith("0 right, 0 wrong, 0 error, 28 not begun; ")
    assert path.read_text().endswith("# mine\n") and len(list(tmp_path.glob("*.py"))) == 28
    words = "ONLY=gea: no such exercise; choose from sft_row, pack"
    with pytest.raises(AssertionError, match=words):
        mark("--work", tmp_path, "gea")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_worksheet_has_the_function_without_its_solution(exercise):
    text = worksheet(1, exercise)
    compile(text, "worksheet", "exec")
    assert text.count("raise NotImplementedError\n") == len(exercise.cuts)
    source = parsed(exercise)[2]
    for cut in exercise.cuts:
        begin, end = cut_ends(exercise, cut, source)
        assert source[begin:end] not in text


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_script_differs_from_the_script_by_the_bug(bug):
    script = (ROOT / bug.script).read_text()
    text = planted(bug).replace(SYS_PATH, "")
    compile(text, bug.script, "exec")
    assert text == replace(bug.before, bug.after, script, bug.script) != script


def test_page_lists_every_exercise():
    page = (ROOT / "course/exercises/README.md").read_text()
    for number, exercise in enumerate(EXERCISES, 1):
        anchor = exercise.section.lower().replace(",", "").replace(" ", "-")
        assert f"| {number} | [`{exercise.name}`](" in page and f"../primer.md#{anchor})" in page
