"""A dataset by name -> its rows: JSON and .csv here, folders.py, tables.py, built-in tasks.

A row has its place in `_source`: the line of a file (`train.jsonl:17`) or the number in a table."""

import csv
import glob
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from common.config.extra import load_named
from common.config.flags import FILE_KINDS, JSON, SEPARATORS, kind_of
from common.parallel import distributed
from common.parallel.distributed import first_line

ADDED_COLUMNS = ("_dataset", "_folder", "_images")  # we add these columns; the data's are ignored
TASKS = dict(
    arithmetic="common.text.tasks:arithmetic_rows",
    calculator="extras.tools.tasks:calculator_rows",
    products="extras.tools.tasks:products_rows",
    squares="extras.images.pictures:squares_rows",
)  # a module is imported when its task is named; its function maps a split to rows
# Characters; more are refused: a small .gz file may hold any number of them.
LONGEST_LINE = 100_000_000
LARGEST_FILE = 4_000_000_000  # of one value, such as a list of rows


class BadRows:
    """Errors of unusable rows. With `--on_bad_row error` the first one ends the run; with `skip`
    there is one line for each kind of error, whatever the places and numbers in it."""

    def __init__(self, on_bad_row: str):
        self.skip = on_bad_row == "skip"
        self.errors: list[str] = []

    def add(self, error: ValueError, where: str) -> None:
        """Record the error of a row. Raises it if rows are not skipped, and if it does not start
        with `where`, the place of the row: then it is not about the row."""
        if not self.skip or not str(error).startswith(where):
            raise error
        self.errors.append(str(error))

    def report(self) -> None:
        kinds: dict[str, list[str]] = {}
        for error in self.errors:
            kinds.setdefault(re.sub(r"\d+", "N", error.partition(": ")[2]), []).append(error)
        for errors in kinds.values():
            distributed.say(f"--on_bad_row skip: {len(errors)} left out, such as {errors[0]}")


class Shard(NamedTuple):
    """A file or a table: a part of the rows of a split."""

    label: str  # how its errors begin
    name: str  # how the places of its rows begin
    content: Path | Iterable[object]
    columns: dict = {}  # further columns of each row
    classes: dict = {}  # types of columns with names of classes, beside those in a table

    def rows(self, bad: BadRows) -> Iterator[dict]:
        """Yield the rows. Raises `ValueError` if it cannot be read or, unless skipped, for a bad
        row."""
        try:
            for number, row in self._numbered(bad):
                place = f"{self.name}:{number}"
                if isinstance(row, dict):
                    own = {column: row[column] for column in row if column not in ADDED_COLUMNS}
                    yield self._with_names_of_classes(own) | self.columns | dict(_source=place)
                else:
                    bad.add(ValueError(f"{self.label}: {place} is not an object"), self.label)
        except Exception as error:  # the disk, the network, csv, pyarrow and datasets raise others
            if str(error).startswith(self.label):
                raise
            problem = first_line(error.__cause__ or error)
            raise ValueError(f"{self.label}: cannot be read: {problem}") from error

    def _numbered(self, bad: BadRows) -> Iterable[tuple[int, object]]:
        if isinstance(self.content, list):
            return enumerate(self.content, 1)
        if isinstance(self.content, Path) and kind_of(self.content) in JSON:
            return _json_rows(self.label, self.content, bad)
        if isinstance(self.content, Path) and kind_of(self.content) in SEPARATORS:
            return _csv_rows(self.label, self.content, bad)
        from common.text.tables import parquet_rows, table_rows

        read = parquet_rows if isinstance(self.content, Path) else table_rows
        return enumerate(read(self.content), 1)

    def _with_names_of_classes(self, row: dict) -> dict:
        if not self.classes:
            return row
        from common.text.tables import shown_value

        columns = self.classes.keys() & row
        return row | {name: shown_value(row[name], self.classes[name]) for name in columns}


def open_split(
    flag: str, dataset: str, split: str, config: str | None = None, streaming: bool = False,
    is_alone: bool = True,
) -> list[Shard] | None:  # fmt: skip
    """Open a split of a dataset, or return None if the dataset has no such split. With `streaming`
    data of the hub is not downloaded first. Unless the dataset `is_alone`, the place of a row has
    the whole path: another dataset may have a file with this name. Raises `ValueError` if there is
    no such dataset, or if it cannot be read."""
    label = f"{flag} {dataset}"
    path = Path(os.path.expanduser(dataset))
    if dataset in TASKS:
        if split not in ("train", "test"):
            return None
        return [Shard(label, f"{dataset}/{split}", load_named(TASKS[dataset], label)(split))]
    if _is_saved(path):
        from common.text.tables import saved_splits

        table = saved_splits(label, path).get(split)
        return None if table is None else [Shard(label, f"{path}/{split}", table)]
    if os.path.isdir(path):
        from common.text.folders import files_of_split

        files, classes = files_of_split(label, path, split, config)
        names = [str(file.relative_to(path)) for file in files]
        return _file_shards(flag, files, names, classes, is_alone)
    if files := files_named(dataset):
        files = files if split == "train" else []
        return _file_shards(flag, files, [file.name for file in files], {}, is_alone)
    if _is_name_of_file(dataset):
        raise ValueError(f"{label}: no such file")
    from common.text.tables import hub_tables

    return [Shard(label, *x) for x in hub_tables(label, dataset, split, config, streaming)] or None


def _file_shards(
    flag: str, files: list[Path], names: list[str], classes: dict, is_alone: bool
) -> list[Shard] | None:
    """Return a shard for each file, None without a file. Raises `ValueError` for what cannot be
    read, such as a folder, a pipe or a device: reading from it may have no end."""
    for file in files:
        if not kind_of(file):
            raise ValueError(f"{flag} {file}: expected a {FILE_KINDS} file")
        if not file.is_file():
            raise ValueError(f"{flag} {file}: not a regular file")
    if not is_alone or len({*names}) < len(names):
        names = [str(file) for file in files]
    return [
        # paths in the rows are relative to the folder of the file
        Shard(f"{flag} {file}", name, file, dict(_folder=str(file.parent)), classes)
        for file, name in zip(files, names, strict=True)
    ] or None


def splits_of(label: str, dataset: str, config: str | None = None) -> list[str]:
    """Return the names of the splits of a dataset, such as train and test. Raises
    `ValueError`, which begins with `label`, if it cannot be read."""
    path = Path(os.path.expanduser(dataset))
    if dataset in TASKS:
        return ["train", "test"]
    if _is_saved(path):
        from common.text.tables import saved_splits

        return [*saved_splits(label, path)]
    if os.path.isdir(path):
        from common.text.folders import splits_of_folder

        return splits_of_folder(label, path, config)
    if files_named(dataset) or _is_name_of_file(dataset):
        return ["train"]
    from common.text.tables import hub_splits

    return hub_splits(label, dataset, config)


def _is_saved(folder: Path) -> bool:
    # unlike Path.is_file, also of names that are too long
    return any(os.path.isfile(folder / name) for name in ("dataset_dict.json", "state.json"))


def _is_name_of_file(dataset: str) -> bool:
    is_path = dataset.startswith((".", "/", "~")) or glob.escape(dataset) != dataset
    return is_path or bool(kind_of(Path(dataset)))


def files_named(dataset: str) -> list[Path]:
    """Return the file, or the files that match a pattern, sorted; none for a folder."""
    path = Path(os.path.expanduser(dataset))
    names = [path] if os.path.lexists(path) else sorted(glob.glob(str(path), recursive=True))
    files = map(Path, names)
    return [file for file in files if not file.is_dir() or (kind_of(file) and file != path)]


# ---- JSON and tables of text ----


def _opened(path: Path) -> io.TextIOWrapper:
    """Open a file of text. pyarrow notices a truncated .gz or .zst file."""
    import pyarrow

    stream = pyarrow.input_stream(str(path), compression="detect")
    # utf-8-sig skips the byte order mark that some editors write.
    return io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="\n")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Only a line feed ends one: JSON may contain U+2028, at which
    `str.splitlines` would split. Raises `ValueError` for a line without an end."""
    with _opened(path) as stream:
        for number in count(1):
            line = stream.readline(LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > LONGEST_LINE:
                raise ValueError(f"line {number} has more than {LONGEST_LINE:,} characters")
            yield line


def _json_rows(label: str, path: Path, bad: BadRows) -> Iterator[tuple[int, object]]:
    """Yield the value of each line or, if the file begins with `[`, the members of this list. A
    .json file may also be one object, over any number of lines."""
    if _is_list(path):
        yield from enumerate(_json_value(label, path), 1)
    elif kind_of(path).split(".")[1] == "json" and _is_one_object(path):
        value = _json_value(label, path)
        _require_row(label, value)
        yield 1, value
    else:
        for line, text in enumerate(_lines(path), 1):
            if text.strip():
                try:
                    value = json.loads(text, object_pairs_hook=_object)
                except (ValueError, RecursionError) as error:
                    bad.add(_not_json(label, error, line), label)
                else:
                    yield line, value


def _is_list(path: Path) -> bool:
    with _opened(path) as stream:
        while part := stream.read(10_000):
            if text := part.lstrip():
                return text[0] == "["
    return False


def _is_one_object(path: Path) -> bool:
    """Return whether a file has a single line with text, or its first one goes on in the next."""
    lines = (text.rstrip() for text in _lines(path) if text.strip())
    first, second = next(lines, ""), next(lines, "")
    return first.endswith(("{", "[", ",", ":")) or bool(first and not second)


def _json_value(label: str, path: Path):
    with _opened(path) as stream:
        text = stream.read(LARGEST_FILE + 1)
    if len(text) > LARGEST_FILE:
        problem = f"one value of more than {LARGEST_FILE:,} characters"
        raise ValueError(f"{label}: {problem}; write one object a line")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _not_json(label, error, getattr(error, "lineno", 1)) from error


def _not_json(label: str, error: Exception, line: int) -> ValueError:
    """Return the refusal of a line. JSON may also be too deep."""
    problem = getattr(error, "msg", None) or first_line(error)
    if problem == "Extra data":
        problem = "more than one value; write one object a line"
    if problem.startswith("Expecting property name"):  # after {, most often at the end of the line
        problem += "; write one object a line"
    return ValueError(f"{label}: line {line} is not valid JSON: {problem}")


def _require_row(label: str, value: object) -> None:
    """Raise `ValueError` if the one object of a file holds rows: by columns, as pandas writes a
    table, or in a list of objects that are no messages."""
    if not isinstance(value, dict):
        return
    columns = [*value.values()]
    is_table = all(isinstance(column, dict) for column in columns) and len({*map(tuple, columns)})
    if {"columns", "data"} <= value.keys() or is_table == 1:
        problem = "a table by columns, as to_json() of pandas writes it"
        raise ValueError(f'{label}: {problem}; use to_json(orient="records", lines=True)')
    lists = {
        name: {*chain.from_iterable(column)}
        for name, column in value.items()
        if isinstance(column, list) and column and all(isinstance(x, dict) for x in column)
    }
    if lists and not any({"role", "from"} & names for names in lists.values()):
        problem = f"one object, with objects under {min(lists)}"
        advice = "if these are the rows, write one a line; if it is a row, name the file .jsonl"
        raise ValueError(f"{label}: {problem}; {advice}")


def _object(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {twice} twice")
    return value


def _csv_rows(label: str, path: Path, bad: BadRows) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a table of text. Every value is the text in the file, such as 07, NA or
    None; an empty one is None. Columns without a name, such as an index, are left out."""
    csv.field_size_limit(LONGEST_LINE)
    rows = filter(None, csv.reader(_lines(path), delimiter=SEPARATORS[path.suffix], strict=True))
    columns = next(rows, [])
    if not columns:
        raise ValueError(f"{label}: cannot be read: it is empty")
    if twice := [name for name, times in Counter(columns).items() if name and times > 1]:
        raise ValueError(f"{label}: two columns have the name {twice[0]}")
    for number, row in enumerate(rows, 1):
        if len(row) == len(columns):
            values = zip(columns, row, strict=True)
            yield number, {column: value or None for column, value in values if column}
        else:
            problem = f"row {number} has {len(row)} values for {len(columns)} columns"
            bad.add(ValueError(f"{label}: {problem}"), label)
