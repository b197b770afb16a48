"""Faults of the disk: an operation that fails, and a power cut that loses what was not synced."""

import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.faults.case import Case, Fault, Setting, after, differs, illegible, work

# ---- disk: an operation fails once, or from then on as on a full disk ----


def disk(setting: Setting) -> Iterator[Case]:
    """Yield a case for each operation of a run on each path, and each fault; for a new run and for
    a resumed one."""
    for begun in (False, True):
        for operation, pattern in operations(setting, begun):
            for kind in ("full", "broken", "kill", *(["short"] if operation == "write" else [])):
                fault = Fault(kind, operation, pattern)
                name = (
                    f"{setting.script}/{'resumed' if begun else 'new'}/{operation}:{pattern}/{kind}"
                )
                yield Case("disk", name, survives, (setting, begun, fault))


def survives(folder: Path, setting: Setting, begun: bool, fault: Fault) -> str | None:
    """The run ends with one line or succeeds, and the same command completes it with the same
    numbers."""
    run = folder / "run"
    if begun:
        shutil.copytree(interrupted(setting), run)
    done = setting.run(run, fault)
    if fault.kind == "kill":
        if done.returncode == 0:
            return "the fault never happened"
    elif problem := illegible(done):
        return problem
    if done.returncode == 0 and (problem := differs(setting, run)):
        return f"succeeds with {problem}"
    return after(setting, run)


@cache
def interrupted(setting: Setting) -> Path:
    """Return the folder of a run that was killed before it renamed its last checkpoint."""
    folder = Path(tempfile.mkdtemp(dir=work())) / "run"
    setting.run(folder, Fault("kill", "rename", f"checkpoints/step_{setting.steps:06d}.tmp"))
    return folder


@cache
def traced(setting: Setting, begun: bool) -> tuple[list[list[str]], Path]:
    """Return the operations of a run as (operation, path, second path), and the folder with the
    files' contents: after operation I, a synced file is in the file I."""
    folder = Path(tempfile.mkdtemp(dir=work()))
    (folder / "copies").mkdir()
    if begun:
        shutil.copytree(interrupted(setting), folder / "run")
    done = setting.run(
        folder / "run", Fault("none", trace=folder / "trace", copies=folder / "copies")
    )
    assert done.returncode == 0, done.stderr
    return [
        line.split("\t") for line in (folder / "trace").read_text().splitlines()
    ], folder / "copies"


def operations(setting: Setting, begun: bool) -> list[tuple[str, str]]:
    """Return the distinct operations with patterns of their paths, without random names."""
    found = {}
    for operation, path, _ in traced(setting, begun)[0]:
        pattern = re.sub(r"(?<=\.tmp)\w{6}$", "*", re.sub(r"[0-9a-f]{16}", "*", path))
        found[operation.removesuffix("_folder"), pattern] = None
    return list(found)


# ---- powercut: what was not synced is lost ----


class Node:
    """File or folder on a disk: what a process sees, and what a power cut leaves."""

    def __init__(self, is_folder: bool = False):
        self.is_folder = is_folder
        self.entries: dict[str, Node] = {}
        self.synced_entries: dict[str, Node] = {}
        self.content: Path | None = None  # of a file, when it was last synced


class Moment(NamedTuple):
    name: str
    disk: Node
    """changes while the next moment is made"""
    saved: int
    """step of the newest checkpoint that has its name"""


def moments(trace: list[list[str]], copies: Path) -> Iterator[Moment]:
    """Yield the disk before and after each rename."""
    root, saved = Node(is_folder=True), 0

    def find(path: str) -> tuple[dict, str]:
        node, (*above, name) = root, path.split("/")
        for part in above:
            node = node.entries[part]
        return node.entries, name

    for i, (operation, path, second) in enumerate(trace):
        if not path:  # the run's folder itself, whose own name is taken as synced
            if operation == "fsync_folder":
                root.synced_entries = dict(root.entries)
            continue
        entries, name = find(path)
        if operation == "mkdir":
            entries.setdefault(name, Node(is_folder=True))
        elif operation == "truncate":
            entries.setdefault(name, Node()).content = None
        elif operation in ("open", "write"):
            entries.setdefault(name, Node())
        elif operation == "unlink":
            entries.pop(name, None)
        elif operation == "fsync":
            entries.setdefault(name, Node()).content = copies / str(i)
        elif operation == "fsync_folder":
            entries[name].synced_entries = dict(entries[name].entries)
        elif operation == "rename":
            yield Moment(f"{i}-before-{path}", root, saved)
            there, new = find(second)
            # safetensors gives files their names by a system call that the shim cannot see
            there[new] = entries.pop(name, None) or Node()
            if found := re.fullmatch(r"checkpoints/step_(\d+)", second):
                saved = int(found[1])
            yield Moment(f"{i}-after-{path}", root, saved)


def restore(node: Node, folder: Path, names_synced: bool) -> None:
    """Write what a power cut leaves: content that was synced, under names that were synced, or
    under all names."""
    folder.mkdir(parents=True)
    for name, child in (node.synced_entries if names_synced else node.entries).items():
        if child.is_folder:
            restore(child, folder / name, names_synced)
        elif child.content is None:
            (folder / name).touch()
        else:
            shutil.copy(child.content, folder / name)


def powercut(setting: Setting) -> Iterator[Case]:
    """Yield a power cut at each rename of a run, in which new names are lost with the content or
    are kept."""
    keep = dict(setting.flags)["keep_last"]
    for i, moment in enumerate(moments(*traced(setting, begun=False))):
        for names in ("synced", "all"):
            name = f"{setting.script}/keep_{keep}/{moment.name}/{names}_names"
            yield Case("powercut", name, recovers, (setting, i, names == "synced"))


def recovers(folder: Path, setting: Setting, position: int, names_synced: bool) -> str | None:
    """The same command finishes with the same numbers, and loses at most one save interval."""
    moment = next(itertools.islice(moments(*traced(setting, begun=False)), position, None))
    restore(moment.disk, folder / "run", names_synced)
    done = setting.run(folder / "run")
    resumed = re.search(r"\(step (\d+)\)", done.stdout)
    if done.returncode:
        return f"the same command fails: {done.stderr.strip()[-300:]}"
    if moment.saved - int(resumed[1] if resumed else 0) > setting.save_every:
        return f"resumes after step {resumed and resumed[1]}, though step {moment.saved} was saved"
    return differs(setting, folder / "run")
