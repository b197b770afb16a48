"""A dataset by name -> its rows: JSON, tables, folders, the hub, built-in tasks.

A row has its place in `_source`: the line of a file (`train.jsonl:17`) or the number in a table."""

import csv
import glob
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from common.data.tasks import TASKS
from common.parallel import distributed
from common.parallel.distributed import first_line

JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
KINDS = ".jsonl, .json (these also as .gz or .zst), .parquet, .csv or .tsv"


class BadRows:
    """Errors of unusable rows. With `--on_bad_row error` the first one ends the run; with `skip`
    they are reported, one line for each kind: those that differ in locations and numbers only."""

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
        kinds: dict[str, list[str]] = {}
        for error in self.errors:
            kinds.setdefault(re.sub(r"\d+", "N", error.partition(": ")[2]), []).append(error)
        for errors in kinds.values():
            distributed.say(f"--on_bad_row skip: {len(errors)} left out, such as {errors[0]}")


Shard = Callable[[BadRows], Iterator[dict]]  # reads the rows of a file or of a table


def open_split(
    flag: str, dataset: str, split: str, config: str | None = None, streaming: bool = False,
    is_alone: bool = True,
) -> list[Shard] | None:  # fmt: skip
    """Open a split of a dataset, or return None if the dataset has no such split. With `streaming`
    data of the hub is not downloaded first. Unless the dataset `is_alone`, places of rows have the
    paths of files: names may be those of another one. Raises `ValueError` if there is no such
    dataset, or if it cannot be read."""
    label = f"{flag} {dataset}"
    path = Path(dataset).expanduser()
    if dataset in TASKS:
        rows = TASKS[dataset](split) if split in ("train", "test") else None
        return rows and [partial(_numbered, f"{dataset}/{split}", rows)]
    if os.path.isdir(path):
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _saved_shards(label, path, split)
        files = _files_of_folder(label, path, split)
    elif files := files_named(dataset):
        files = files if split == "train" else []
    elif kind_of(path) or dataset.startswith((".", "/", "~")) or glob.escape(dataset) != dataset:
        raise ValueError(f"{label}: no such file")
    else:
        return _hub_shards(label, dataset, split, config, streaming)
    is_name_enough = is_alone and len({file.name for file in files}) == len(files)
    return [
        partial(_file_rows, f"{flag} {file}", file, file.name if is_name_enough else str(file))
        for file in files
    ] or None


def files_named(dataset: str) -> list[Path]:
    """Return the file, or what matches a pattern except folders, sorted; none for a folder."""
    path = Path(dataset).expanduser()
    names = [path] if os.path.lexists(path) else sorted(glob.glob(str(path), recursive=True))
    return [Path(name) for name in names if not os.path.isdir(name)]


def kind_of(path: Path) -> str:
    """Return the suffix of a file that can be read, an empty string for other files."""
    kinds = (*JSON, *SEPARATORS, ".parquet")
    return next((kind for kind in kinds if path.name.endswith(kind)), "")


# ---- folders ----


def _files_of_folder(label: str, folder: Path, split: str) -> list[Path]:
    """Return the files of a split, sorted, by the rules of `datasets` for names such as
    `math_train/` or `test_2.jsonl`; without them, all are train. Raises `ValueError` for a folder
    without files that can be read or with several configurations of the hub, for a file that is in
    two splits, and for files of several kinds."""
    from datasets import data_files

    base = os.path.abspath(folder)
    readme = Path(base, "README.md")
    text = readme.read_text(errors="replace") if readme.is_file() else ""
    if len(configs := {*re.findall(r"config_name: *(\S+)", text)}) > 1:
        names = ", ".join(sorted(configs))
        raise ValueError(f"{label}: README.md names the configurations {names}; name one's files")
    try:
        splits = data_files.DataFilesDict.from_patterns(
            data_files.get_data_patterns(glob.escape(base)),
            base_path=glob.escape(base),
            allowed_extensions=[".jsonl", ".json", *SEPARATORS, ".parquet"],
        )
    except data_files.EmptyDatasetError:
        splits = {}
    if not any(splits.values()):
        raise ValueError(f"{label}: no {KINDS} files with a split in it")
    if split not in splits:  # dev is validation
        words = data_files.SPLIT_KEYWORDS.items()
        split = next((str(name) for name, others in words if split in others), split)
    own = {*splits.pop(split, ())}
    for other, files in splits.items():
        if shared := own & {*files}:
            file = os.path.relpath(min(shared), base)
            problem = f"{file} belongs to the splits {split} and {other} by its name"
            advice = "rename it, or name files with --dataset and --eval_dataset"
            raise ValueError(f"{label}: {problem}; {advice}")
    kinds = sorted({f".{kind_of(Path(file)).split('.')[1]}" for file in own})
    if len(kinds) > 1:  # often the same rows twice
        raise ValueError(f"{label}: {' and '.join(kinds)} files; name one kind by a pattern")
    return [folder / os.path.relpath(file, base) for file in sorted(own)]


# ---- files ----


def _numbered(name: str, rows: Iterable[dict], bad: BadRows) -> Iterator[dict]:
    for number, row in enumerate(rows, 1):
        yield _without_ours(row) | {"_source": f"{name}:{number}"}


def _without_ours(row: dict) -> dict:
    return {name: row[name] for name in row if name not in ("_dataset", "_folder", "_images")}


def _file_rows(label: str, path: Path, name: str, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a file, with the folder of the paths in them. Raises `ValueError` for an
    unreadable file or, unless skipped, a bad row."""
    from pyarrow import ArrowException

    kind = kind_of(path)
    if not kind:
        raise ValueError(f"{label}: expected a {KINDS} file")
    read = _json_rows if kind in JSON else _csv_rows if kind in SEPARATORS else _parquet_rows
    folder = str(path.parent)
    try:
        for number, row in read(label, path, bad):
            if isinstance(row, dict):
                yield _without_ours(row) | {"_source": f"{name}:{number}", "_folder": folder}
            else:
                bad.add(ValueError(f"{label}: {name}:{number} is not an object"), label)
    except (OSError, UnicodeError, csv.Error, ArrowException) as error:
        raise ValueError(f"{label}: cannot be read: {first_line(error)}") from error


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file. Only a line feed ends one: JSON may contain U+2028, at which
    `str.splitlines` would split. pyarrow notices a truncated .gz or .zst file."""
    import pyarrow

    with pyarrow.input_stream(str(path), compression="detect") as stream:
        # utf-8-sig: without the byte order mark of some editors
        yield from io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="\n")


def _json_rows(label: str, path: Path, bad: BadRows) -> Iterator[tuple[int, object]]:
    """Yield the value of each line or, of a file that begins with `[`, the members of this list."""
    first = next((text for text in _lines(path) if text.strip()), "")
    if first.lstrip().startswith("["):
        yield from enumerate(_parsed(label, 1, "".join(_lines(path))), 1)
        return
    for line, text in enumerate(_lines(path), 1):
        try:
            if text.strip():
                yield line, _parsed(label, line, text)
        except ValueError as error:
            bad.add(error, label)


def _parsed(label: str, line: int, text: str):
    """Return the value of a text that begins in `line` of its file."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        problem = "nested too deep"
    except ValueError as error:  # bad syntax, a key twice, or a number of 5,000 digits
        line += getattr(error, "lineno", 1) - 1
        problem = getattr(error, "msg", None) or first_line(error)
    raise ValueError(f"{label}: line {line} is not valid JSON: {problem}")


def _object(pairs: list[tuple[str, object]]) -> dict:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice} twice")
    return value


def _csv_rows(label: str, path: Path, bad: BadRows) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a table of text. Every value is the text in the file, such as 07, NA or
    None; an empty one is None. Columns without a name, such as an index, are left out."""
    csv.field_size_limit(sys.maxsize)
    rows = filter(None, csv.reader(_lines(path), delimiter=SEPARATORS[path.suffix], strict=True))
    columns = next(rows, [])
    if not columns:
        raise ValueError(f"{label}: cannot be read: it is empty")
    if twice := [column for column in columns if column and columns.count(column) > 1]:
        raise ValueError(f"{label}: two columns have the name {twice[0]}")
    for number, row in enumerate(rows, 1):
        if len(row) == len(columns):
            values = zip(columns, row, strict=True)
            yield number, {column: value or None for column, value in values if column}
        else:
            problem = f"row {number} has {len(row)} values for {len(columns)} columns"
            bad.add(ValueError(f"{label}: {problem}"), label)


def _parquet_rows(label: str, path: Path, bad: BadRows) -> Iterator[tuple[int, dict]]:
    """Yield the rows of a table with types."""
    from pyarrow import parquet

    batches = parquet.ParquetFile(path).iter_batches()
    return enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)


# ---- the library `datasets` ----


def _saved_shards(label: str, folder: Path, split: str) -> list[Shard] | None:
    """Open a split that `save_to_disk` of a `Dataset` or `DatasetDict` wrote; None without it."""
    import datasets

    saved = _loaded(label, datasets.load_from_disk, str(folder))
    splits = saved if isinstance(saved, datasets.DatasetDict) else dict(train=saved)
    if split not in splits:
        return None
    return [partial(_table_rows, label, f"{folder}/{split}", splits[split], {})]


def _hub_shards(
    label: str, dataset: str, split: str, config: str | None, streaming: bool
) -> list[Shard] | None:
    """Open a split of a hub dataset, None without the split. The configuration `*` is all of them,
    by name in the column `config`; the default one is `main` where several exist, as in
    openai/gsm8k."""
    import datasets

    is_all = config == "*"
    shards = []
    for name in _loaded(label, datasets.get_dataset_config_names, dataset) if is_all else [config]:
        task = (label, datasets.load_dataset, dataset)
        options = dict(split=split, streaming=streaming)
        try:
            table = _loaded(*task, name, **options)
        except ValueError as error:
            if name is not None or "'main'" not in str(error.__cause__):
                raise
            table = _loaded(*task, "main", **options)
        if table is None:
            continue
        place = "/".join(filter(None, (dataset, name, split)))
        columns = dict(config=name) if is_all else {}
        count = table.num_shards if streaming else 1
        for i in range(count):
            part, whole = (table.shard(count, i), f"{place}/{i}") if count > 1 else (table, place)
            shards.append(partial(_table_rows, label, whole, part, columns))
    return shards or None


def _loaded(label: str, load: Callable, *names: str | None, **options):
    """Return the result of a function of `datasets`, without progress bars and warnings; None
    without the split."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    try:
        return load(*names, **options)
    except Exception as error:  # of the disk, the network, the hub, pyarrow or datasets
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        is_missing = isinstance(error, OSError) and load is not datasets.load_from_disk
        missing = "no such file or folder, and not found on the hub: " if is_missing else ""
        raise ValueError(f"{label}: {missing}{first_line(error)}") from error


def _table_rows(label: str, name: str, table, columns: dict, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset`, with images as bytes, and with
    further `columns`."""
    import datasets

    try:
        is_whole = isinstance(table, datasets.Dataset)
        for row in _numbered(name, table.to_list() if is_whole else table.decode(False), bad):
            yield row | columns
    except Exception as error:  # of the disk, the network, pyarrow or datasets
        problem = first_line(error.__cause__ or error)
        raise ValueError(f"{label}: cannot be read: {problem}") from error
