"""Readers of the data sources of `--dataset`: built-in tasks, files, folders, saved datasets and the hub.

Each split is opened as shards, which are read row by row. The column `_source` is the location of a row:
`train.jsonl:17`.
"""

import contextlib
import csv
import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from common.data.tasks import TASKS
from common.parallel import distributed

# Kinds of files: one JSON object per line, one JSON value, tables of text with their separators, tables with types.
LINES, WHOLE = (".jsonl", ".jsonl.gz", ".jsonl.zst"), (".json", ".json.gz", ".json.zst")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", ".arrow")
LONGEST, LARGEST = 1 << 26, 1 << 30  # characters of a line, and of a whole .json file
KINDS = ".jsonl, .json (these also as .gz or .zst), .parquet, .arrow, .csv or .tsv"

_reports: ContextVar[list[list[str]] | None] = ContextVar("reports", default=None)


class BadRows:
    """Errors of unusable rows. With `--on_bad_row error` the first one ends the run; with `skip` they are reported."""

    def __init__(self, on_bad_row: str):
        self.skip = on_bad_row == "skip"
        self.errors: list[str] = []

    def add(self, error: ValueError, where: str) -> None:
        """Record the error of a row. Raises it if rows are not skipped, or if it does not start with `where`, the
        location of the row, and thus does not concern the row."""
        if not self.skip or not str(error).startswith(where):
            raise error
        self.errors.append(str(error))

    def report(self) -> None:
        """Print one line per kind of error on rank 0. Errors of one kind differ in locations and numbers only."""
        if (reports := _reports.get()) is not None:
            reports.append(self.errors)
            return
        kinds: dict[str, list[str]] = {}
        for error in self.errors:
            kinds.setdefault(re.sub(r"\d+", "N", error.partition(": ")[2]), []).append(error)
        for errors in kinds.values():
            distributed.say(f"--on_bad_row skip: {len(errors)} left out, such as {errors[0]}")


@contextlib.contextmanager
def collect_bad_rows() -> Iterator[list[list[str]]]:
    """Collect the errors of each report instead of printing them, for another process or for a later time."""
    token = _reports.set(reports := [])
    try:
        yield reports
    finally:
        _reports.reset(token)


# ---- datasets as shards ----


@dataclass(frozen=True)
class Shard:
    """File of a dataset, or part of a table."""

    read: Callable[[BadRows], Iterator[dict]]
    files: tuple[Path, ...] = ()
    """files that determine the rows"""


def open_shards(flag: str, dataset: str, split: str, config: str | None, streaming: bool = False) -> list[Shard] | None:
    """Open a split of a dataset, or return None if the dataset has no such split. With `streaming` tables are not
    downloaded or converted first.

    Raises `ValueError` if there is no such dataset or if it cannot be read.
    """
    path, label = Path(dataset).expanduser(), f"{flag} {dataset}"
    if dataset in TASKS:
        return [Shard(partial(_task_rows, dataset, split))] if split in ("train", "test") else None
    if files := files_of(path):
        files = files if split == "train" else []
    elif os.path.isdir(path) and not _is_saved(path):
        files = _files_of_split(label, path, split, config)
    elif os.path.isdir(path):
        return _shards_of_table(label, f"{path.name}/{split}", _saved_split(label, path, split))
    elif is_file_name(dataset):
        raise ValueError(f"{label}: no such file")
    else:
        return _shards_of_table(label, f"{dataset}/{split}", _hub_split(label, dataset, split, config, streaming))
    if other := [file for file in files if not file.is_file()]:
        raise ValueError(f"{label}: {other[0]} is a broken link or no regular file; delete it")
    return [Shard(partial(_read_file, f"{flag} {file}", file, streaming), (file,)) for file in files] or None


def kind_of(path: Path) -> str:
    """Return the file's suffix from `KINDS`, or an empty string for other files."""
    return next((kind for kind in (*LINES, *WHOLE, *SEPARATORS, *TABLES) if path.name.endswith(kind)), "")


def files_of(path: Path) -> list[Path]:
    """Return the file, or whatever matches a pattern except folders, sorted; none for a folder or a missing file."""
    if os.path.exists(path):  # unlike Path.exists, also of names that are too long
        return [path] if path.is_file() else []
    return [file for name in sorted(glob.glob(str(path), recursive=True)) if not (file := Path(name)).is_dir()]


def is_file_name(dataset: str) -> bool:
    """Return whether the name of a missing dataset looks like a file or a pattern, not like a hub id."""
    return bool(kind_of(Path(dataset))) or dataset.startswith((".", "/", "~")) or glob.escape(dataset) != dataset


def _files_of_split(label: str, folder: Path, split: str, config: str | None) -> list[Path]:
    """Return the files of a split, see folders.py, without hidden ones such as the copies in `.ipynb_checkpoints`."""
    from common.data.folders import names_of_split

    files = sorted(file for file in folder.rglob("*") if kind_of(file) and not file.is_dir())
    names = [str(file.relative_to(folder)) for file in files]
    visible = [name for name in names if not re.search(r"(^|/)(\.|__[^/]*/)", name)]
    if not visible:
        raise ValueError(f"{label}: no {KINDS} files in it")
    chosen = names_of_split(label, folder, visible, split, config)
    stems: dict[str, str] = {}
    for name in chosen:
        other = stems.setdefault(name.removesuffix(kind_of(Path(name))), name)
        if other != name:
            raise ValueError(f"{label}: {other} and {name} have one name; delete one, or name one kind by a pattern")
    return [folder / name for name in chosen]


# ---- built-in tasks and files ----


def _task_rows(task: str, split: str, bad: BadRows) -> Iterator[dict]:
    for number, row in enumerate(TASKS[task](split), 1):
        yield row | {"_source": f"{task}/{split}:{number}"}


def _read_file(label: str, path: Path, streaming: bool, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a file. Raises `ValueError` for an unreadable file or, unless skipped, a bad line."""
    if not (kind := kind_of(path)):
        raise ValueError(f"{label}: expected a {KINDS} file")
    if kind in TABLES:
        table = _load_dataset(label, kind[1:], data_files=glob.escape(str(path)), split="train", streaming=streaming)
        yield from _table_rows(label, path.name, table, bad)
        return
    if kind in SEPARATORS:
        yield from _csv_rows(label, path, SEPARATORS[kind], bad)
        return
    for number, text in enumerate(_texts(label, path, kind in WHOLE), 1):
        if text.strip():
            yield from _parsed(label, path.name, kind, number, text, bad)


def _texts(label: str, path: Path, whole: bool) -> Iterator[str]:
    """Yield the lines of a file, or all of it at once. `load_dataset("text")` would read a truncated .zst file without
    an error, and `str.splitlines` would also split at U+2028, which JSON may contain."""
    import pyarrow

    try:
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            # utf-8-sig: without the byte order mark of some editors
            file, number = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="\n"), 0
            while text := file.read(LARGEST) if whole else file.readline(LONGEST):
                number += 1
                if len(text) == (LARGEST if whole else LONGEST):
                    what = "convert it to .jsonl; it" if whole else f"line {number}"
                    raise ValueError(f"{label}: {what} has {len(text):,} characters or more")
                yield text.removesuffix("\n")
    except (OSError, UnicodeError) as error:  # of the content, or of the file's name
        raise ValueError(f"{label}: {distributed.first_line(error)}") from error


def _parsed(label: str, name: str, kind: str, number: int, text: str, bad: BadRows) -> Iterator[dict]:
    """Yield the row of a line, or the rows of a whole .json file. `number` is the line number."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # besides bad syntax: numbers of 5,000 digits, deep nesting
        line, what = getattr(error, "lineno", 1), getattr(error, "msg", None) or distributed.first_line(error)
        problem = ValueError(f"{label}: line {number + line - 1} is not valid JSON: {what}")
        if kind in WHOLE:
            raise problem from error
        return bad.add(problem, label)
    for place, row in enumerate(value if kind in WHOLE and isinstance(value, list) else [value], number):
        if isinstance(row, dict):
            yield row | {"_source": f"{name}:{place}"}
        else:
            bad.add(ValueError(f"{label}: {name}:{place} is not an object"), label)


def _csv_rows(label: str, path: Path, separator: str, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a table of text. Every value is the text in the file, such as 07, NA or None; an empty one is
    None. Columns without a name, such as an index, are left out."""
    csv.field_size_limit(LONGEST)
    lines = (f"{text}\n" for text in _texts(label, path, whole=False))
    rows = (row for row in csv.reader(lines, delimiter=separator, strict=True) if row)
    try:
        if not (names := next(rows, [])):
            raise ValueError(f"{label}: cannot be read: it is empty")
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise ValueError(f"{label}: two columns have the name {twice[0]}")
        for number, row in enumerate(rows, 1):
            where = f"{path.name}:{number}"
            if len(row) == len(names):
                named = {name: value or None for name, value in zip(names, row, strict=True) if name}
                yield named | {"_source": where}
            else:
                bad.add(ValueError(f"{label}: {where} has {len(row)} values for {len(names)} columns"), label)
    except csv.Error as error:
        raise ValueError(f"{label}: cannot be read: {error}") from error


# ---- tables with types: parquet and arrow files, saved datasets, the hub ----


def _shards_of_table(label: str, name: str, table) -> list[Shard] | None:
    """Return one shard for a table on disk, and all shards of a streamed one."""
    if table is None:
        return None
    if (count := getattr(table, "num_shards", 1)) > 1:
        parts = [table.shard(num_shards=count, index=i) for i in range(count)]
        return [Shard(partial(_table_rows, label, f"{name}/{i}", part)) for i, part in enumerate(parts)]
    files = tuple(Path(file["filename"]) for file in getattr(table, "cache_files", ()))
    return [Shard(partial(_table_rows, label, name, table), files)]


def _table_rows(label: str, name: str, table, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset`. Raises `ValueError` if it is damaged."""
    import datasets
    from pyarrow import ArrowException

    try:
        for number, row in enumerate(table.to_list() if isinstance(table, datasets.Dataset) else table, 1):
            yield row | {"_source": f"{name}:{number}"}
    except (OSError, datasets.exceptions.DatasetsError, ArrowException) as error:
        raise ValueError(f"{label}: cannot be read: {distributed.first_line(error.__cause__ or error)}") from error


def _is_saved(folder: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _saved_split(label: str, folder: Path, split: str):
    """Return a `datasets.Dataset` that `save_to_disk` of a `Dataset` or `DatasetDict` wrote; None without the split."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{label}: cannot be read: {distributed.first_line(error)}") from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else dict(train=saved)
    return splits.get(split)


@cache  # memory-mapped files: the rows are not held in memory
def _hub_split(label: str, dataset: str, split: str, config: str | None, streaming: bool):
    """Return a split of a hub dataset, None without the split. The default configuration is `main` where several exist,
    as in openai/gsm8k."""
    try:
        return _load_dataset(label, dataset, config, split=split, streaming=streaming)
    except ValueError as error:
        if config is None and "Config name is missing" in str(error) and "'main'" in str(error.__cause__):
            return _load_dataset(label, dataset, "main", split=split, streaming=streaming)
        raise


def quiet_datasets():
    """Import the library `datasets` without progress bars and warnings. Its errors are raised."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    return datasets


def _load_dataset(label: str, *path: str | None, split: str, **options):
    """Return a `datasets.Dataset`, or an `IterableDataset` with `streaming`; None without the split."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from pyarrow import ArrowException

    datasets = quiet_datasets()
    try:
        return datasets.load_dataset(*path, split=split, **options)
    except (OSError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{label}: no such file or folder, and not found on the hub ({distributed.first_line(error)})"
        ) from error
    except (datasets.exceptions.DatasetsError, ArrowException) as error:
        raise ValueError(f"{label}: cannot be read: {distributed.first_line(error.__cause__ or error)}") from error
    except (ValueError, RuntimeError) as error:
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        raise ValueError(f"{label}: {distributed.first_line(error)}") from error  # e.g. a missing --dataset_config
