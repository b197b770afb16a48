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

from common.config.groups import BaseArgs, TrainArgs
from common.config.launch import flags_of, may_change
from common.data import durable
from common.model.convert import checkpoints_in
from common.parallel import distributed
from common.train.publish import publish

# Contents of every run's folder. Scripts name their further files.
FILES = ("args.yaml", "code.json", "metrics.jsonl", "samples.jsonl", "completions.jsonl", "curves.png", "wandb_id")
SAMPLED = ("completions.jsonl", "step_*/completions.jsonl")  # eval.py and bok.py resume from these
FOLDERS = ("checkpoints", "hf", "best", "adapter", "best_adapter", "tensorboard", "timeline", "trace", "replay")
IN_USE = "uses it; wait for it or name another --output_dir"


def prepare_output_dir(args: BaseArgs, owned: Sequence[str] = ()) -> None:
    """Claim `--output_dir` for this run, before any slow work. `owned`: glob patterns of the script's further files.
    Collective. A dry run only warns.

    With `--resume never` the files of an earlier run are deleted. Raises `ValueError` on every rank if the folder is
    not writable, is not shared by all machines, has a run with other flags or, with `--resume must`, has no run, and
    for a flag that is not UTF-8.
    """
    folder, problem = Path(args.output_dir), None
    _require_utf8(args)
    if isinstance(args, TrainArgs) and args.dry_run:
        if conflict := _conflict(folder, args):
            distributed.say(f"warning: {conflict}")
        return
    # A new name: network file systems cache the absence of files.
    mark = folder / "checkpoints" / f"step_{secrets.token_hex(8)}.tmp"
    if distributed.is_main():
        try:
            problem = publish(args) or _lock(folder) or _claim(folder, args, owned)
            if not problem:
                mark.mkdir()
        except OSError as error:
            problem = f"--output_dir {folder}: {distributed.first_line(error)}"
    problem, name = distributed.gather_objects((problem, mark.name))[0]
    if problem:
        raise ValueError(problem)
    mark = mark.with_name(name)
    blind = [host for host in distributed.gather_objects(None if mark.is_dir() else socket.gethostname()) if host]
    if distributed.is_main():
        mark.rmdir()
    if blind:
        problem = f"files of rank 0 are not visible on {blind[0]}; use a folder that all machines share"
        raise ValueError(f"--output_dir {folder}: {problem}")


def _require_utf8(args: BaseArgs) -> None:
    """Raise `ValueError` for a flag whose text is not UTF-8, as names of files may be: the files of a run quote it."""
    for flag, value in flags_of(args).items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"--{flag} {value}: the text is not UTF-8; rename the file or the folder") from error


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
        why = f"no lock ({error.strerror})"
        distributed.say(f"--output_dir {folder}: {why}, so a second run in it would not be noticed")
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
        for flag in ("model", "adapter"):
            start = getattr(args, flag, None)
            if start and Path(start).exists() and folder.resolve() in Path(start).resolve().parents:
                return f"--{flag} {start}: --resume never would delete it; name another --output_dir"
        for file in (file for name in (*FILES, *owned) for file in folder.glob(name)):
            file.unlink()
        for old in (folder / name for name in FOLDERS):
            shutil.rmtree(old, ignore_errors=True)
        for old in checkpoints_in(folder):  # results of eval.py for each checkpoint
            shutil.rmtree(old)
    if problem := _conflict(folder, args):
        return problem
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        durable.recover_folder(folder / name)
    for unfinished in list(folder.glob("checkpoints/step_*.tmp")):
        shutil.rmtree(unfinished)
    durable.write_text(folder / "args.yaml", yaml.safe_dump(flags_of(args), sort_keys=False))
    if not _found(folder, *SAMPLED, "metrics.jsonl") or not (folder / "code.json").is_file():
        durable.write_json(folder / "code.json", _code(args))
    then, now = durable.read_json(folder / "code.json"), _code(args)
    for file in (file for file in then if then[file] != now.get(file)):
        distributed.say(f"warning: {file} has changed since the run in {folder} began: it continues with the new code")
    return None


def _found(folder: Path, *names: str) -> bool:
    return any(file for name in names for file in folder.glob(name))


def _conflict(folder: Path, args: BaseArgs) -> str | None:
    """Return the reason why the run in the folder cannot continue with these flags, if there is one. Reads only."""
    flags, resumable = folder / "args.yaml", checkpoints_in(folder / "checkpoints") or _found(folder, *SAMPLED)
    if args.resume == "must" and not resumable:
        return f"--resume must: {folder} has no checkpoint; use --resume auto"
    begun = resumable or _found(folder, "metrics.jsonl")  # a run without steps does not count
    if args.resume == "never" or not begun or not flags.is_file():
        return None
    try:
        then, now = yaml.safe_load(flags.read_text()), flags_of(args)
    except (yaml.YAMLError, ValueError, RecursionError):
        then = None
    if not isinstance(then, dict):
        return f"--output_dir {folder}: args.yaml is damaged; delete it to resume with the flags given now"
    then = flags_of(type(args)()) | then  # newer flags had their defaults
    then |= {k: [v] for k, v in then.items() if isinstance(v, str) and isinstance(now.get(k), list)}  # one value
    free = may_change(args, then)
    changed = [k for k in then if then.get(k) != now.get(k) and k not in free]
    if not changed:
        return None
    what = ", ".join(f"{key} was {then.get(key)}, is {now.get(key)}" for key in changed[:3])
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    advice = "name another --output_dir, or use --resume never to delete that run and start over"
    return f"--output_dir {folder}: the folder has a run with other flags ({what}{more}); {advice}"


def _code(args: BaseArgs) -> dict[str, list[int]]:
    """Return the fingerprints of the script and of the user's rewards and environment."""
    specs = (*getattr(args, "reward", ()), getattr(args, "environment", None) or "")
    users = [Path(spec.rpartition(":")[0]).expanduser() for spec in specs]
    files = [Path(getattr(sys.modules.get(type(args).__module__), "__file__", None) or ""), *users]
    return {str(file): durable.fingerprint(file) for file in files if file.suffix == ".py" and file.is_file()}
