"""Files of data: their kinds, their texts, and their rows as shards. The column `_source` is the
location of a row: `train.jsonl:17`."""

import contextlib
import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.parallel import distributed

# Kinds of files: one JSON object per line, one JSON value, tables of text with their separators,
# tables with types.
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
WHOLE = (".json", ".json.gz", ".json.zst")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", ".arrow")
KINDS = ".jsonl, .json (these also as .gz or .zst), .parquet, .arrow, .csv or .tsv"
LONGEST = 1 << 26  # characters of a line
LARGEST = 1 << 30  # characters of a .json file

_reports: ContextVar[list[list[str]] | None] = ContextVar("reports", default=None)


class BadRows:
    """Errors of unusable rows. With `--on_bad_row error` the first one ends the run; with `skip`
    they are reported."""

    def __init__(self, on_bad_row: str):
        self.skip = on_bad_row == "skip"
        self.errors: list[str] = []

    def add(self, error: ValueError, where: str) -> None:
        """Record the error of a row. Raises it if rows are not skipped, or if it does not start
        with `where`, the location of the row, and thus does not concern the row."""
        if not self.skip or not str(error).startswith(where):
            raise error
        self.errors.append(str(error))

    def report(self) -> None:
        """Print one line per kind of error on rank 0. Errors of one kind differ in locations and
        numbers only."""
        reports = _reports.get()
        if reports is not None:
            reports.append(self.errors)
            return
        kinds: dict[str, list[str]] = {}
        for error in self.errors:
            _, _, problem = error.partition(": ")
            kinds.setdefault(re.sub(r"\d+", "N", problem), []).append(error)
        for errors in kinds.values():
            distributed.say(f"--on_bad_row skip: {len(errors)} left out, such as {errors[0]}")


@contextlib.contextmanager
def collect_bad_rows() -> Iterator[list[list[str]]]:
    """Collect the errors of each report instead of printing them, for another process or for a
    later time."""
    reports: list[list[str]] = []
    token = _reports.set(reports)
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
    folder: str | None = None
    """folder of the paths in the rows"""

    def rows(self, bad: BadRows) -> Iterator[dict]:
        """Yield the rows, with `_folder` and without columns of the data with names of ours."""
        own = {} if self.folder is None else dict(_folder=self.folder)
        for row in self.read(bad):
            for name in ("_dataset", "_folder", "_images"):
                row.pop(name, None)
            yield row | own


def kind_of(path: Path) -> str:
    """Return the file's suffix from `KINDS`, or an empty string for other files."""
    kinds = (*LINES, *WHOLE, *SEPARATORS, *TABLES)
    return next((kind for kind in kinds if path.name.endswith(kind)), "")


def files_of(path: Path) -> list[Path]:
    """Return the file, or whatever matches a pattern except folders, sorted; none for a folder or a
    missing file."""
    if os.path.exists(path):  # unlike Path.exists, also of names that are too long
        return [path] if path.is_file() else []
    matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    return [match for match in matches if not match.is_dir()]


def is_file_name(dataset: str) -> bool:
    """Return whether the name of a missing dataset looks like a file or a pattern, not like a hub
    id."""
    is_pattern = glob.escape(dataset) != dataset
    return bool(kind_of(Path(dataset))) or dataset.startswith((".", "/", "~")) or is_pattern


def number_rows(name: str, rows: Iterable[dict]) -> Iterator[dict]:
    """Yield the rows with their `_source`, `name:1` and so on."""
    for number, row in enumerate(rows, 1):
        yield row | {"_source": f"{name}:{number}"}


def texts(label: str, path: Path, is_whole: bool) -> Iterator[str]:
    """Yield the lines of a file, or all of it at once. `load_dataset("text")` would read a
    truncated .zst file without an error, and `str.splitlines` would also split at U+2028, which
    JSON may contain."""
    import pyarrow

    limit = LARGEST if is_whole else LONGEST
    try:
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            # utf-8-sig: without the byte order mark of some editors
            file = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="\n")
            read = partial(file.read if is_whole else file.readline, limit)
            for number, text in enumerate(iter(read, ""), 1):
                if len(text) == limit:
                    what = "convert it to .jsonl; it" if is_whole else f"line {number}"
                    raise ValueError(f"{label}: {what} has {len(text):,} characters or more")
                yield text.removesuffix("\n")
    except (OSError, UnicodeError) as error:  # of the content, or of the file's name
        raise ValueError(f"{label}: {distributed.first_line(error)}") from error
