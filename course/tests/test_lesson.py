"""Lessons: the pages agree with the descriptions and the stored curves; bands and verdicts; stored
runs."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from in_process import call_main

from common.config.parse import parse
from course import lesson as module

NAMES = sorted(path.stem for path in module.LESSONS.glob("*_*.yaml"))
PROGRAM = """
import json, pathlib, sys
folder, seed = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1]), int(sys.argv[-1])
folder.mkdir(parents=True)
(folder / "args.yaml").write_text(f"seed: {seed}")
lines = [dict(step=step, score=step * seed * int(sys.argv[1])) for step in (1, 2)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
"""


def page_of(lesson: module.Lesson) -> str:
    """Return the page of a lesson, with its continued lines and its white space as one space."""
    return " ".join(
        lesson.path.with_suffix(".md").read_text(encoding="utf-8").replace("\\\n", " ").split()
    )


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_the_page_are_those_of_the_description(name):
    lesson = module.read_lesson(name)
    commands = [*lesson.before.values(), *map(lesson.command, lesson.yours)]
    assert [command for command in commands if command not in page_of(lesson)] == []
    names = (name, str(int(name[:2])))
    shown = [each for each in names if f"python course/lesson.py {each} " in page_of(lesson)]
    assert shown and module.read_lesson(shown[0]) == lesson


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_commands_are_valid(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    lesson = module.read_lesson(name)
    for command in [*lesson.before.values(), *map(lesson.command, lesson.arms)]:
        script = re.search(r"\S+\.py", command)[0]
        assert Path(script).is_file()
        if "/" not in script:
            args_class = importlib.import_module(script[:-3]).Args
            ranks = re.search(r"--nproc_per_node (\d+)|$", command)[1] or "1"
            monkeypatch.setenv("WORLD_SIZE", ranks)
            parse(args_class, shlex.split(command.partition(script)[2]))


@pytest.mark.parametrize("name", NAMES)
def test_every_arm_has_stored_seeds_and_the_page_their_numbers(name):
    lesson = module.read_lesson(name)
    stored = json.loads(lesson.path.with_suffix(".json").read_text())
    assert [*stored] == [*lesson.arms]
    for runs in stored.values():
        assert [*runs] == [str(seed) for seed in range(1, lesson.seeds + 1)]
        assert all({*run} == {"seconds", *lesson.names} for run in runs.values())
    assert max(run["seconds"] for arm in lesson.yours for run in stored[arm].values()) < 120
    assert " ".join(module.table(lesson).split()) in page_of(lesson)
    picture = lesson.path.with_suffix(".png")
    assert picture.is_file() and f"({picture.name})" in page_of(lesson)


def test_pages_for_students_have_no_answers(tmp_path, monkeypatch):
    """The command of teaching.md cuts the answers, and nothing else."""
    monkeypatch.chdir(ROOT)
    page = Path("course/teaching.md").read_text()
    command = re.search(r"^ +mkdir .*?^ +done$", page, re.M | re.S)[0]
    command = command.replace("build/handout", str(tmp_path))
    subprocess.run(["bash", "-e", "-c", command], check=True)
    for path in module.LESSONS.glob("*.md"):
        whole, shown = path.read_text(), (tmp_path / path.name).read_text()
        answers = re.findall(r"<details>.*?</details>", whole, re.S)
        assert answers and "details>" not in shown and "Answer" not in shown
        assert shown.split() == re.sub(r"<details>.*?</details>", "", whole, flags=re.S).split()


@pytest.fixture
def small(tmp_path, monkeypatch) -> module.Lesson:
    """A lesson 7 whose runs are those of a program: its score is step x seed x the factor of the
    arm."""
    (tmp_path / "factor.py").write_text(PROGRAM)
    description = dict(script="factor.py", arms=dict(once="1", twice="2"), metrics=["score"])
    (tmp_path / "07_factor.yaml").write_text(yaml.safe_dump(description))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LESSONS", tmp_path)
    return module.read_lesson("7")


@pytest.mark.slow
def test_finished_runs_are_not_repeated_and_others_start_anew(small, monkeypatch):
    launched, launch = [], module.launch

    def noted(command: str) -> None:
        launched.append(command)
        launch(command)

    monkeypatch.setattr(module, "launch", noted)
    module.store(small)
    assert launched == [small.command(arm, seed) for seed in (1, 2, 3) for arm in ("once", "twice")]
    stored = small.path.with_suffix(".json").read_text()
    assert json.loads(stored)["twice"]["3"]["score"] == [[1, 6.0], [2, 12.0]]
    (module.ROOT / small.folder("twice", 3) / "seconds").unlink()
    module.store(small)
    assert launched[6:] == [small.command("twice", 3)]
    assert small.path.with_suffix(".json").read_text() == stored


def write_stored(lesson: module.Lesson, **scores: list[float]) -> None:
    """Write stored runs of one step with these scores, for each arm those of the seeds."""
    runs = {
        arm: {str(s): dict(seconds=1, score=[[1, x]]) for s, x in enumerate(of, 1)}
        for arm, of in scores.items()
    }
    lesson.path.with_suffix(".json").write_text(json.dumps(runs))


def test_a_difference_within_the_spread_of_the_seeds_is_not_shown(small):
    write_stored(small, once=[1.0, 2.0, 3.0], twice=[2.0, 2.9, 4.1])
    assert module.table(small).splitlines()[-1] == "| `score` | 2 | **3** |"
    write_stored(small, once=[1.0, 2.0, 3.0], twice=[4.0, 2.0, 3.0])
    assert module.table(small).splitlines()[-1] == "| `score` | 2 | 3 |"


@pytest.mark.slow
def test_tool_compares_a_run_to_the_range_and_draws_it(small, monkeypatch, capsys):
    write_stored(small, once=[1.0, 3.0, 2.0], twice=[4.0, 4.1, 4.2])
    folder = module.ROOT / small.folder("once")
    folder.mkdir(parents=True)
    (folder / "args.yaml").write_text("seed: 0")
    for score, place in ((3.0, "in"), (3.1, "outside")):
        (folder / "metrics.jsonl").write_text(json.dumps(dict(step=1, score=score)) + "\n")
        shown, _ = call_main(module.main, ["lesson.py", 7], 0, monkeypatch, capsys)
        assert (
            f"once: score {score:.3g} at step 1 is {place} the range 1 to 3 of the 3 stored runs"
            in shown
        )
    assert (folder.parent / "07_factor.png").stat().st_size > 5000


@pytest.mark.parametrize("number, message", [
    (
        7,
        "error: lesson 7: no run of yours; "
        "run python factor.py 1 --output_dir runs/course/07/once\n",
    ),
    (8, "error: lesson 8: no such lesson; course/README.md lists them\n"),
])  # fmt: skip
def test_errors_are_one_line(small, number, message, monkeypatch, capsys):
    assert call_main(module.main, ["lesson.py", number], 2, monkeypatch, capsys)[1] == message
