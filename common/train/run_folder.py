"""The output folder of a run. It belongs to one run at a time, with one set of flags and inputs, so
that a resumed run continues what it began. Scripts call `prepare_output_dir` before they load
anything, and `begin_run` when flags and data are known to be good. Nothing is deleted: a run that
starts over moves the earlier one aside."""

import fcntl
import glob
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import yaml

from common import durable
from common.config.flags import TreeLoader
from common.config.groups import BaseArgs, DataArgs, flags_of, may_change, script_of
from common.model.hub import checkpoints_in
from common.parallel import distributed
from common.train.inputs import changed, fixed_inputs, other_inputs

EXPORTS = ("hf", "best", "adapter", "best_adapter")  # a new export replaces these folders
RESUMABLE = ("completions.jsonl", "step_*/completions.jsonl")  # eval.py resumes from these
SAMPLES = "samples.jsonl"
INPUTS = "inputs.json"  # digests of what the run read when it began
COMPUTED = ("max_length",)  # defaults that a start computes; a resumed run keeps their values


def prepare_output_dir(
    args: BaseArgs, dry_run: bool | str = False, replaces: Sequence[str] = (*EXPORTS, SAMPLES)
) -> dict[str, Any]:
    """Lock `--output_dir` and check that this run may use it, before any slow work. Return the
    flags of the run that will be resumed, or {} for a new one. A folder without a run may not
    contain any of `replaces`, the files and folders that this run will write: they would be lost. A
    `dry_run` takes no lock and only warns. Collective.

    Raises `ValueError` if some machine does not see the folder, if it has a run with other flags or
    a file that the run would replace, or if there is nothing to resume for `--resume must`."""
    folder = Path(args.output_dir)
    problem = distributed.from_main(
        _conflict(folder, args, replaces) if distributed.is_main() else None
    )
    if dry_run:
        if problem:
            distributed.say(f"warning: {problem}")
            return {}
        return _earlier_flags(folder, args)
    if problem:
        raise ValueError(problem)
    # A new random name, because network file systems remember for a while that a file was absent.
    mark = folder / distributed.from_main(f"{secrets.token_hex(8)}.tmp")
    if distributed.is_main():
        _lock(folder)
        mark.mkdir()
    earlier = distributed.from_main(_earlier_flags(folder, args))
    blind_host = None if mark.is_dir() else socket.gethostname()
    blind_hosts = [host for host in distributed.gather_objects(blind_host) if host]
    if distributed.is_main():
        mark.rmdir()
    if blind_hosts:
        problem = f"files of rank 0 are not visible on {blind_hosts[0]}"
        raise ValueError(f"--output_dir {folder}: {problem}; use a folder that all machines share")
    return earlier


def begin_run(
    args: BaseArgs, rows: Sequence[dict] = (), held_out: Sequence[dict] = (),
    keeps_rewards: bool = False,
) -> None:  # fmt: skip
    """Write args.yaml and inputs.json, once flags and data are known to be good. With `--resume
    never` first move an earlier run aside. `rows` are the rows to train on, or to evaluate. With
    `keeps_rewards` (eval.py) stored completions keep the rewards they have, so a changed reward
    function is only reported. Collective.

    Raises `ValueError` if rows, models or the chat template have changed since the run began."""
    folder = Path(args.output_dir)
    if distributed.is_main():
        inputs = dict(fixed=fixed_inputs(args, rows), others=other_inputs(args, rows, held_out))
        if _has_begun(folder) and args.resume != "never":
            inputs = _compare(folder, inputs, args, keeps_rewards)
        if _has_begun(folder) and args.resume == "never":
            folder = folder.resolve()  # of a link, move the folder that it points to
            names = (folder.with_name(f"{folder.name}.old-{n}") for n in count(1))
            aside = next(name for name in names if not name.exists())
            folder.rename(aside)
            distributed.say(f"--resume never: the earlier run is now in {aside}")
            _lock(folder)
        elif _has_begun(folder):
            for name in EXPORTS:
                durable.recover(folder / name)
            for unfinished in folder.glob("checkpoints/step_*.tmp"):
                shutil.rmtree(unfinished)
        (folder / "checkpoints").mkdir(exist_ok=True)
        script = script_of(type(args))
        code = f"# code {hashlib.sha256(script.read_bytes()).hexdigest()[:16]}"
        file = folder / "args.yaml"
        if _has_begun(folder) and code not in (file.read_text() if file.is_file() else code):
            distributed.say(f"{script} is not as it was in this run; --resume never starts over")
        flags = yaml.safe_dump(flags_of(args), sort_keys=False)
        durable.write_text(file, f"# {script}\n{code}\n{flags}")
        durable.write_json(folder / INPUTS, inputs)
    distributed.barrier()


# ---- one run at a time ----

_locked: TextIO | None = None  # the lock file of this process, kept open to hold the lock


def _lock(folder: Path) -> None:
    """Lock the folder until `unlock` is called or this process ends. Raises `ValueError` naming the
    process that has locked it already."""
    global _locked
    unlock()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise ValueError(f"--output_dir {folder}: {error.strerror}; name another one") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        problem = f"{file.read().strip()} uses it; wait for it or name another --output_dir"
        raise ValueError(f"--output_dir {folder}: {problem}") from None
    except OSError as error:  # some network disks have no locks
        distributed.say(f"--output_dir {folder}: no lock against a second run: {error.strerror}")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    _locked = file


def unlock() -> None:
    """Release the lock, so that another run may use the folder."""
    if _locked is not None:
        _locked.close()


# ---- one set of flags ----


def _has_begun(folder: Path) -> bool:
    """Return whether a run has written more here than flags: metrics, completions, checkpoints."""
    return _can_resume(folder) or (folder / "metrics.jsonl").is_file()


def _can_resume(folder: Path) -> bool:
    sampled = any(any(folder.glob(name)) for name in RESUMABLE)
    return sampled or bool(checkpoints_in(folder / "checkpoints"))


def _conflict(folder: Path, args: BaseArgs, replaces: Sequence[str]) -> str | None:
    """Return why this run must not use the folder, or None if it may. Only reads."""
    if args.resume == "must" and not _can_resume(folder):
        return f"--resume must: {folder} has no checkpoint; use --resume auto"
    label = f"--output_dir {folder}"
    for run in folder.resolve().parents:  # a new export of such a run would replace the folder
        inner = folder.resolve().relative_to(run).parts[0]
        if inner in (*EXPORTS, "checkpoints") and _has_begun(run):
            return f"{label}: the run in {run} writes there; name another --output_dir"
    if args.resume == "never" and _has_begun(folder):
        for read, path in _inputs(args):
            if path.resolve().is_relative_to(folder.resolve()):
                return f"{read}: --resume never would move it aside; name another --output_dir"
    for name in replaces:
        if not _has_begun(folder) and (folder / name).exists():
            return f"{label}: the run would replace {name} there; name another --output_dir"
    try:
        earlier = _earlier_flags(folder, args)
    except ValueError as error:
        return str(error)
    flags = flags_of(args)
    free = may_change(args, earlier) | {name for name in COMPUTED if flags.get(name) is None}
    changes = ", ".join(
        f"{name} was {value}, is {flags.get(name)}"
        for name, value in earlier.items()
        if value != flags.get(name) and name not in free
    )
    others = sorted(earlier.keys() - flags.keys())
    if others:
        names = ", ".join(f"--{name}" for name in others[:3])
        problem = f"the folder has a run of another script or version, which has {names}"
    else:
        problem = f"the folder has a run with other flags ({changes})"
    advice = "name another --output_dir, or use --resume never to move that run aside"
    return f"{label}: {problem}; {advice}" if changes else None


def _inputs(args: BaseArgs) -> Iterator[tuple[str, Path]]:
    """Yield (label, path) of everything that this run reads: the files and folders named by a flag,
    whether as a path, as a pattern, in `name=FILE` or in `FILE.py:function`."""
    yield "the working folder", Path()
    for flag, value in flags_of(args).items():
        texts = value if isinstance(value, list) else [value]
        for text in (text for text in texts if isinstance(text, str) and flag != "output_dir"):
            for word in (text, *re.split(r"[=:\s]", text)):
                for name in glob.glob(word):
                    yield f"--{flag} {text}", Path(name)


def _earlier_flags(folder: Path, args: BaseArgs) -> dict[str, Any]:
    """Return the flags of the run to resume, {} for a new one. Flags newer than it have
    defaults."""
    file = folder / "args.yaml"
    if args.resume == "never" or not _has_begun(folder) or not file.is_file():
        return {}
    try:
        earlier = dict(yaml.load(file.read_text(), TreeLoader))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = "is damaged; delete it to resume with the flags given now"
        raise ValueError(f"{file} {problem}") from error
    return flags_of(type(args)()) | earlier  # newer flags had their defaults


# ---- one set of inputs ----


def _compare(folder: Path, now: dict, args: DataArgs, keeps_rewards: bool) -> dict:
    """Return the digests that inputs.json will have: those of the run's first start, and those of
    inputs that are new. Print which code and held-out rows have changed since then. Raises
    `ValueError` if training rows, models or chat templates have."""
    file = folder / INPUTS
    if not file.is_file():  # an earlier version of onefile began it
        return now
    try:
        then = durable.read_json(file)
    except (ValueError, RecursionError) as error:
        problem = "is damaged; delete it to resume with what is read now"
        raise ValueError(f"{file} {problem}") from error
    began = f"not what the run in {folder} began with"
    if different := [*changed(then["fixed"], now["fixed"])]:
        flag, name = different[0]
        flags = " and --eval_every, --pack_tokens, --on_bad_row" * (flag == args.dataset_flag)
        advice = f"restore it{flags}, use --resume never, or delete {file} to go on with it"
        raise ValueError(f"{flag}: {name} is {began}; {advice}")
    for flag, name in changed(then["others"], now["others"]):
        goes_on = "the run goes on with the new one"
        if keeps_rewards:
            again = f"--completions {folder}/completions.jsonl and another --output_dir"
            goes_on = f"stored completions keep their rewards; {again} compute them anew"
        distributed.say(f"warning: {flag}: {name} is {began}; {goes_on}")
    return {kind: now[kind] | then[kind] for kind in now}
