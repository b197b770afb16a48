"""Datasets -> training rows and held-out rows, and the columns that a script reads.

A row is a dict of the dataset's columns, `_source` (`train.jsonl:17`), which is in every error about the row, and
`_dataset` if metrics are split by dataset. Every rank reads all rows.
"""

import difflib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from common.config.groups import BaseArgs, TrainArgs
from common.config.specs import eval_sets_of, pairs_of, weights_of
from common.data.files import BadRows, files_of, kind_of, open_shards

T = TypeVar("T")
Columns = tuple[str, ...]  # names of those that a script reads together

# Columns of each kind of script. A script uses the first of its choices that the dataset has.
SFT_COLUMNS = (("messages",), ("prompt", "completion"), ("question", "answer"), ("text",), ("input", "output"))
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (("prompt", "completion", "label"),)
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # online scripts sample from these
ALIASES = dict(  # usual names of columns
    prompt=("question", "instruction", "problem", "query", "input"), messages=("conversations", "conversation"),
    completion=("answer", "response", "output", "solution", "target"),
)  # fmt: skip
OUR_COLUMNS = ("_source", "_dataset")
EVAL_SIZE = 256  # default of --eval_size; of training rows at most a tenth is set aside


def usable(rows: list[dict], encode: Callable[[dict], T], on_bad_row: str) -> Iterator[tuple[dict, T]]:
    """Yield each row with its encoded value. `encode` raises `ValueError` for a bad row. With `on_bad_row` error this
    ends the run; with skip the row is skipped and reported."""
    bad = BadRows(on_bad_row)
    for row in rows:
        try:
            value = encode(row)
        except (ValueError, RecursionError) as error:
            deep = ValueError(f"{row['_source']}: a value is nested too deeply")
            bad.add(deep if isinstance(error, RecursionError) else error, row["_source"])
        else:
            yield row, value
    bad.report()


# ---- datasets by name ----


def sources_of(datasets: Sequence[str]) -> dict[str, tuple[list[str], float]]:
    """Return the sources that training rows are drawn from, by name in metrics, with their datasets and weights.
    Datasets with weights are a source each. Datasets without weights form one source without a name."""
    weights = weights_of(datasets)
    if len(weights) == 1 or None in weights.values():
        return {"": (list(weights), 1.0)}
    return {name: ([dataset], weights[dataset]) for name, dataset in named(dict.fromkeys(weights)).items()}


def named(datasets: dict[str, str | None]) -> dict[str, str]:
    """Return datasets by their names in metrics, given datasets with their optional names. The default name is the last
    part of the path, or the whole path where last parts are not unique."""
    short = [name or Path(dataset).name.removesuffix(kind_of(Path(dataset))) for dataset, name in datasets.items()]
    if len(set(short)) < len(short) or not all(short):
        short = [name or dataset for dataset, name in datasets.items()]
    return dict(zip(short, datasets, strict=True))


def split_of(dataset: str, split: str) -> str:
    """Return `split`, or `train` for a file, which has no other."""
    return "train" if files_of(Path(dataset).expanduser()) else split


# ---- reading ----


def load_rows(
    flag: str, dataset: str, split: str, config: str | None = None, columns: Sequence[str] = (),
    on_bad_row: str = "error",
) -> list[dict] | None:  # fmt: skip
    """Read all rows of a split; None if the dataset has no such split. `columns` and `on_bad_row` are the flags.

    Raises `ValueError` naming `flag`, the file or the row.
    """
    if (shards := open_shards(flag, dataset, split, config)) is None:
        return None
    bad = BadRows(on_bad_row)
    rows = [row for shard in shards for row in shard.read(bad)]
    for row in rows:
        row.pop("_dataset", None)  # ours, see `_marked`
    bad.report()
    if not rows:
        raise ValueError(f"{flag} {dataset}: {'every row was skipped' if bad.errors else 'no rows in it'}")
    return renamed(f"{flag} {dataset}", rows, pairs_of("columns", columns)) if columns else rows


def rows_of_split(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: BaseArgs, whole_file: bool = False
) -> list[dict]:
    """Read the rows of a split of several datasets; with `whole_file` all rows of files, whatever the split. Raises
    `ValueError` naming `split_flag` if a dataset has no such split."""
    rows: list[dict] = []
    if any(weights_of(datasets).values()):
        raise ValueError(f"{flag} {' '.join(datasets)}: only the --dataset of training scripts takes weights")
    for dataset in datasets:
        own_split = split_of(dataset, split) if whole_file else split
        found = load_rows(flag, dataset, own_split, args.dataset_config, args.columns, args.on_bad_row)
        if found is None:
            raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
        rows += found
    return rows


def renamed(data: str, rows: list[dict], columns: dict[str, str]) -> list[dict]:
    """Return rows with renamed columns, given as new -> old. Raises `ValueError` if no row has an old name, or if the
    data has a new name already."""
    found = dict.fromkeys(column for row in rows for column in row if column != "_source")
    for new, old in columns.items():
        if old not in found:
            raise ValueError(f"--columns {new}={old}: no column {old}; {data} has {', '.join(found)}")
        if new == "_source" or (new in found and new not in columns.values()):
            raise ValueError(f"--columns {new}={old}: {data} has a column {new} already")
    return [
        {k: v for k, v in row.items() if k not in columns.values()}
        | {new: row[old] for new, old in columns.items() if old in row}
        for row in rows
    ]


# ---- training and held-out rows ----


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """Read the training rows and at most `--eval_size` held-out rows. The two are disjoint: held-out rows are from each
    `--eval_dataset`, from the dataset's own `--eval_split`, or removed from the training rows.

    Datasets with weights have equal parts of the held-out rows. Rows of datasets with weights, of several
    `--eval_dataset` or of one with a name have the column `_dataset`. With `--eval_every 0` there are no held-out rows.
    """
    sources, train, held_out = sources_of(args.dataset), [], []
    size = args.eval_size or EVAL_SIZE
    if args.eval_every and size < len(sources):
        problem = f"less than one row for each of {len(sources)} datasets"
        raise ValueError(f"--eval_size {size}: {problem}; raise it or set --eval_every 0")
    for name, (datasets, _) in sources.items():
        source_train, source_held_out = _train_and_own_held_out(datasets, args, size // len(sources))
        train += _marked(source_train, name)
        held_out += _marked(source_held_out, name)
    if args.eval_every and args.eval_dataset is not None:
        held_out = held_out_rows(args)
    return train, held_out


def train_and_eval_columns(
    args: TrainArgs, choices: Sequence[Columns], kept: Sequence[str]
) -> list[tuple[list[dict], Columns]]:
    """Read the training rows and the held-out rows, each with the columns to encode: the first of `choices` that the
    training rows have, and the optional columns of `kept` that any of the rows has."""
    parts = train_and_eval_rows(args)
    columns = require_columns(args.dataset_flag, parts[0], choices, args.on_bad_row)
    return [(rows, columns_of(rows, columns, kept)) for rows in parts]


def held_out_rows(args: TrainArgs) -> list[dict]:
    """Read at most `--eval_size` rows of each `--eval_dataset`."""
    held_out, sets = [], eval_sets_of(args.eval_dataset)
    for name, dataset in named(sets).items():
        rows = rows_of_split("--eval_dataset", [dataset], "--eval_split", args.eval_split, args, whole_file=True)
        rows = random.Random(0).sample(rows, min(args.eval_size or EVAL_SIZE, len(rows)))
        held_out += _marked(rows, name if len(sets) > 1 or sets[dataset] else "")
    return held_out


def _marked(rows: list[dict], name: str) -> list[dict]:
    """Return the rows with the column `_dataset`, unless the name is empty."""
    return [row | dict(_dataset=name) for row in rows] if name else rows


def _train_and_own_held_out(datasets: Sequence[str], args: TrainArgs, size: int) -> tuple[list[dict], list[dict]]:
    """Read the training rows of datasets and `size` rows of their own held-out split, or else of the training rows."""
    train = rows_of_split("--dataset", datasets, "--dataset_split", args.dataset_split, args)
    if not args.eval_every or args.eval_dataset is not None:
        return train, []
    held_out: list[dict] = []
    for dataset in datasets if args.eval_split != args.dataset_split else ():
        config, columns, on_bad_row = args.dataset_config, args.columns, args.on_bad_row
        held_out += load_rows("--dataset", dataset, args.eval_split, config, columns, on_bad_row) or []
    order = random.Random(0)  # not --seed: runs that differ in seed are compared on the same rows
    if held_out:
        return train, order.sample(held_out, min(size, len(held_out)))
    if args.eval_size is None:
        size = max(1, min(size, len(train) // 10))
    if len(train) <= size:
        raise ValueError(f"--eval_size {size}: no training rows left of {len(train)}; lower it or set --eval_every 0")
    order.shuffle(train)
    return train[size:], train[:size]


# ---- columns ----


def require_columns(flag: str, rows: list[dict], choices: Sequence[Columns], on_bad_row: str = "error") -> Columns:
    """Return the first of `choices` that the first row of each dataset has. Where bad rows are skipped, the first row
    that has any of the choices decides. Raises `ValueError` naming the columns found and the columns needed."""
    of_dataset = {row.get("_dataset"): row for row in reversed(rows)}
    if on_bad_row == "skip":
        usable_rows = (row for row in reversed(rows) if any(has(row, columns) for columns in choices))
        of_dataset |= {row.get("_dataset"): row for row in usable_rows}
    first_rows = list(of_dataset.values())[::-1]
    found = [
        column for column in first_rows[0]
        if column not in OUR_COLUMNS and all(has(row, [column]) for row in first_rows)
    ]  # fmt: skip
    for columns in choices:
        if all(column in found for column in columns):
            if "input" in columns and "instruction" in found:
                raise ValueError(f"{flag}: columns instruction and input; join them in one column prompt")
            return columns
    wanted = ", or ".join(" and ".join(columns) for columns in choices) + renaming(found, choices)
    where = ", ".join(row["_source"] for row in first_rows)
    raise ValueError(f"{flag} has the columns {', '.join(found)} ({where}); needed: {wanted}")


def renaming(found: Sequence[str], choices: Sequence[Columns]) -> str:
    """Return the `--columns` that give the data one of `choices`, for a message; empty if no usual names are found."""
    for columns in choices:
        usual = {new: [*ALIASES.get(new, ()), *difflib.get_close_matches(new, found, 1)] for new in columns}
        names = {new: next((old for old in usual[new] if old in found), None) for new in columns}
        names = {new: old for new, old in names.items() if new not in found}
        if None not in names.values():
            return "; with --columns " + " ".join(f"{new}={old}" for new, old in names.items())
    return ""


def has(row: dict, columns: Sequence[str]) -> bool:
    """Return whether the row has a value in each column. Tables have None in a missing one."""
    return all(row.get(column) is not None for column in columns)


def columns_of(rows: list[dict], columns: Columns, kept: Sequence[str]) -> Columns:
    """Return `columns`, and each optional column of `kept` that any row has."""
    return columns + tuple(name for name in kept if name not in columns and any(name in row for row in rows))


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
