"""The output folder of a run: one run at a time, with one set of flags."""

import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import yaml

from common.config.groups import BaseArgs, flags_of, may_change
from common.data import durable
from common.model.checkpoint_files import checkpoints_in
from common.parallel import distributed

# Contents of every run's folder. Scripts name their further files.
FILES = (
    "args.yaml",
    "code.json",
    "metrics.jsonl",
    "samples.jsonl",
    "completions.jsonl",
    "curves.png",
    "wandb_id",
)
SAMPLED = ("completions.jsonl", "step_*/completions.jsonl")  # eval.py and bok.py resume from these
FOLDERS = (
    "checkpoints",
    "hf",
    "best",
    "adapter",
    "best_adapter",
    "tensorboard",
    "timeline",
    "trace",
    "replay",
)
IN_USE = "uses it; wait for it or name another --output_dir"


def prepare_output_dir(args: BaseArgs, owned: Sequence[str] = ()) -> None:
    """Claim `--output_dir` for this run, before any slow work. `owned`: glob patterns of the
    script's further files. Collective. A dry run only warns.

    With `--resume never` the files of an earlier run are deleted. Raises `ValueError` on every rank
    if the folder is not writable, is not shared by all machines, has a run with other flags or,
    with `--resume must`, has no run, and for a flag that is not UTF-8."""
    folder = Path(args.output_dir)
    _require_utf8(args)
    if args.trains and args.dry_run:
        conflict = _conflict(folder, args)
        if conflict:
            distributed.say(f"warning: {conflict}")
        return
    problem = None
    # A new name: network file systems cache the absence of files.
    mark = folder / "checkpoints" / f"step_{secrets.token_hex(8)}.tmp"
    if distributed.is_main():
        try:
            problem = _check_upload(args) or _lock(folder) or _claim(folder, args, owned)
            if not problem:
                mark.mkdir()
        except OSError as error:
            problem = f"--output_dir {folder}: {distributed.first_line(error)}"
    problem, name = distributed.gather_objects((problem, mark.name))[0]
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


def _check_upload(args: BaseArgs) -> str | None:
    """Return why `--push_to_hub` would fail at the end of the run, None if it would not."""
    if args.push_to_hub is None:
        return None
    from common.train.publish import publish

    return publish(args)


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


def _claim(folder: Path, args: BaseArgs, owned: Sequence[str]) -> str | None:
    """Delete the earlier run, or prepare to continue it. Return the problem, if there is one."""
    if args.resume == "never":
        problem = _needed_files(folder, args)
        if problem:
            return problem
        _delete_run(folder, owned)
    problem = _conflict(folder, args)
    if problem:
        return problem
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        durable.recover_folder(folder / name)
    for unfinished in list(folder.glob("checkpoints/step_*.tmp")):
        shutil.rmtree(unfinished)
    durable.write_text(folder / "args.yaml", yaml.safe_dump(flags_of(args), sort_keys=False))
    code = _code(args)
    if not _has_files(folder, *SAMPLED, "metrics.jsonl") or not (folder / "code.json").is_file():
        durable.write_json(folder / "code.json", code)
    for file, fingerprint in durable.read_json(folder / "code.json").items():
        if fingerprint != code.get(file):
            change = f"{file} has changed since the run in {folder} began"
            distributed.say(f"warning: {change}: it continues with the new code")
    return None


def _needed_files(folder: Path, args: BaseArgs) -> str | None:
    """Return that the run would start from files that `--resume never` deletes, if so."""
    for flag in ("model", "adapter"):
        start = getattr(args, flag)
        if start and Path(start).exists() and folder.resolve() in Path(start).resolve().parents:
            return f"--{flag} {start}: --resume never would delete it; name another --output_dir"
    return None


def _delete_run(folder: Path, owned: Sequence[str]) -> None:
    for name in (*FILES, *owned):
        for file in folder.glob(name):
            file.unlink()
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for results in checkpoints_in(folder):  # of eval.py for each checkpoint
        shutil.rmtree(results)


def _has_files(folder: Path, *names: str) -> bool:
    return any(any(folder.glob(name)) for name in names)


def _conflict(folder: Path, args: BaseArgs) -> str | None:
    """Return the reason why the run in the folder cannot continue with these flags, if there is
    one. Reads only."""
    can_resume = checkpoints_in(folder / "checkpoints") or _has_files(folder, *SAMPLED)
    if args.resume == "must" and not can_resume:
        return f"--resume must: {folder} has no checkpoint; use --resume auto"
    has_begun = can_resume or _has_files(folder, "metrics.jsonl")  # a run without steps has not
    file = folder / "args.yaml"
    if args.resume == "never" or not has_begun or not file.is_file():
        return None
    label = f"--output_dir {folder}"
    try:
        earlier_flags = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, ValueError, RecursionError):
        earlier_flags = None
    if not isinstance(earlier_flags, dict):
        return f"{label}: args.yaml is damaged; delete it to resume with the flags given now"
    flags = flags_of(args)
    earlier_flags = flags_of(type(args)()) | earlier_flags  # newer flags had their defaults
    for name, value in earlier_flags.items():
        if isinstance(value, str) and isinstance(flags.get(name), list):
            earlier_flags[name] = [value]
    free = may_change(args, earlier_flags)
    changed = [
        name
        for name, value in earlier_flags.items()
        if value != flags.get(name) and name not in free
    ]
    if not changed:
        return None
    changes = ", ".join(
        f"{name} was {earlier_flags[name]}, is {flags.get(name)}" for name in changed[:3]
    )
    if len(changed) > 3:
        changes += f" and {len(changed) - 3} more"
    advice = "name another --output_dir, or use --resume never to delete that run and start over"
    return f"{label}: the folder has a run with other flags ({changes}); {advice}"


def _code(args: BaseArgs) -> dict[str, list[int]]:
    """Return the fingerprints of the script and of the user's rewards, environment, tools and
    agent."""
    words = []
    for tool in args.tools:
        command = tool.removeprefix("mcp:")
        words += [tool] if command == tool else command.replace("'", "").split()
    tools = [f"{word}:" if word.endswith(".py") else word for word in words]
    specs = [*args.reward, args.environment or "", args.agent or "", *tools]
    files = [Path(spec.rpartition(":")[0]).expanduser() for spec in specs]
    script = getattr(sys.modules.get(type(args).__module__), "__file__", None)
    if script:
        files.insert(0, Path(script))
    return {
        str(file): durable.fingerprint(file)
        for file in files
        if file.suffix == ".py" and file.is_file()
    }
