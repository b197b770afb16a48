"""Digests of the files and rows that a run reads. A resumed run compares them with `inputs.json` in
its output folder, which has the digests of the first start (run_folder.py).

It refuses other training rows, models or chat templates. If the code of a reward or tool or the
held-out rows have changed, it prints a line and goes on. A digest depends on the content alone, so
a copied file is the same file."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common.config.flags import MODEL_KINDS, NAMES_MODELS, NamesCode, eval_sets_of, marked, public
from common.config.groups import BaseArgs
from common.model.hub import checkpoints_in, local_folder
from common.model.loading import files_of, named_errors
from common.text.columns import OUR_COLUMNS

BLOCK = 2**16  # bytes of each block that is read of a large file
BLOCKS = 256  # number of these blocks
# Besides the weights, these files decide what a model computes.
DECIDING_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "adapter_config.json",
    "adapter_model.safetensors",
)  # fmt: skip
Digests = dict[str, dict[str, str]]  # flag or kind of rows -> file -> digest


def fixed_inputs(args: BaseArgs, rows: Sequence[dict]) -> Digests:
    """Return the digests of what must stay the same during a run: the rows to train on, the models,
    and the chat template."""
    found = {args.dataset_flag: digests_of_rows(rows, _made(args))} if rows else {}
    for flag, name in _models(args):
        with named_errors(f"{flag} {name}"):
            found[f"{flag} {name}"] = _of_files(model_files(name))
    if args.chat_template is not None:
        found[f"--chat_template {args.chat_template}"] = _of_files([Path(args.chat_template)])
    return found


def other_inputs(args: BaseArgs, rows: Sequence[dict], held_out: Sequence[dict]) -> Digests:
    """Return the digests of what may differ when a run is resumed: the user's code, held-out
    rows."""
    found = {"held-out rows": digests_of_rows(held_out, _made(args))} if held_out else {}
    return found | {f"{flag} {spec}": _of_files(files) for flag, spec, files in _code(args, rows)}


def changed(then: Digests, now: Digests) -> Iterator[tuple[str, str]]:
    """Yield (flag, first file that differs) for each input that is in both and has changed."""
    for flag in [each for each in then if each in now]:
        for name in sorted({*then[flag], *now[flag]}):
            if then[flag].get(name) != now[flag].get(name):
                yield flag, name
                break


# ---- what flags name ----


def _models(args: BaseArgs) -> Iterator[tuple[str, str]]:
    """Yield the flag and the name of each model that the run reads. eval.py takes a folder of
    checkpoints: each of them counts as a model."""
    for flag, values, _ in marked(args, NAMES_MODELS):
        names: Iterable[str] = values
        if flag == "model":
            names = [*map(str, checkpoints_in(Path(args.model)))] or values
        elif flag == "teacher":
            names = eval_sets_of(values, flag)
        elif flag == "reward":
            names = [name.partition(":")[2] for name in values if name.startswith(MODEL_KINDS)]
        for name in names:
            yield f"--{flag}", name


def model_files(name: str) -> list[Path]:
    """Return the files of a model that a run reads. The built-in model has none."""
    folder = local_folder(name)
    if folder is None:
        return []
    return [folder / file for file in DECIDING_FILES] + files_of(folder)


def _code(args: BaseArgs, rows: Sequence[dict]) -> Iterator[tuple[str, str, list[Path]]]:
    """Yield flag, value and files of each reward, environment, agent and tool of the user."""
    specs = [(flag, name) for flag, names, _ in marked(args, NamesCode) for name in names]
    if ("reward", "by_row") in specs:
        specs += dict.fromkeys(("reward", str(row.get("reward"))) for row in rows)
    for flag, spec in specs:
        words = [*spec.split(), spec.rpartition(":")[0], spec]
        files = [Path(word) for word in words if word.endswith(".py") and Path(word).is_file()]
        if files:
            yield f"--{flag}", public(spec), files


# ---- digests ----


def _made(args: BaseArgs) -> list[str]:
    """Return the columns that the user's code fills. A change of only these is no change of the
    row."""
    return [mark.makes for _, _, mark in marked(args, NamesCode) if mark.makes]


def digests_of_rows(rows: Iterable[dict], made: Sequence[str] = ()) -> dict[str, str]:
    """Return, for each data file or table, the number of its rows and their digest. Columns that
    onefile adds or the user's code `made` do not count. An image counts by its content, not its
    path."""
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
    """Return a file's size and a digest of its bytes. A file of more than `blocks` blocks is
    sampled: that many blocks are read, evenly spread from its start to its end."""
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
