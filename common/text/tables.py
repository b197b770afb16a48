"""Tables of the library `datasets`: from the hub, saved with `save_to_disk`, or in .parquet files,
with values as their authors see them."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow
from datasets.exceptions import DatasetGenerationError
from pyarrow import parquet

from common.parallel.distributed import first_line

# ---- the hub ----


def hub_tables(
    label: str, dataset: str, split: str, config: str | None, streaming: bool
) -> list[tuple[str, Iterable, dict]]:
    """Open a split of a hub dataset: for each table the place of its rows, the table, and further
    columns; nothing without the split. Images are bytes. The configuration `*` means all of them; a
    column `config` has their names."""
    found: list[tuple[str, Iterable, dict]] = []
    with _hub(label):
        for name in _configs(dataset, config):
            table = _table(dataset, name, split, streaming)
            if table is None:
                continue
            place = "/".join(filter(None, (dataset, name, split)))
            columns = dict(config=name) if config == "*" else {}
            parts = _parts(table) if streaming else [table]
            for i, part in enumerate(parts):
                found.append((f"{place}/{i}" if len(parts) > 1 else place, part, columns))
    return found


def hub_splits(label: str, dataset: str, config: str | None) -> list[str]:
    with _hub(label):
        load = partial(datasets.get_dataset_split_names, dataset)
        splits = chain(*(_or_main(load, name) for name in _configs(dataset, config)))
        return [*dict.fromkeys(splits)]


@contextmanager
def _hub(label: str) -> Iterator[None]:
    """Silence the libraries of the hub, and turn what they raise into `ValueError`."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    huggingface_hub.logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # the disk, the network, the hub, pyarrow and datasets raise others
        has_answered = isinstance(error, FileNotFoundError)
        on_hub = "not found on the hub" if has_answered else "the hub cannot be reached"
        missing = f"no such file or folder, and {on_hub}: " if isinstance(error, OSError) else ""
        if isinstance(error, DatasetGenerationError):
            error = error.__cause__ or error  # its own message is only that it happened
        raise ValueError(f"{label}: {missing}{first_line(error)}") from error


def _configs(dataset: str, config: str | None) -> list[str | None]:
    return datasets.get_dataset_config_names(dataset) if config == "*" else [config]


def _table(dataset: str, config: str | None, split: str, streaming: bool):
    """Return a split of a hub dataset, None without the split."""
    load = partial(datasets.load_dataset, dataset, split=split, streaming=streaming)
    try:
        return _or_main(load, config)
    except ValueError as error:
        if _lacks_split(error):
            return None
        raise


def _or_main(load: Callable, config: str | None):
    """Load a configuration. The default is `main` where several exist, as in openai/gsm8k."""
    try:
        return load(config)
    except ValueError as error:
        if config is None and "'main'" in str(error) and not _lacks_split(error):
            return load("main")
        raise


def _lacks_split(error: ValueError) -> bool:
    return "Unknown split" in str(error) or "Bad split" in str(error)


def _parts(table: datasets.IterableDataset) -> list[datasets.IterableDataset]:
    """Return the shards of a table that is streamed."""
    parts = [table.shard(table.num_shards, i) for i in range(table.num_shards)]
    return [part.decode(False) if part.features else part for part in parts]


# ---- on the disk ----


def saved_splits(label: str, folder: Path) -> dict:
    """Return the splits that `save_to_disk` of a `Dataset` or `DatasetDict` wrote."""
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:  # the disk, pyarrow and datasets raise others
        raise ValueError(f"{label}: {first_line(error)}") from error
    return saved if isinstance(saved, datasets.DatasetDict) else dict(train=saved)


def parquet_rows(path: Path) -> Iterator[dict]:
    file = parquet.ParquetFile(path)
    maps = None
    try:
        kinds = dict(datasets.Features.from_arrow_schema(file.schema_arrow))
    except ValueError:  # `datasets` knows no maps
        maps = "strict"  # as objects; slower
        kinds = {}
        for field in file.schema_arrow:
            with suppress(ValueError):
                kinds |= datasets.Features.from_arrow_schema(pyarrow.schema([field]))
    for batch in file.iter_batches():
        yield from shown_rows(batch.to_pylist(maps_as_pydicts=maps), kinds)


# ---- rows and values ----


def table_rows(table) -> Iterator[dict]:
    """Yield the rows of a `Dataset`, or of an `IterableDataset` as it reads them."""
    if isinstance(table, datasets.Dataset):
        for batch in table.with_format("arrow").iter(1000):
            yield from shown_rows(batch.to_pylist(), table.features)
    else:
        yield from shown_rows(table, table.features or {})


def shown_rows(rows: Iterable[dict], kinds: dict) -> Iterator[dict]:
    """Yield rows with the values that the author of the table sees, see `shown_value`."""
    same = {name for name, kind in kinds.items() if _is_shown_as_stored(kind)}
    for row in rows:
        changed = {
            name: shown_value(row[name], kinds.get(name)) for name in row if name not in same
        }
        yield row | changed if changed else row


def _is_shown_as_stored(kind: object) -> bool:
    if isinstance(kind, dict):
        return all(map(_is_shown_as_stored, kind.values()))
    if isinstance(kind, datasets.List | datasets.LargeList):
        return _is_shown_as_stored(kind.feature)
    others = ("float16", "float32", "date", "time", "duration", "decimal")
    return isinstance(kind, datasets.Value) and not kind.dtype.startswith(others)


def shown_value(value: object, kind: object) -> object:
    """Return a value of a type of `datasets`: the name of a class, None for -1, 0.1 if it is the
    nearest to 0.10000000149 in 32 bits, and a date, a time or a decimal as text."""
    if isinstance(value, dict):
        kinds = kind if isinstance(kind, dict) else {}
        return {name: shown_value(member, kinds.get(name)) for name, member in value.items()}
    if isinstance(value, list):
        kind = getattr(kind, "feature", None)
        return [shown_value(member, kind) for member in value]
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
