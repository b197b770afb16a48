"""Write the exercises of holes.py and the broken scripts of bugs.py to work/, and mark what is
there with the project's own tests (README.md beside this file).

    make exercises                      # one line for each
    make exercises ONLY=gae             # one exercise, with the assertion that fails
    python course/exercises/mark.py --check    # the project's own functions, and all wrong ones

A solution gets into the project by its code object: the project's function runs the learner's code,
for every module that imported it. This happens in a fork of a process that has collected the tests,
so that no solution affects another."""

import argparse
import ast
import functools
import importlib
import inspect
import json
import os
import re
import resource
import select
import signal
import sys
import textwrap
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from course.exercises.bugs import BUGS, Bug  # noqa: E402
from course.exercises.fragments import find, pattern, replace  # noqa: E402
from course.exercises.holes import CASES, EXERCISES, Exercise  # noqa: E402

HOLE = "raise NotImplementedError"
NOT_BEGUN = re.compile(rf"^\s*{HOLE}\s*$", re.MULTILINE)
COLOURS = dict(right="green", wrong="red", error="red")
NOTHING = dict(status="not begun", text="", test="")
SYS_PATH = (
    "import sys\n\nsys.path.insert(0, __file__.rsplit('/', 4)[0])  # the root of the project\n\n"
)


class Job(NamedTuple):
    """A solution to mark: its source, the project's module, and the function that it replaces;
    without one, all functions that both define. Without tests, it is not begun."""

    name: str
    text: str
    file: str
    module: str
    function: str
    tests: dict[str, str]


# ---- source: cut, replaced, planted ----


def parsed(exercise: Exercise) -> tuple[ast.Module, ast.FunctionDef, str]:
    """Return the project's module as a tree, its function in it, and the function's source."""
    module, _, path = exercise.function.partition(":")
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    body: list[ast.stmt] = tree.body
    *classes, name = path.split(".")
    for owner in classes:
        (node,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        body = node.body
    (function,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    lines = text.splitlines()[first - 1 : function.end_lineno]
    return tree, function, textwrap.dedent("\n".join(lines))


def statement_at(source: str, position: int) -> ast.stmt:
    """Return the innermost statement with a character of a function."""
    line = source.count("\n", 0, position) + 1
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    # The innermost is the last to begin.
    return max(
        (node for node in statements if node.lineno <= line <= (node.end_lineno or line)),
        key=lambda node: node.lineno,
    )


def cut_ends(exercise: Exercise, cut: str, source: str) -> tuple[int, int]:
    """Return where a cut begins and ends in the source of an exercise's function. Raises
    `ValueError` if a piece of it is not there."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    docstring = ast.get_docstring(function, clean=False) or ":"
    body = source.index(docstring) + len(docstring)
    first, _, last = cut.partition(" ... ")
    for piece in (first, last or first):
        if not pattern(piece).search(source, body):
            raise ValueError(f"{exercise.name}: {exercise.function} has no {piece!r}")
    begin, *_ = pattern(first).finditer(source, body)
    *_, end = pattern(last or first).finditer(source, body)
    top, bottom = statement_at(source, begin.start()), statement_at(source, end.start())
    lines = source.splitlines(True)
    start = len("".join(lines[: top.lineno - 1])) + top.col_offset
    return start, len("".join(lines[: bottom.end_lineno]).rstrip("\n"))


def solution(exercise: Exercise, change: Callable[[str], str] = lambda cut: cut) -> str:
    """Return the source of an exercise's function with each of its cuts changed."""
    source = parsed(exercise)[2]
    for cut in exercise.cuts:
        begin, end = cut_ends(exercise, cut, source)
        source = source[:begin] + change(source[begin:end]) + source[end:]
    return source


def imports(exercise: Exercise) -> str:
    """Return import statements for the names that an exercise's function uses."""
    tree, function, _ = parsed(exercise)
    used, lines = (
        {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} - {function.name},
        [],
    )
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [
                alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in used
            ]
            lines += [ast.unparse(node)] if node.names else []
    own = {
        getattr(target, "id", None) for node in tree.body for target in getattr(node, "targets", [])
    }
    own |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    module = exercise.function.partition(":")[0]
    return "\n".join(
        lines + [f"from {module} import {', '.join(sorted(used & own))}"] * bool(used & own)
    )


def worksheet(number: int, exercise: Exercise | Bug) -> str:
    """Return the text of the file of an exercise, or of a script with a bug."""
    if isinstance(exercise, Bug):
        return planted(exercise)
    module, _, path = exercise.function.partition(":")
    where = f"{module.replace('.', '/')}.py, {path}"
    task = textwrap.dedent(f"{' ' * 8}{exercise.task}")
    how = f"Replace each `{HOLE}` by your code, then run `make exercises ONLY={exercise.name}`."
    title = f"Exercise {number}: {exercise.name} ({where}; course/primer.md: {exercise.section})."
    holes = solution(exercise, lambda _: HOLE)
    return f'"""{title}\n\n{task}\n\n{how}\n"""\n\n{imports(exercise)}\n\n\n{holes}\n'


def answer(exercise: Exercise, mistakes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return an exercise's file with the project's solution, or with mistakes in it. Raises
    `ValueError` unless the code of each mistake is in the cuts exactly once."""
    source = parsed(exercise)[2]
    ends = [cut_ends(exercise, cut, source) for cut in exercise.cuts]
    cuts = "\n".join(source[begin:end] for begin, end in ends)
    for before in mistakes:
        find(before, cuts, f"{exercise.name}: the text of the cuts")

    def with_mistakes(cut: str) -> str:
        for before, after in mistakes.items():
            if pattern(before).search(cut):
                cut = replace(before, after, cut, exercise.name)
        return cut

    return f"{imports(exercise)}\n\n\n{solution(exercise, with_mistakes)}\n"


def planted(bug: Bug) -> str:
    """Return the script of a bug with the bug in it. Raises `ValueError` unless its code is there
    exactly once."""
    text = (ROOT / bug.script).read_text(encoding="utf-8")
    text = replace(bug.before, bug.after, text, f"{bug.name}: {bug.script}")
    return re.sub(r"^(?=import |from )", SYS_PATH, text, count=1, flags=re.MULTILINE)


# ---- marks ----


def install(job: Job) -> None:
    """Give the project's functions the code of a solution."""
    module = importlib.import_module(job.module)
    learner = sys.modules["exercise"] = types.ModuleType("exercise")
    learner.__file__ = job.file
    exec(compile(job.text, job.file, "exec"), vars(learner))
    targets: dict[str, Any] = {
        name: f
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == job.module
    }
    if job.function:
        name = job.function.rpartition(".")[2]
        if not hasattr(learner, name):
            raise NameError(f"the file does not define {name}")
        targets[name] = functools.reduce(getattr, job.function.split("."), module)
    for name, value in vars(learner).items():
        if inspect.isfunction(value) and value.__module__ == "exercise" and name in targets:
            old, new = inspect.unwrap(targets[name]), inspect.unwrap(value)
            old.__code__, old.__defaults__, old.__kwdefaults__ = (
                new.__code__,
                new.__defaults__,
                new.__kwdefaults__,
            )
        vars(module).setdefault(name, value)  # helpers and imports of the learner


class Marker:
    """Plugin of pytest that marks jobs instead of running the collected tests once."""

    def __init__(self, jobs: list[Job], limit: int, show: Callable[[Job, dict], None], quiet: bool):
        self.jobs, self.limit, self.show, self.quiet = jobs, limit, show, quiet
        self.failure: Any = None  # of pytest

    def pytest_collection(self) -> None:
        """Set hypothesis before the tests are imported: the same examples in every run, minimal
        ones for one job."""
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate] + [Phase.shrink] * (not self.quiet)
        profile = dict(
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=phases,
        )
        settings.register_profile("exercises", max_examples=40, **profile)
        settings.load_profile("exercises")

    def pytest_exception_interact(self, call) -> None:
        self.failure = self.failure or call.excinfo

    def pytest_runtestloop(self, session) -> bool:
        for job in self.jobs:
            self.show(job, self.fork(job, session.items) if job.tests else NOTHING)
        return True

    def fork(self, job: Job, items: list) -> dict:
        """Return the mark of a job: `status`, `text`, and the `test` that failed."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        if not (pid := os.fork()):
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit))
            if self.quiet:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
            try:
                os.write(writer, json.dumps(self.mark(job, items)).encode())
                sys.stdout.flush()
            finally:  # also after a KeyboardInterrupt: the other jobs belong to the parent
                os._exit(0)
        os.close(writer)
        if not select.select([reader], [], [], 20 * self.limit)[0]:  # it may sleep
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(reader, "rb") as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        if text:
            return json.loads(text)
        late = f"no result after {self.limit} s: a loop without end?"
        return dict(
            status="error",
            text=late if os.WIFSIGNALED(status) else "the solution ended Python",
            test="",
        )

    def mark(self, job: Job, items: list) -> dict:
        try:
            install(job)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = getattr(
                error,
                "lineno",
                max((f.lineno or 0 for f in frames if f.filename == job.file), default=None),
            )
            where = f"line {line}: " if line else ""
            return dict(status="error", text=f"{where}{type(error).__name__}: {error}", test="")
        for test, hint in job.tests.items():
            for item in (
                item
                for item in items
                if re.fullmatch(rf"{re.escape(full(test))}(\[.*\])?", item.nodeid)
            ):
                self.failure = None
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                if self.failure is not None:
                    return self.describe(job, test, hint)
        return dict(status="right", text="", test="")

    def describe(self, job: Job, test: str, hint: str) -> dict:
        """Return the mark for a failed test: an error if it was raised in a line of the learner."""
        error = self.failure.value
        frames = [
            entry
            for entry in self.failure.traceback
            if entry.frame.code.raw.co_filename == job.file
        ]
        message = (
            f"{type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        )
        details = "\n".join([full(test), "", str(error), *getattr(error, "__notes__", [])])
        if frames:
            text = f"line {frames[-1].lineno + 1}: {message}"
            return dict(status="error", text=text, test=test, details=details)
        text = hint if isinstance(error, AssertionError) else f"{hint} ({message})"
        return dict(status="wrong", text=text, test=test, details=details)


def full(test: str) -> str:
    """Return the id of a test for pytest."""
    return test if "::" in test else f"{CASES}::{test}"


def run(jobs: list[Job], limit: int, show: Callable[[Job, dict], None], quiet: bool = True) -> None:
    """Mark jobs, and call `show(job, mark)` for each. A job without tests is not begun."""
    if not (tests := dict.fromkeys(full(test) for job in jobs for test in job.tests)):
        for job in jobs:
            show(job, NOTHING)
        return
    import pytest

    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    os.chdir(ROOT)
    options = [
        "-o",
        "addopts=--import-mode=importlib",
        "-p",
        "no:terminal",
        "-p",
        "no:cacheprovider",
        "-s",
    ]
    code = pytest.main([*tests, *options], plugins=[Marker(jobs, limit, show, quiet)])
    if code != pytest.ExitCode.OK:
        sys.exit(f"the tests cannot be collected; run: pytest --collect-only {' '.join(tests)}")


# ---- the command line ----


def job_of(exercise: Exercise | Bug, text: str, file: str) -> Job:
    script = getattr(exercise, "script", "").removesuffix(".py")
    module, _, function = getattr(exercise, "function", script).partition(":")
    return Job(exercise.name, text, file, module, function, exercise.tests)


def check(limit: int) -> bool:
    """Mark the project's own functions and scripts, every wrong solution and every bug. Print the
    marks, and return whether they are as the tables say: the n-th wrong solution fails the n-th
    test first."""
    jobs, failing = [], []  # failing: the test that must fail, "" for none
    for exercise in EXERCISES:
        texts = [answer(exercise), *(answer(exercise, mistakes) for mistakes in exercise.wrong)]
        jobs += [job_of(exercise, text, exercise.name) for text in texts]
        failing += ["", *list(exercise.tests)[: len(exercise.wrong)]]
    for bug in BUGS:
        jobs += [
            job_of(bug, (ROOT / bug.script).read_text(), bug.name),
            job_of(bug, planted(bug), bug.name),
        ]
        failing += ["", next(iter(bug.tests))]
    results = []

    def show(job: Job, mark: dict) -> None:
        expected = failing[len(results)]
        results.append(mark["test"] == expected and mark["status"] != "error")
        print(
            "  " if results[-1] else "NO",
            f"{job.name:<16}",
            mark["status"],
            mark["text"],
            flush=True,
        )

    run(jobs, limit, show)
    right = [fits for fits, test in zip(results, failing, strict=True) if not test]
    caught = [fits for fits, test in zip(results, failing, strict=True) if test]
    print(f"{sum(right)} of {len(right)} right, {sum(caught)} of {len(caught)} caught")
    return all(results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "only",
        nargs="*",
        help="names of exercises, shown with the assertion that fails; default: all",
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "course/exercises/work", help="folder of the exercises"
    )
    parser.add_argument(
        "--limit", type=int, default=20, help="CPU seconds after which a solution is stopped"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="mark the solutions of the tables, right and wrong ones",
    )
    flags = parser.parse_args()
    if flags.check:
        sys.exit(not check(flags.limit))
    names = [exercise.name for exercise in EXERCISES] + [bug.name for bug in BUGS]
    if unknown := [name for name in flags.only if name not in names]:
        sys.exit(f"ONLY={unknown[0]}: no such exercise; choose from {', '.join(names)}")

    flags.work.mkdir(parents=True, exist_ok=True)
    jobs, labels = [], {}
    for number, exercise in enumerate([*EXERCISES, *BUGS], 1):
        is_bug = isinstance(exercise, Bug)
        label = exercise.name if is_bug else f"{number:02d} {exercise.name}"
        path, new = flags.work / f"{label.replace(' ', '_')}.py", worksheet(number, exercise)
        if not path.exists():
            path.write_text(new, encoding="utf-8")
        labels[exercise.name], text = label, path.read_text(encoding="utf-8")
        begun = text != new and (is_bug or not NOT_BEGUN.search(text))
        job = job_of(exercise, text, str(path))
        jobs.append(job if begun else job._replace(tests={}))

    from rich.console import Console
    from rich.markup import escape

    console, marks = Console(highlight=False, soft_wrap=True), []

    def show(job: Job, mark: dict) -> None:
        marks.append(mark["status"])
        text = f": {mark['text']}" if mark["text"] else ""
        colour = COLOURS.get(mark["status"], "dim")
        console.print(f"{labels[job.name]:<18} [{colour}]{mark['status']}[/]{escape(text)}")
        if flags.only and mark.get("details"):
            console.print(f"\n{escape(mark['details'])}\n")

    run(
        [job for job in jobs if job.name in (flags.only or names)],
        flags.limit,
        show,
        quiet=not flags.only,
    )
    if not flags.only:
        counts = ", ".join(
            f"{marks.count(status)} {status}" for status in ("right", "wrong", "error", "not begun")
        )
        print(f"{counts}; the files are in {os.path.relpath(flags.work, ROOT)}")


if __name__ == "__main__":
    main()
