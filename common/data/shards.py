"""Splits of a dataset, opened as shards that are read row by row: files, folders (folders.py),
tables and the hub (tables.py) and built-in tasks (tasks.py)."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from common.data import folders, tables
from common.data.files import (
    KINDS,
    LINES,
    SEPARATORS,
    WHOLE,
    BadRows,
    Shard,
    files_of,
    is_file_name,
    kind_of,
    number_rows,
    texts,
)
from common.data.tasks import TASKS
from common.parallel import distributed, durable


def open_shards(
    flag: str, dataset: str, split: str, config: str | None, streaming: bool = False
) -> list[Shard] | None:
    """Open a split of a dataset, or return None if the dataset has no such split. With `streaming`
    tables are not downloaded or converted first.

    Raises `ValueError` if there is no such dataset or if it cannot be read.
    """
    label = f"{flag} {dataset}"
    path = Path(dataset).expanduser()
    if dataset in TASKS:
        return [Shard(partial(_task_rows, dataset, split))] if split in ("train", "test") else None
    files = files_of(path)
    if files and split != "train":
        return None
    if not files:
        is_folder = os.path.isdir(path)
        if not is_folder and is_file_name(dataset):
            raise ValueError(f"{label}: no such file")
        if not is_folder:
            return tables.hub_shards(label, dataset, split, config, streaming)
        if tables.is_saved(path):
            return tables.saved_shards(label, path, split)
        files = folders.files_of_split(label, path, split, config)
    for file in files:
        if not file.is_file():
            raise ValueError(f"{label}: {file} is a broken link or no regular file; delete it")
    return [
        Shard(partial(_file_rows, f"{flag} {file}", file, streaming), (file,), str(file.parent))
        for file in files
    ] or None


# ---- rows of a shard ----


def _task_rows(task: str, split: str, bad: BadRows) -> Iterator[dict]:
    return number_rows(f"{task}/{split}", TASKS[task](split))


def _file_rows(label: str, path: Path, streaming: bool, bad: BadRows) -> Iterator[dict]:
    """Return the rows of a file. Raises `ValueError` for an unreadable file or, unless skipped, a
    bad line."""
    kind = kind_of(path)
    if not kind:
        raise ValueError(f"{label}: expected a {KINDS} file")
    if kind in (*LINES, *WHOLE):
        return _json_rows(label, path, kind in WHOLE, bad)
    if kind in SEPARATORS:
        return tables.csv_rows(label, path, SEPARATORS[kind], bad)
    return tables.file_rows(label, path, kind, streaming, bad)


def _json_rows(label: str, path: Path, is_whole: bool, bad: BadRows) -> Iterator[dict]:
    """Yield the row of each line, or, with `is_whole`, the rows of the file's only value."""
    for line, text in enumerate(texts(label, path, is_whole), 1):
        if not text.strip():
            continue
        try:
            value = _json_value(label, line, text)
        except ValueError as error:
            if is_whole:
                raise
            bad.add(error, label)
            continue
        rows = value if is_whole and isinstance(value, list) else [value]
        for number, row in enumerate(rows, line):
            source = f"{path.name}:{number}"
            if isinstance(row, dict):
                yield row | {"_source": source}
            else:
                bad.add(ValueError(f"{label}: {source} is not an object"), label)


def _json_value(label: str, line: int, text: str) -> object:
    """Return the value of a text that begins in `line` of its file."""
    try:
        return durable.parse_json(text)
    except ValueError as error:  # bad syntax, or a number of 5,000 digits
        line += getattr(error, "lineno", 1) - 1
        problem = getattr(error, "msg", None) or distributed.first_line(error)
        raise ValueError(f"{label}: line {line} is not valid JSON: {problem}") from error
