"""What a run reads, known by its content. A resumed run stops at other training rows or frozen
weights, and says which rewards, tools or held-out rows are not as they were.

`inputs.json` in the output folder has the digests of when the run began. A copy of a file has the
same digest, whatever its times."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common.config.flags import MODEL_KINDS, eval_sets_of, public
from common.config.groups import BaseArgs
from common.model.hub import checkpoints_in, local_folder
from common.model.loading import files_of, named_errors
from common.text.columns import OUR_COLUMNS

BLOCK = 2**16  # bytes that are read at once of a large file
BLOCKS = 256  # number of these blocks
# These files too decide what a model computes.
DECIDING_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "adapter_config.json",
    "adapter_model.safetensors",
)  # fmt: skip
Digests = dict[str, dict[str, str]]  # flag or kind of rows -> file -> digest


def fixed_inputs(args: BaseArgs, rows: Sequence[dict]) -> Digests:
    """Return the digests of what must not change during a run: rows to train on, models, and the
    chat template."""
    found = {args.dataset_flag: digests_of_rows(rows, _made(args))} if rows else {}
    for flag, name in _models(args):
        with named_errors(f"{flag} {name}"):
            found[f"{flag} {name}"] = _of_files(model_files(name))
    if args.chat_template is not None:
        found[f"--chat_template {args.chat_template}"] = _of_files([Path(args.chat_template)])
    return found


def other_inputs(args: BaseArgs, rows: Sequence[dict], held_out: Sequence[dict]) -> Digests:
    """Return the digests of what may change between two starts of a run: the user's code, and
    held-out rows."""
    found = {"held-out rows": digests_of_rows(held_out, _made(args))} if held_out else {}
    return found | {f"{flag} {spec}": _of_files(files) for flag, spec, files in _code(args, rows)}


def changed(then: Digests, now: Digests) -> Iterator[tuple[str, str]]:
    """Yield (flag, file) for each input that both have and that differs."""
    for flag in [each for each in then if each in now]:
        for name in sorted({*then[flag], *now[flag]}):
            if then[flag].get(name) != now[flag].get(name):
                yield flag, name
                break


# ---- what flags name ----


def _models(args: BaseArgs) -> Iterator[tuple[str, str]]:
    """Yield flag and name of each model that the run reads. Checkpoints of a folder, which eval.py
    takes, are a model each."""
    for name in [*map(str, checkpoints_in(Path(args.model)))] or [args.model]:
        yield "--model", name
    for flag in ("reference_model", "value_model", "adapter"):
        if (name := getattr(args, flag, None)) is not None:
            yield f"--{flag}", name
    teachers = getattr(args, "teacher", ())
    if teachers and isinstance(teachers, tuple):  # self_distill.py has another flag of this name
        for name in eval_sets_of(teachers, "teacher"):
            yield "--teacher", name
    for name in getattr(args, "reward", ()):
        if name.startswith(MODEL_KINDS):
            yield "--reward", name.partition(":")[2]


def model_files(name: str) -> list[Path]:
    """Return the files of a model that a run reads; none for a built-in model."""
    folder = local_folder(name)
    if folder is None:
        return []
    return [folder / file for file in DECIDING_FILES] + files_of(folder)


def _code(args: BaseArgs, rows: Sequence[dict]) -> Iterator[tuple[str, str, list[Path]]]:
    """Yield flag, value and files of each reward, environment, agent and tool of the user."""
    rewards = [*getattr(args, "reward", ())]
    if "by_row" in rewards:
        rewards += dict.fromkeys(str(row.get("reward")) for row in rows)
    specs = [("--reward", name) for name in rewards]
    specs += [("--tools", name) for name in getattr(args, "tools", ())]
    specs += [(f"--{name}", getattr(args, name, None)) for name in ("environment", "agent")]
    for flag, spec in specs:
        words = [*str(spec).split(), str(spec).rpartition(":")[0], str(spec)]
        files = [Path(word) for word in words if word.endswith(".py") and Path(word).is_file()]
        if files:
            yield flag, public(spec), files


# ---- digests ----


def _made(args: BaseArgs) -> list[str]:
    """Return the columns that the user's code fills: the row has not changed if they have."""
    made = {"_prompt": getattr(args, "environment", None), "tools": getattr(args, "tools", None)}
    return [column for column, flag in made.items() if flag]


def digests_of_rows(rows: Iterable[dict], made: Sequence[str] = ()) -> dict[str, str]:
    """Return the number of rows of each file or table, with a digest of their columns but those
    that were `made`. Of images their content counts, not their paths."""
    left_out = {*OUR_COLUMNS, *made}
    counts: dict[str, int] = {}
    hashes: dict[str, hashlib.blake2b] = {}
    for row in rows:
        name = row["_source"].rpartition(":")[0]
        own = {column: value for column, value in row.items() if column not in left_out}
        if spans := row.get("_images"):
            own["images"] = [digest for _, digest, *_ in spans]
        text = repr(sorted(own.items())).encode(errors="backslashreplace")
        hashes.setdefault(name, hashlib.blake2b(digest_size=16)).update(text)
        counts[name] = counts.get(name, 0) + 1
    return {name: f"{counts[name]} rows, {hashes[name].hexdigest()}" for name in hashes}


def _of_files(files: Iterable[Path]) -> dict[str, str]:
    found = {}
    files = [*files]
    folder = os.path.commonpath([file.absolute().parent for file in files]) if files else ""
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # a run may delete its old checkpoints
            found[os.path.relpath(file, folder or ".")] = digest_of_file(file)
    return found


def digest_of_file(path: Path, blocks: int = BLOCKS) -> str:
    """Return the size of a file and a digest: of all its bytes if so many blocks hold them, or else
    of blocks from its first byte to its last."""
    size = path.stat().st_size
    starts = [0]
    if size > blocks * BLOCK:
        starts = [(size - BLOCK) * i // (blocks - 1) for i in range(blocks)]
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK if len(starts) > 1 else size))
    return f"{size} bytes, {digest.hexdigest()}"
