"""Rows of tables: text (.csv, .tsv), files with types (.parquet, .arrow), and datasets of
`save_to_disk` and of the hub."""

import csv
import glob
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from common.data.files import LONGEST, BadRows, Shard, number_rows, texts
from common.parallel import distributed


def csv_rows(label: str, path: Path, separator: str, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a table of text. Every value is the text in the file, such as 07, NA or
    None; an empty one is None. Columns without a name, such as an index, are left out."""
    csv.field_size_limit(LONGEST)
    lines = (f"{text}\n" for text in texts(label, path, is_whole=False))
    rows = (row for row in csv.reader(lines, delimiter=separator, strict=True) if row)
    try:
        names = next(rows, [])
        if not names:
            raise ValueError(f"{label}: cannot be read: it is empty")
        for name in names:
            if name and names.count(name) > 1:
                raise ValueError(f"{label}: two columns have the name {name}")
        for number, row in enumerate(rows, 1):
            source = f"{path.name}:{number}"
            if len(row) != len(names):
                problem = f"{source} has {len(row)} values for {len(names)} columns"
                bad.add(ValueError(f"{label}: {problem}"), label)
                continue
            columns = zip(names, row, strict=True)
            yield {name: value or None for name, value in columns if name} | {"_source": source}
    except csv.Error as error:
        raise _unreadable(label, error) from error


def file_rows(label: str, path: Path, kind: str, streaming: bool, bad: BadRows) -> Iterator[dict]:
    """Return the rows of a file with types."""
    file = glob.escape(str(path))
    table = _load(label, kind[1:], data_files=file, split="train", streaming=streaming)
    return _rows(label, path.name, table, bad)


def is_saved(folder: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_shards(label: str, folder: Path, split: str) -> list[Shard] | None:
    """Open a split that `save_to_disk` of a `Dataset` or `DatasetDict` wrote; None without it."""
    import datasets

    try:
        saved = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise _unreadable(label, error) from error
    splits = saved if isinstance(saved, datasets.DatasetDict) else dict(train=saved)
    return _shards(label, f"{folder.name}/{split}", splits.get(split))


@cache  # memory-mapped files: the rows are not held in memory
def hub_shards(
    label: str, dataset: str, split: str, config: str | None, streaming: bool
) -> list[Shard] | None:
    """Open a split of a hub dataset, None without the split. The default configuration is `main`
    where several exist, as in openai/gsm8k; `*` is all of them, by name in the column `config`."""
    if config == "*":
        return _shards_of_all(label, dataset, split, streaming)
    try:
        table = _load(label, dataset, config, split=split, streaming=streaming)
    except ValueError as error:
        lacks_name = config is None and "Config name is missing" in str(error)
        if not lacks_name or "'main'" not in str(error.__cause__):
            raise
        table = _load(label, dataset, "main", split=split, streaming=streaming)
    return _shards(label, f"{dataset}/{split}", table)


def _shards_of_all(label: str, dataset: str, split: str, streaming: bool) -> list[Shard] | None:
    """Open the split in all configurations of a hub dataset that have it."""
    shards = []
    for config in _load(label, dataset, function="get_dataset_config_names"):
        table = _load(label, dataset, config, split=split, streaming=streaming)
        for shard in _shards(label, f"{dataset}/{config}/{split}", table) or ():
            shards.append(Shard(partial(_rows_with_config, config, shard), shard.files))
    return shards or None


def _rows_with_config(config: str, shard: Shard, bad: BadRows) -> Iterator[dict]:
    for row in shard.read(bad):
        yield row | dict(config=config)


def quiet_datasets():
    """Import the library `datasets` without progress bars and warnings. Its errors are raised."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    return datasets


def _load(label: str, *path: str | None, function: str = "load_dataset", **options):
    """Return a `datasets.Dataset`, or an `IterableDataset` with `streaming`; None without the
    split. With another `function` of `datasets`, return its result."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from pyarrow import ArrowException

    datasets = quiet_datasets()
    try:
        return getattr(datasets, function)(*path, **options)
    except (OSError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        problem = "no such file or folder, and not found on the hub"
        raise ValueError(f"{label}: {problem} ({distributed.first_line(error)})") from error
    except (datasets.exceptions.DatasetsError, ArrowException) as error:
        raise _unreadable(label, error) from error
    except (ValueError, RuntimeError) as error:
        if "Unknown split" in str(error) or "Bad split" in str(error):
            return None
        # e.g. a missing --dataset_config
        raise ValueError(f"{label}: {distributed.first_line(error)}") from error


def _shards(label: str, name: str, table) -> list[Shard] | None:
    """Return one shard for a table on disk, and all shards of a streamed one."""
    if table is None:
        return None
    count = getattr(table, "num_shards", 1)
    if count > 1:
        tables = [table.shard(num_shards=count, index=i) for i in range(count)]
        return [Shard(partial(_rows, label, f"{name}/{i}", part)) for i, part in enumerate(tables)]
    files = tuple(Path(file["filename"]) for file in getattr(table, "cache_files", ()))
    return [Shard(partial(_rows, label, name, table), files)]


def _rows(label: str, name: str, table, bad: BadRows) -> Iterator[dict]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset`. Raises `ValueError` if it is
    damaged."""
    import datasets
    from pyarrow import ArrowException

    try:
        is_whole = isinstance(table, datasets.Dataset)
        # images as bytes in both, not as pictures
        rows = table.to_list() if is_whole else table.decode(False)
        yield from number_rows(name, rows)
    except (OSError, datasets.exceptions.DatasetsError, ArrowException) as error:
        raise _unreadable(label, error) from error


def _unreadable(label: str, error: Exception) -> ValueError:
    return ValueError(
        f"{label}: cannot be read: {distributed.first_line(error.__cause__ or error)}"
    )
