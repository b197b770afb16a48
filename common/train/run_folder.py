"""The output folder of a run: one run at a time, with one set of flags. Nothing is deleted here: a
run that starts over moves the earlier one aside."""

import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import yaml

from common.config.groups import BaseArgs, TrainArgs, flags_of, may_change
from common.model.checkpoint_files import checkpoints_in
from common.parallel import distributed, durable

EXPORTS = ("hf", "best", "adapter", "best_adapter")  # folders that a new export replaces
WRITTEN = (*EXPORTS, "checkpoints", "metrics.jsonl", "samples.jsonl")
SAMPLED = ("completions.jsonl", "step_*/completions.jsonl")  # eval.py and bok.py resume from these
COMPUTED = ("max_length",)  # defaults that are computed once: a resumed run keeps them
IN_USE = "uses it; wait for it or name another --output_dir"


def prepare_output_dir(args: BaseArgs) -> dict[str, Any]:
    """Lock `--output_dir` and check it, before any slow work; `begin_run` then writes. Return the
    flags of the run that will be resumed, {} for a new one. Collective. A dry run only warns.

    Raises `ValueError` on every rank if the folder is not writable, is not shared by all machines,
    has a run with other flags or, with `--resume must`, has no run, and if an input of this run
    lies where the run writes."""
    folder = Path(args.output_dir)
    _require_utf8(args)
    if isinstance(args, TrainArgs) and args.dry_run:
        if problem := _conflict(folder, args) or _threatened_input(folder, args):
            distributed.say(f"warning: {problem}")
        return _earlier_flags(folder, args) or {}
    problem = None
    earlier = None
    # A new name: network file systems cache the absence of files.
    mark = folder / f"{secrets.token_hex(8)}.tmp"
    if distributed.is_main():
        try:
            problem = _threatened_input(folder, args)  # writes nothing in a folder of the user's
            problem = problem or _lock(folder) or _conflict(folder, args)
            earlier = _earlier_flags(folder, args)
            if not problem:
                mark.mkdir()
        except OSError as error:
            problem = f"--output_dir {folder}: {distributed.first_line(error)}"
    problem, earlier, name = distributed.from_main((problem, earlier, mark.name))
    if problem:
        raise ValueError(problem)
    mark = mark.with_name(name)
    blind_host = None if mark.is_dir() else socket.gethostname()
    blind_hosts = [host for host in distributed.gather_objects(blind_host) if host]
    if distributed.is_main():
        mark.rmdir()
    if blind_hosts:
        problem = f"files of rank 0 are not visible on {blind_hosts[0]}"
        raise ValueError(f"--output_dir {folder}: {problem}; use a folder that all machines share")
    return earlier or {}


def begin_run(args: BaseArgs) -> None:
    """Write args.yaml, once flags and data are known to be good. With `--resume never` move an
    earlier run aside first. Collective. Raises `ValueError` on every rank."""
    folder = Path(args.output_dir)
    problem = None
    if distributed.is_main():
        try:
            problem = _begin(folder, args)
        except OSError as error:
            problem = f"--output_dir {folder}: {distributed.first_line(error)}"
    if problem := distributed.from_main(problem):
        raise ValueError(problem)


def _begin(folder: Path, args: BaseArgs) -> str | None:
    if _has_begun(folder) and args.resume == "never":
        folder = folder.resolve()  # of a link, what it names
        names = (folder.with_name(f"{folder.name}.old-{n}") for n in count(1))
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
        distributed.say(f"--resume never: the earlier run is now in {aside}")
        if problem := _lock(folder):
            return problem
    elif _has_begun(folder):
        for name in EXPORTS:
            durable.recover(folder / name)
        for unfinished in folder.glob("checkpoints/step_*.tmp"):
            shutil.rmtree(unfinished)
    (folder / "checkpoints").mkdir(exist_ok=True)
    script = getattr(sys.modules.get(type(args).__module__), "__file__", "")
    flags = yaml.safe_dump(flags_of(args), sort_keys=False)
    durable.write_text(folder / "args.yaml", f"# {script}\n{flags}")
    return None


def _require_utf8(args: BaseArgs) -> None:
    """Raise `ValueError` for a flag whose text is not UTF-8, as names of files may be: the files of
    a run quote it."""
    for flag, value in flags_of(args).items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"--{flag} {value}: the text is not UTF-8; rename the file or the folder"
            ) from error


# ---- one run at a time ----

_locked: TextIO | None = None  # the lock of this process


def _lock(folder: Path) -> str | None:
    """Lock the folder until `unlock` or the end of this process. Return who else has locked it."""
    global _locked
    unlock()
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return f"--output_dir {folder}: {file.read().strip()} {IN_USE}"
    except OSError as error:  # some network disks
        reason = f"no lock ({error.strerror})"
        distributed.say(
            f"--output_dir {folder}: {reason}, so a second run in it would not be noticed"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locked = file
    return None


def unlock() -> None:
    """Let another run use the folder."""
    if _locked is not None:
        _locked.close()


# ---- one set of flags ----


def _has_begun(folder: Path) -> bool:
    """Return whether the folder has anything of a run but its flags."""
    return bool(_can_resume(folder) or (folder / "metrics.jsonl").is_file())


def _can_resume(folder: Path) -> bool:
    sampled = any(any(folder.glob(name)) for name in SAMPLED)
    return sampled or bool(checkpoints_in(folder / "checkpoints"))


def _conflict(folder: Path, args: BaseArgs) -> str | None:
    """Return why the run in the folder cannot continue with these flags, if there is a reason.
    Reads only."""
    if args.resume == "must" and not _can_resume(folder):
        return f"--resume must: {folder} has no checkpoint; use --resume auto"
    label = f"--output_dir {folder}"
    earlier = _earlier_flags(folder, args)
    if earlier is None:
        return f"{label}: args.yaml is damaged; delete it to resume with the flags given now"
    flags = flags_of(args)
    free = may_change(args, earlier) | {name for name in COMPUTED if flags.get(name) is None}
    changed = [
        name for name, value in earlier.items() if value != flags.get(name) and name not in free
    ]
    if not changed:
        return None
    changes = ", ".join(f"{name} was {earlier[name]}, is {flags.get(name)}" for name in changed[:3])
    if len(changed) > 3:
        changes += f" and {len(changed) - 3} more"
    advice = "name another --output_dir, or use --resume never to move that run aside"
    return f"{label}: the folder has a run with other flags ({changes}); {advice}"


def _earlier_flags(folder: Path, args: BaseArgs) -> dict[str, Any] | None:
    """Return the flags of the run to resume, {} for a new one, None if args.yaml is damaged."""
    file = folder / "args.yaml"
    if args.resume == "never" or not _has_begun(folder) or not file.is_file():
        return {}
    try:
        earlier = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    # Flags that are newer than the run had their defaults.
    return flags_of(type(args)()) | earlier if isinstance(earlier, dict) else None


# ---- inputs in the folder ----


def _threatened_input(folder: Path, args: BaseArgs) -> str | None:
    """Return which file or folder of the user this run would move or replace, if there is one."""
    advice = "name another --output_dir"
    for run in folder.resolve().parents:  # runs/x/checkpoints is a part of runs/x
        inner = folder.resolve().relative_to(run).parts[0]
        if inner in WRITTEN and _has_begun(run):
            return f"--output_dir {folder}: the run in {run} writes there; {advice}"
    has_begun = _has_begun(folder)
    trains = isinstance(args, TrainArgs)
    inputs = [*_inputs(args)]
    if has_begun and args.resume == "never":
        inputs += [("the working folder", "."), ("the script", sys.argv[0])]
        taken, why = [folder], "--resume never would move it aside"
    else:
        taken, why = [folder / name for name in WRITTEN if trains], "the run writes there"
    for label, path in inputs:
        is_folder = os.path.realpath(path) == os.path.realpath(folder)
        if is_folder or any(_is_in(path, place) for place in taken):
            return f"{label}: {why}; {advice}"
    for name in (*EXPORTS, "samples.jsonl") if trains and not has_begun else ():
        if (folder / name).exists():
            return f"--output_dir {folder}: the run would replace {name} there; {advice}"
    return None


def _inputs(args: BaseArgs) -> Iterator[tuple[str, str]]:
    """Yield the paths in flags that exist, each with its flag: `FILE`, `name=FILE`,
    `model:FOLDER`, `FILE.py:function`, `FILE:0.5`, `mcp:COMMAND FILE`, patterns."""
    flags = flags_of(args)
    del flags["output_dir"]
    for flag, value in flags.items():
        texts = value if isinstance(value, list) else [value]
        for text in (text for text in texts if isinstance(text, str)):
            for word in dict.fromkeys((text, *re.split(r"[=:\s]", text))):
                path = os.path.expanduser(word)
                if "*" in path and "/" in path:
                    yield from ((f"--{flag} {text}", name) for name in glob.iglob(path))
                elif path.strip(".") and os.path.lexists(path):
                    yield f"--{flag} {text}", path


def _is_in(path: str, folder: Path) -> bool:
    """Return whether a path, or what it links to, is the folder or lies in it."""
    return any(
        Path(absolute(path)).is_relative_to(absolute(folder))
        for absolute in (os.path.abspath, os.path.realpath)
    )
