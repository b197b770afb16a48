"""What `--dataset` may name beside the built-in tasks: files, folders, the hub -> rows.

A row of a file says in `_source` where it stands: `train.jsonl:17`.
"""

import contextlib
import glob
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

from common.data.tasks import TASKS
from common.parallel import distributed

# What files may be: an object per line, one value, tables.
LINES, WHOLE = (".jsonl", ".jsonl.gz", ".jsonl.zst"), (".json", ".json.gz", ".json.zst")
TABLES = (".parquet", ".arrow", ".csv")
KINDS = ".jsonl, .json (these also as .gz or .zst), .parquet, .arrow or .csv"


class BadRows:
    """Rows that cannot be used, by `--on_bad_row`: the first ends the run, or they are left out and counted."""

    gathered: ClassVar[list[dict[str, list[str]]] | None] = None
    """what would have been told, within `untold_bad_rows`"""

    def __init__(self, on_bad_row: str):
        self.skip = on_bad_row == "skip"
        self.found: dict[str, list[str]] = {}
        """what is wrong with each, by what that is apart from numbers"""

    def add(self, error: ValueError, where: str) -> None:
        """Raises `error` unless it is about the row at `where`, and such rows are left out."""
        if not self.skip or not str(error).startswith(where):
            raise error
        self.found.setdefault(re.sub(r"\d+", "N", str(error).removeprefix(where)), []).append(str(error))

    def tell(self) -> None:
        """A line for each kind, by rank 0."""
        if BadRows.gathered is not None:
            BadRows.gathered.append(self.found)
            return
        for errors in self.found.values() if distributed.is_main() else ():
            print(f"--on_bad_row skip: {len(errors)} left out, such as {errors[0]}", flush=True)


@contextlib.contextmanager
def untold_bad_rows() -> Iterator[list[dict[str, list[str]]]]:
    """For a while nothing is told, as it is of a part of the rows or another process speaks: here is what it was."""
    BadRows.gathered = []
    try:
        yield BadRows.gathered
    finally:
        BadRows.gathered = None


def kind_of(path: Path) -> str:
    """The end of a name that says what the file is; nothing for those that we cannot read."""
    return next((kind for kind in (*LINES, *WHOLE, *TABLES) if path.name.endswith(kind)), "")


def files_of(path: Path) -> list[Path]:
    """The file, or those that it stands for as a glob, sorted; none if it is a folder or not there."""
    if path.exists():
        return [path] if path.is_file() else []
    return [file for name in sorted(glob.glob(str(path), recursive=True)) if (file := Path(name)).is_file()]


def _text(flag: str, path: Path) -> str:
    try:
        if path.suffix not in (".gz", ".zst"):
            return path.read_text(encoding="utf-8")
        import pyarrow

        with pyarrow.input_stream(str(path), compression="detect") as stream:  # by the name
            return stream.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: {distributed.first_line(error)}") from error


def read_file(flag: str, path: Path, bad: BadRows) -> list[dict]:
    if not (kind := kind_of(path)):
        raise ValueError(f"{flag} {path}: expected a {KINDS} file")
    if kind in TABLES:
        rows = _with_datasets(f"{flag} {path}", kind[1:], data_files=glob.escape(str(path)), split="train").to_list()
        return [row | {"_source": f"{path.name}:{number}"} for number, row in enumerate(rows, 1)]
    text = _text(flag, path)
    # not splitlines(): it also breaks at U+2028, which JSON strings may hold
    return list(_parsed(flag, path, [text] if kind in WHOLE else text.split("\n"), bad))


def _parsed(flag: str, path: Path, lines: Iterable[str], bad: BadRows) -> Iterator[dict]:
    kind = kind_of(path)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            where = f"{flag} {path}: line {number + error.lineno - 1} is not valid JSON"
            problem = ValueError(f"{where}: {error.msg}")
            if kind in WHOLE:
                raise problem from error
            bad.add(problem, where)
            continue
        items = value if kind in WHOLE and isinstance(value, list) else [value]
        for place, item in enumerate(items, number):
            where = f"{path.name}:{place}"
            if isinstance(item, dict):
                yield item | {"_source": where}
            else:
                where = f"{flag} {path}: {where}"
                bad.add(ValueError(f"{where} is not an object"), where)


def read_folder(flag: str, folder: Path, split: str, bad: BadRows) -> list[dict] | None:
    """`train.jsonl`, `train-00000-of-00002.parquet`, ... ; a folder whose files name no split is all `train`."""
    if _is_saved(folder):
        saved = _read_saved(flag, folder, split)
        return None if saved is None else saved.to_list()
    return [row for f in _of_split(flag, folder, split) for row in read_file(flag, f, bad)] or None


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _of_split(flag: str, folder: Path, split: str) -> list[Path]:
    files = sorted(f for f in folder.rglob("*") if kind_of(f))
    if not files:
        raise ValueError(f"{flag} {folder}: no {KINDS} files in it")
    named = [f for f in files if f.stem.split("-")[0].split(".")[0] in ("train", "test", "validation", "eval", split)]
    if named:
        return [f for f in files if f.stem.split("-")[0].split(".")[0] == split]
    return files if split == "train" else []


def _read_saved(flag: str, folder: Path, split: str):
    """A `datasets.Dataset`, what `save_to_disk` of a `datasets.Dataset` or `DatasetDict` has left."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {folder}: cannot be read: {distributed.first_line(error)}") from error
    if not isinstance(saved, datasets.DatasetDict):
        saved = dict(train=saved)
    return saved[split] if split in saved else None


def read_hub(flag: str, dataset: str, split: str, config: str | None) -> list[dict] | None:
    found = _from_hub(flag, dataset, split, config)
    return None if found is None else found.to_list()


@cache  # of files that are mapped: nothing is held in memory
def _from_hub(flag: str, dataset: str, split: str, config: str | None, streaming: bool = False):
    try:
        return _with_datasets(f"{flag} {dataset}", dataset, config, split=split, streaming=streaming)
    except ValueError as error:  # openai/gsm8k and others have several configurations, `main` being the usual one
        if config is None and "Config name is missing" in str(error) and "'main'" in str(error.__cause__):
            return _with_datasets(f"{flag} {dataset}", dataset, "main", split=split, streaming=streaming)
        raise


def _with_datasets(what: str, *where, split: str, **options):
    """A `datasets.Dataset`, or with `streaming` an `IterableDataset`; None if there is no such split."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from pyarrow import ArrowException

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is raised, and said once
    huggingface_hub.logging.set_verbosity_error()
    try:
        return datasets.load_dataset(*where, split=split, **options)
    except (OSError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise ValueError(
            f"{what}: no such file or folder, and not found on the hub ({distributed.first_line(error)})"
        ) from error
    except (datasets.exceptions.DatasetsError, ArrowException) as error:
        raise ValueError(f"{what}: cannot be read: {distributed.first_line(error.__cause__ or error)}") from error
    except (ValueError, RuntimeError) as error:
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        raise ValueError(f"{what}: {distributed.first_line(error)}") from error  # e.g. a missing --dataset_config


def files_behind(flag: str, dataset: str, split: str, config: str | None) -> list[Path]:
    """The files that the rows of a split stand in, of a folder all that it has, of a hub data set those that `datasets`
    has made of it here. None for a built-in task and for what is not there or cannot be read."""
    path = Path(dataset).expanduser()
    if files := files_of(path):
        return files
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if kind_of(file))
    if dataset in TASKS or is_a_file(dataset):
        return []
    found = _from_hub(flag, dataset, split, config)
    return [] if found is None else [Path(file["filename"]) for file in found.cache_files]


# ---- rows as they come ----

Shard = Callable[[BadRows], Iterator[dict]]


def shards_of(flag: str, dataset: str, split: str, config: str | None) -> list[Shard]:
    """What the rows of a split stand in, to be read one after another: files, or the shards of a hub data set.

    Raises `ValueError` if there is no such data, or no such split.
    """
    path = Path(dataset).expanduser()
    what, name = f"{flag} {dataset}", f"{path.name if path.is_dir() else dataset}/{split}"
    files, rows = [], None
    if dataset in TASKS:
        raise ValueError(f"{what}: a built-in task is no stream")
    if path.is_dir() and not _is_saved(path):
        files = _of_split(flag, path, split)
    elif path.is_dir():
        rows = _read_saved(flag, path, split)
    elif found := files_of(path):
        files = found if split == "train" else []
    elif is_a_file(dataset):
        raise ValueError(f"{what}: no such file")
    else:
        rows = _from_hub(flag, dataset, split, config, streaming=True)
    if rows is None:
        if not files:
            raise ValueError(f"{what} has no split {split!r}: see --dataset_split")
        return [partial(_streamed, flag, file) for file in files]
    if (count := getattr(rows, "num_shards", 1)) == 1:
        return [partial(_named, what, name, rows)]
    return [partial(_named, what, f"{name}/{i}", rows.shard(num_shards=count, index=i)) for i in range(count)]


def is_a_file(dataset: str) -> bool:
    """Whether a name that nothing has is meant as that of files."""
    return bool(kind_of(Path(dataset))) or dataset.startswith((".", "/", "~")) or glob.escape(dataset) != dataset


def _streamed(flag: str, path: Path, bad: BadRows) -> Iterator[dict]:
    """The rows of a file. Raises `ValueError` as `read_file` does, when it comes to it."""
    if (kind := kind_of(path)) in TABLES:
        rows = _with_datasets(
            f"{flag} {path}", kind[1:], data_files=glob.escape(str(path)), split="train", streaming=True
        )
        return _named(f"{flag} {path}", path.name, rows, bad)
    if kind not in LINES:
        return iter(read_file(flag, path, bad))
    return _parsed(flag, path, _lines(flag, path), bad)


def _lines(flag: str, path: Path) -> Iterator[str]:
    import pyarrow

    try:
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            for line in io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8", newline="\n"):
                yield line.removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: {distributed.first_line(error)}") from error


def _named(what: str, name: str, rows: Iterable[dict], bad: BadRows) -> Iterator[dict]:
    import datasets
    from pyarrow import ArrowException

    try:
        for number, row in enumerate(rows, 1):
            yield row | {"_source": f"{name}:{number}"}
    except (OSError, datasets.exceptions.DatasetsError, ArrowException) as error:
        raise ValueError(f"{what}: cannot be read: {distributed.first_line(error.__cause__ or error)}") from error
