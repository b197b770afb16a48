"""Datasets -> training rows and held-out rows, and the columns that a script reads.

A row is a dict of the dataset's columns, `_source` (`train.jsonl:17`), which is in every error
about the row, and `_dataset` if metrics are split by dataset. Every rank reads all rows."""

import difflib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from common.config.groups import BaseArgs, TrainArgs
from common.config.specs import eval_sets_of, pairs_of, weights_of
from common.data.files import BadRows, files_of, kind_of
from common.data.shards import open_shards

T = TypeVar("T")
Columns = tuple[str, ...]  # names of those that a script reads together

# Columns of each kind of script. A script uses the first of its choices that the dataset has.
SFT_COLUMNS = (
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("text",),
    ("input", "output"),
)
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (("prompt", "completion", "label"),)
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # online scripts sample from these
ALIASES = dict(  # usual names of columns
    prompt=("question", "instruction", "problem", "query", "input"),
    messages=("conversations", "conversation"),
    completion=("answer", "response", "output", "solution", "target"),
)
OUR_COLUMNS = ("_source", "_dataset", "_folder", "_images")
EVAL_SIZE = 256  # default of --eval_size; of training rows at most a tenth is set aside


def encode_each(
    rows: list[dict], encode: Callable[[dict], T], on_bad_row: str
) -> Iterator[tuple[dict, T]]:
    """Yield each row with its encoded value. `encode` raises `ValueError` for a bad row. With
    `on_bad_row` error this ends the run; with skip the row is skipped and reported."""
    bad = BadRows(on_bad_row)
    for row in rows:
        try:
            value = encode(row)
        except (ValueError, RecursionError) as error:
            if isinstance(error, RecursionError):
                error = ValueError(f"{row['_source']}: a value is nested too deeply")
            bad.add(error, row["_source"])
        else:
            yield row, value
    bad.report()


# ---- datasets by name ----


def sources_of(datasets: Sequence[str]) -> dict[str, tuple[list[str], float]]:
    """Return the sources that training rows are drawn from, by name in metrics, with their datasets
    and weights. Datasets with weights are a source each. Datasets without weights form one source
    without a name."""
    weights = weights_of(datasets)
    if len(weights) == 1 or None in weights.values():
        return {"": (list(weights), 1.0)}
    return {
        name: ([dataset], weights[dataset])
        for name, dataset in datasets_by_name(dict.fromkeys(weights)).items()
    }


def datasets_by_name(datasets: dict[str, str | None]) -> dict[str, str]:
    """Return datasets by their names in metrics, given datasets with their optional names. The
    default name is the last part of the path, or the whole path where last parts are not unique."""
    names = []
    for dataset, name in datasets.items():
        path = Path(dataset)
        names.append(name or path.name.removesuffix(kind_of(path)))
    if len(set(names)) < len(names) or not all(names):
        names = [name or dataset for dataset, name in datasets.items()]
    return dict(zip(names, datasets, strict=True))


def split_of(dataset: str, split: str) -> str:
    """Return `split`, or `train` for a file, which has no other."""
    return "train" if files_of(Path(dataset).expanduser()) else split


# ---- reading ----


def load_rows(
    flag: str,
    dataset: str,
    split: str,
    config: str | None = None,
    columns: Sequence[str] = (),
    on_bad_row: str = "error",
) -> list[dict] | None:
    """Read all rows of a split; None if the dataset has no such split. `columns` and `on_bad_row`
    are the flags.

    Raises `ValueError` naming `flag`, the file or the row.
    """
    shards = open_shards(flag, dataset, split, config)
    if shards is None:
        return None
    bad = BadRows(on_bad_row)
    rows = list(chain.from_iterable(shard.rows(bad) for shard in shards))
    bad.report()
    label = f"{flag} {dataset}"
    if not rows:
        raise ValueError(f"{label}: {'every row was skipped' if bad.errors else 'no rows in it'}")
    return rename_columns(label, rows, columns)


def rows_of_split(
    flag: str,
    datasets: Sequence[str],
    split_flag: str,
    split: str,
    args: BaseArgs,
    whole_file: bool = False,
) -> list[dict]:
    """Read the rows of a split of several datasets; with `whole_file` all rows of files, whatever
    the split. Raises `ValueError` naming `split_flag` if a dataset has no such split."""
    rows: list[dict] = []
    if any(weights_of(datasets).values()):
        problem = "only the --dataset of training scripts takes weights"
        raise ValueError(f"{flag} {' '.join(datasets)}: {problem}")
    for dataset in datasets:
        name = split_of(dataset, split) if whole_file else split
        split_rows = _load_split(flag, dataset, name, args)
        if split_rows is None:
            raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
        rows += split_rows
    return rows


def _load_split(flag: str, dataset: str, split: str, args: BaseArgs) -> list[dict] | None:
    return load_rows(flag, dataset, split, args.dataset_config, args.columns, args.on_bad_row)


def rename_columns(data: str, rows: list[dict], columns: Sequence[str]) -> list[dict]:
    """Return rows with the columns renamed, given as new=old. Raises `ValueError` if no row has an
    old name, or if the data has a new name already."""
    old_names = pairs_of("columns", columns)
    if not old_names:
        return rows
    names = dict.fromkeys(name for name in chain.from_iterable(rows) if name not in OUR_COLUMNS)
    for new, old in old_names.items():
        if old not in names:
            problem = f"no column {old}; {data} has {', '.join(names)}"
            raise ValueError(f"--columns {new}={old}: {problem}")
        if new in OUR_COLUMNS or (new in names and new not in old_names.values()):
            raise ValueError(f"--columns {new}={old}: {data} has a column {new} already")
    renamed = []
    for row in rows:
        others = {name: value for name, value in row.items() if name not in old_names.values()}
        renamed.append(others | {new: row[old] for new, old in old_names.items() if old in row})
    return renamed


# ---- training and held-out rows ----


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """Read the training rows and at most `--eval_size` held-out rows. The two are disjoint:
    held-out rows are from each `--eval_dataset`, from the dataset's own `--eval_split`, or removed
    from the training rows.

    Datasets with weights have equal parts of the held-out rows. Rows of datasets with weights, of
    several `--eval_dataset` or of one with a name have the column `_dataset`. With `--eval_every 0`
    there are no held-out rows."""
    sources = sources_of(args.dataset)
    train: list[dict] = []
    held_out: list[dict] = []
    size = args.eval_size or EVAL_SIZE
    if args.eval_every and size < len(sources):
        problem = f"less than one row for each of {len(sources)} datasets"
        raise ValueError(f"--eval_size {size}: {problem}; raise it or set --eval_every 0")
    for name, (datasets, _) in sources.items():
        source_train, source_held_out = _train_and_own_held_out(
            datasets, args, size // len(sources)
        )
        train += _with_dataset(source_train, name)
        held_out += _with_dataset(source_held_out, name)
    if args.eval_every and args.eval_dataset is not None:
        held_out = held_out_rows(args)
    return train, held_out


def train_and_eval_columns(
    args: TrainArgs, choices: Sequence[Columns], kept: Sequence[str]
) -> list[tuple[list[dict], Columns]]:
    """Read the training rows and the held-out rows, each with the columns to encode: the first of
    `choices` that the training rows have, and the optional columns of `kept` that any of the rows
    has."""
    train, held_out = train_and_eval_rows(args)
    columns = require_columns(args.dataset_flag, train, choices, args.on_bad_row)
    return [(rows, columns_of(rows, columns, kept)) for rows in (train, held_out)]


def held_out_rows(args: TrainArgs) -> list[dict]:
    """Read at most `--eval_size` rows of each `--eval_dataset`."""
    held_out: list[dict] = []
    sets = eval_sets_of(args.eval_dataset)
    for name, dataset in datasets_by_name(sets).items():
        rows = rows_of_split(
            "--eval_dataset", [dataset], "--eval_split", args.eval_split, args, whole_file=True
        )
        rows = random.Random(0).sample(rows, min(args.eval_size or EVAL_SIZE, len(rows)))
        held_out += _with_dataset(rows, name if len(sets) > 1 or sets[dataset] else "")
    return held_out


def _with_dataset(rows: list[dict], name: str) -> list[dict]:
    """Return the rows with the column `_dataset`, unless the name is empty."""
    return [row | dict(_dataset=name) for row in rows] if name else rows


def _train_and_own_held_out(
    datasets: Sequence[str], args: TrainArgs, size: int
) -> tuple[list[dict], list[dict]]:
    """Read the training rows of datasets and `size` rows of their own held-out split, or else of
    the training rows."""
    train = rows_of_split("--dataset", datasets, "--dataset_split", args.dataset_split, args)
    if not args.eval_every or args.eval_dataset is not None:
        return train, []
    held_out: list[dict] = []
    for dataset in datasets if args.eval_split != args.dataset_split else ():
        held_out += _load_split("--dataset", dataset, args.eval_split, args) or []
    order = random.Random(0)  # not --seed: runs that differ in seed are compared on the same rows
    if held_out:
        return train, order.sample(held_out, min(size, len(held_out)))
    if args.eval_size is None:
        size = max(1, min(size, len(train) // 10))
    if len(train) <= size:
        problem = f"no training rows left of {len(train)}"
        raise ValueError(f"--eval_size {size}: {problem}; lower it or set --eval_every 0")
    order.shuffle(train)
    return train[size:], train[:size]


# ---- columns ----


def require_columns(
    flag: str, rows: list[dict], choices: Sequence[Columns], on_bad_row: str = "error"
) -> Columns:
    """Return the first of `choices` that the first row of each dataset has. Where bad rows are
    skipped, the first row that has any of the choices decides. Raises `ValueError` naming the
    columns found and the columns needed."""
    first_rows = _first_rows(rows)
    if on_bad_row == "skip":
        first_rows |= _first_rows(
            row for row in rows if any(has_columns(row, columns) for columns in choices)
        )
    examples = list(first_rows.values())
    names = [name for name in examples[0] if name not in OUR_COLUMNS]
    names = [name for name in names if all(has_columns(row, [name]) for row in examples)]
    for columns in choices:
        if set(columns) <= set(names):
            if "input" in columns and "instruction" in names:
                problem = "columns instruction and input; join them in one column prompt"
                raise ValueError(f"{flag}: {problem}")
            return columns
    needed = ", or ".join(" and ".join(columns) for columns in choices)
    sources = ", ".join(row["_source"] for row in examples)
    raise ValueError(
        f"{flag} has the columns {', '.join(names)} ({sources}); needed: {needed}"
        + suggested_columns(names, choices)
    )


def _first_rows(rows: Iterable[dict]) -> dict[str | None, dict]:
    """Return the first row of each dataset."""
    first_rows: dict[str | None, dict] = {}
    for row in rows:
        first_rows.setdefault(row.get("_dataset"), row)
    return first_rows


def suggested_columns(names: Sequence[str], choices: Sequence[Columns]) -> str:
    """Return the `--columns` that give data with the columns `names` one of `choices`, for a
    message; empty if no usual names are among them."""
    for columns in choices:
        old_names = {new: _usual_name(new, names) for new in columns if new not in names}
        if None not in old_names.values():
            return "; with --columns " + " ".join(f"{new}={old}" for new, old in old_names.items())
    return ""


def _usual_name(column: str, names: Sequence[str]) -> str | None:
    """Return the first of `names` that usually means `column`, or the most similar one."""
    usual = (*ALIASES.get(column, ()), *difflib.get_close_matches(column, names, 1))
    return next((name for name in usual if name in names), None)


def has_columns(row: dict, columns: Sequence[str]) -> bool:
    """Return whether the row has a value in each column. Tables have None in a missing one."""
    return all(row.get(column) is not None for column in columns)


def columns_of(rows: list[dict], columns: Columns, kept: Sequence[str]) -> Columns:
    """Return `columns`, and each optional column of `kept` that any row has."""
    more = [name for name in kept if name not in columns and any(name in row for row in rows)]
    return (*columns, *more)


# ---- rows that were dropped ----


def reasons(counts: dict[str, int]) -> str:
    """Return the number of rows by reason as text: `3 dropped as too long, 1 truncated`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())


def require_training_rows(flag: str, left: int, counts: dict[str, int]) -> None:
    """Raise `ValueError` if no training row is left."""
    if not left:
        raise ValueError(f"{flag}: no rows are left: {reasons(counts)}; see --max_length")


def require_held_out(rows: Iterable[dict], left: Iterable[dict], why: str) -> None:
    """Raise `ValueError` if no held-out row is left, or none of one held-out set."""
    lost = {row.get("_dataset") for row in rows} - {row.get("_dataset") for row in left}
    if lost:
        name = min(lost, key=str)
        raise ValueError(f"no held-out rows {f'of {name} ' if name else ''}are left{why}")
