"""A dataset by name -> its rows: JSON, tables, folders, the hub, built-in tasks.

A row has its place in `_source`: the line of a file (`train.jsonl:17`) or the number in a table."""

import csv
import glob
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from common.config.extra import load_named
from common.config.flags import JSON, SEPARATORS, kind_of
from common.parallel import distributed
from common.parallel.distributed import first_line

KINDS = ".jsonl, .json (these also as .gz or .zst), .parquet, .csv or .tsv"
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
            if not isinstance(self.content, Path):
                is_list = isinstance(self.content, list)
                numbered = enumerate(self.content if is_list else _table_rows(self.content), 1)
            elif kind_of(self.content) in JSON:
                numbered = _json_rows(self.label, self.content, bad)
            elif kind_of(self.content) in SEPARATORS:
                numbered = _csv_rows(self.label, self.content, bad)
            else:
                numbered = enumerate(_parquet_rows(self.content), 1)
            for number, row in numbered:
                place = f"{self.name}:{number}"
                if isinstance(row, dict):
                    own = {column: row[column] for column in row if column not in ADDED_COLUMNS}
                    for column in self.classes.keys() & own:
                        own[column] = _value(own[column], self.classes[column])
                    yield own | self.columns | dict(_source=place)
                else:
                    bad.add(ValueError(f"{self.label}: {place} is not an object"), self.label)
        except Exception as error:  # the disk, the network, csv, pyarrow and datasets raise others
            if str(error).startswith(self.label):
                raise
            problem = first_line(error.__cause__ or error)
            raise ValueError(f"{self.label}: cannot be read: {problem}") from error


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
        table = _saved_splits(label, path).get(split)
        return None if table is None else [Shard(label, f"{path}/{split}", table)]
    classes: dict = {}
    if os.path.isdir(path):
        card = _card(label, path, config)
        files = _files_of_folder(label, path, split, card)
        classes = card.classes
        names = [str(file.relative_to(path)) for file in files]
    elif files := files_named(dataset):
        files = files if split == "train" else []
        names = [file.name for file in files]
    elif _is_name_of_file(dataset):
        raise ValueError(f"{label}: no such file")
    else:
        return _hub_shards(label, dataset, split, config, streaming)
    for file in files:
        if not kind_of(file):
            raise ValueError(f"{flag} {file}: expected a {KINDS} file")
        _require_regular(f"{flag} {file}", file)
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
        return [*_saved_splits(label, path)]
    if os.path.isdir(path):
        return [*_splits_of_folder(label, path, _card(label, path, config))]
    if files_named(dataset) or _is_name_of_file(dataset):
        return ["train"]
    return _hub_splits(label, dataset, config)


def _is_name_of_file(dataset: str) -> bool:
    is_path = dataset.startswith((".", "/", "~")) or glob.escape(dataset) != dataset
    return is_path or bool(kind_of(Path(dataset)))


def files_named(dataset: str) -> list[Path]:
    """Return the file, or the files that match a pattern, sorted; none for a folder."""
    path = Path(os.path.expanduser(dataset))
    names = [path] if os.path.lexists(path) else sorted(glob.glob(str(path), recursive=True))
    files = map(Path, names)
    return [file for file in files if not file.is_dir() or (kind_of(file) and file != path)]


def _require_regular(label: str, file: Path) -> None:
    """Raise `ValueError` for a folder, a pipe, a device or a broken link: reading from it may have
    no end."""
    if not file.is_file():
        raise ValueError(f"{label}: not a regular file")


# ---- folders ----


class Card(NamedTuple):
    """What README.md of a folder says about a configuration."""

    folder: str = ""  # of its files
    files: dict[str, list[str]] | None = None  # patterns of each split; None: names decide
    classes: dict = {}  # see Shard


def _files_of_folder(label: str, folder: Path, split: str, card: Card) -> list[Path]:
    """Return the files of a split. Raises `ValueError` for a file that is in two splits, and for
    files of several kinds."""
    from datasets.data_files import SPLIT_KEYWORDS

    splits = _splits_of_folder(label, folder, card)
    if split not in splits:  # dev is validation
        words = SPLIT_KEYWORDS.items()
        split = next((str(name) for name, others in words if split in others), split)
    own = splits.pop(split, [])
    for other, files in splits.items():
        if shared := {*own} & {*files}:
            file = min(shared).relative_to(folder)
            problem = f"{file} belongs to the splits {split} and {other}"
            advice = "rename it, or name files with --dataset and --eval_dataset"
            raise ValueError(f"{label}: {problem}; {advice}")
    kinds = sorted({f".{kind_of(file).split('.')[1]}" for file in own})
    if len(kinds) > 1:  # often the same rows twice
        raise ValueError(f"{label}: {' and '.join(kinds)} files; name one kind by a pattern")
    return own


def _splits_of_folder(label: str, folder: Path, card: Card) -> dict[str, list[Path]]:
    """Return the files of each split by the rules of `datasets`: those that README.md lists, else
    by names such as `math_train/` or `test_2.jsonl`; without them, all are train. Raises
    `ValueError` for a folder without files that can be read."""
    from datasets import data_files

    for file in folder.rglob("*"):  # `datasets` would leave out what is no file
        name = file.relative_to(folder)
        if kind_of(file) and not file.is_dir() and not any(part[0] == "." for part in name.parts):
            _require_regular(f"{label}: {name}", file)
    root = os.path.abspath(folder)
    base = glob.escape(os.path.join(root, card.folder))
    kinds = [".jsonl", ".json", *SEPARATORS, ".parquet"]
    splits: dict[str, list[str]] = {}
    if card.files is None:
        try:
            patterns = data_files.get_data_patterns(base)
        except data_files.EmptyDatasetError:
            patterns = {}
        found = data_files.DataFilesDict.from_patterns(patterns, base, kinds)
        splits = {str(name): sorted({*files}) for name, files in found.items()}
    else:
        for name, patterns in card.files.items():
            splits[name] = []
            for pattern in patterns:
                try:
                    if "://" in pattern:  # not in this folder
                        raise FileNotFoundError
                    splits[name] += data_files.resolve_pattern(pattern, base, kinds)
                except FileNotFoundError:
                    problem = f"README.md lists {pattern}: no {KINDS} file of this name in it"
                    raise ValueError(f"{label}: {problem}") from None
    if not any(splits.values()):
        raise ValueError(f"{label}: no {KINDS} files with a split in it")
    names = {
        split: [os.path.relpath(file, root) for file in dict.fromkeys(files)]
        for split, files in splits.items()
    }
    for name in chain.from_iterable(names.values()):
        if Path(name).parts[0] == "..":
            raise ValueError(f"{label}: README.md lists {name}, which is outside of the folder")
    return {split: [folder / name for name in names[split]] for split in names}


def _card(label: str, folder: Path, config: str | None) -> Card:
    """Read README.md about the configuration `config`, by default its default one or `main`."""
    from datasets.data_files import sanitize_patterns
    from datasets.info import DatasetInfosDict
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard, DatasetCardData, logging

    logging.set_verbosity_error()  # not a warning of a page without metadata
    readme, further = folder / "README.md", folder / ".huggingface.yaml"
    try:
        data = DatasetCard.load(readme).data if readme.is_file() else DatasetCardData()
        if further.is_file():
            data = DatasetCardData(**data.to_dict() | yaml.safe_load(further.read_text("utf-8")))
        configs = MetadataConfigs.from_dataset_card_data(data)
        infos = DatasetInfosDict.from_dataset_card_data(data)
        name = config or configs.get_default_config_name()
        name = name or (next(iter(infos)) if len(infos) == 1 and not configs else "main")
        features = infos[name].features if name in infos else None
        classes = {
            column: kind for column, kind in (features or {}).items() if "ClassLabel" in repr(kind)
        }
        if not configs:
            return Card(classes=classes)
        if name not in configs:
            problem = f"has the configurations {', '.join(configs)}"
            raise ValueError(f"{problem}; name one with --dataset_config")
        chosen = configs[name]
        read = {"data_files", "data_dir", "default", "description", "version"}
        if unread := chosen.keys() - read:
            problem = f"the configuration {name} has {', '.join(sorted(unread))}"
            raise ValueError(f"{problem}; name its files with --dataset and --eval_dataset")
        listed = chosen.get("data_files")
        return Card(chosen.get("data_dir") or "", listed and sanitize_patterns(listed), classes)
    except Exception as error:  # no text, no YAML, or values of other types
        problem = getattr(error, "problem", None) or first_line(error)
        raise ValueError(f"{label}: README.md: {problem}") from error


# ---- files ----


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
    with _opened(path) as stream:
        parts = (part.lstrip() for part in iter(lambda: stream.read(10_000), ""))
        start = next(filter(None, parts), "")
    if start.startswith("["):
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


def _parquet_rows(path: Path) -> Iterator[dict]:
    import pyarrow
    from datasets import Features
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    maps = None
    try:
        kinds = dict(Features.from_arrow_schema(file.schema_arrow))
    except ValueError:  # `datasets` knows no maps
        maps = "strict"  # as objects; slower
        kinds = {}
        for field in file.schema_arrow:
            with suppress(ValueError):
                kinds |= Features.from_arrow_schema(pyarrow.schema([field]))
    for batch in file.iter_batches():
        yield from _shown(batch.to_pylist(maps_as_pydicts=maps), kinds)


# ---- the library `datasets` ----


def _table_rows(table) -> Iterator[dict]:
    """Yield the rows of a `Dataset`, or of an `IterableDataset` as it reads them."""
    import datasets

    if isinstance(table, datasets.Dataset):
        for batch in table.with_format("arrow").iter(1000):
            yield from _shown(batch.to_pylist(), table.features)
    else:
        yield from _shown(table, table.features or {})


def _shown(rows: Iterable[dict], kinds: dict) -> Iterator[dict]:
    """Yield rows with the values that the author of the table sees, see `_value`."""
    same = {name for name, kind in kinds.items() if _is_shown_as_stored(kind)}
    for row in rows:
        changed = {name: _value(row[name], kinds.get(name)) for name in row if name not in same}
        yield row | changed if changed else row


def _is_shown_as_stored(kind: object) -> bool:
    import datasets

    if isinstance(kind, dict):
        return all(map(_is_shown_as_stored, kind.values()))
    if isinstance(kind, datasets.List | datasets.LargeList):
        return _is_shown_as_stored(kind.feature)
    others = ("float16", "float32", "date", "time", "duration", "decimal")
    return isinstance(kind, datasets.Value) and not kind.dtype.startswith(others)


def _value(value: object, kind: object) -> object:
    """Return a value of a type of `datasets`: the name of a class, None for -1, 0.1 if it is the
    nearest to 0.10000000149 in 32 bits, and a date, a time or a decimal as text."""
    import datasets

    if isinstance(value, dict):
        kinds = kind if isinstance(kind, dict) else {}
        return {name: _value(member, kinds.get(name)) for name, member in value.items()}
    if isinstance(value, list):
        kind = getattr(kind, "feature", None)
        return [_value(member, kind) for member in value]
    if isinstance(kind, datasets.ClassLabel) and value is not None:
        number = kind.str2int(value) if isinstance(value, str) else value
        return None if number == -1 else kind.int2str(number)
    if isinstance(value, str | None):
        return json.loads(value) if value and isinstance(kind, datasets.Json) else value
    if isinstance(value, float) and getattr(kind, "dtype", None) in ("float16", "float32"):
        return float(str(np.dtype(kind.dtype).type(value)))
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    return value


def _is_saved(folder: Path) -> bool:
    # unlike Path.is_file, also of names that are too long
    return any(os.path.isfile(folder / name) for name in ("dataset_dict.json", "state.json"))


def _saved_splits(label: str, folder: Path) -> dict:
    """Return the splits that `save_to_disk` of a `Dataset` or `DatasetDict` wrote."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the disk, pyarrow and datasets raise others
        raise ValueError(f"{label}: {first_line(error)}") from error
    return saved if isinstance(saved, datasets.DatasetDict) else dict(train=saved)


def _hub_shards(
    label: str, dataset: str, split: str, config: str | None, streaming: bool
) -> list[Shard] | None:
    """Open a split of a hub dataset, None without the split; images are bytes. The configuration
    `*` means all of them; a column `config` has their names."""

    shards = []
    with _hub(label):
        for name in _hub_configs(dataset, config):
            table = _hub_table(dataset, name, split, streaming)
            if table is None:
                continue
            place = "/".join(filter(None, (dataset, name, split)))
            columns = dict(config=name) if config == "*" else {}
            if streaming:
                for i in range(count := table.num_shards):
                    part = table.shard(count, i)
                    part = part.decode(False) if part.features else part
                    whole = f"{place}/{i}" if count > 1 else place
                    shards.append(Shard(label, whole, part, columns))
            else:
                shards.append(Shard(label, place, table, columns))
    return shards or None


def _hub_splits(label: str, dataset: str, config: str | None) -> list[str]:
    import datasets

    splits: dict[str, None] = {}
    with _hub(label):
        for name in _hub_configs(dataset, config):
            try:
                found = datasets.get_dataset_split_names(dataset, name)
            except ValueError as error:
                if name is None and "'main'" in str(error):  # see _hub_table
                    found = datasets.get_dataset_split_names(dataset, "main")
                else:
                    raise
            splits |= dict.fromkeys(found)
    return [*splits]


@contextmanager
def _hub(label: str) -> Iterator[None]:
    """Silence the libraries of the hub, and turn what they raise into `ValueError`."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # the disk, the network, the hub, pyarrow and datasets raise others
        found = isinstance(error, FileNotFoundError)  # others: the hub has not answered
        on_hub = "not found on the hub" if found else "the hub cannot be reached"
        missing = f"no such file or folder, and {on_hub}: " if isinstance(error, OSError) else ""
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            error = error.__cause__ or error  # its own message is only that it happened
        raise ValueError(f"{label}: {missing}{first_line(error)}") from error


def _hub_configs(dataset: str, config: str | None) -> list[str | None]:
    import datasets

    return datasets.get_dataset_config_names(dataset) if config == "*" else [config]


def _hub_table(dataset: str, config: str | None, split: str, streaming: bool):
    """Return a split of a hub dataset, None without the split. The default configuration is `main`
    where several exist, as in openai/gsm8k."""
    import datasets

    try:
        return datasets.load_dataset(dataset, config, split=split, streaming=streaming)
    except ValueError as error:
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        if config is None and "'main'" in str(error):
            return _hub_table(dataset, "main", split, streaming)
        raise
