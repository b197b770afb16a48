"""Datasets -> training rows and held-out rows, and the columns that a script reads.

A row is a dict of the dataset's columns, `_source` (`train.jsonl:17`), which is in every error
about the row, and `_dataset` if metrics are split by dataset. Every rank reads all rows."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from common.config.flags import datasets_by_name, eval_sets_of, pairs_of, sources_of, weights_of
from common.config.groups import BaseArgs, TrainArgs
from common.text.files import ADDED_COLUMNS, BadRows, files_named, open_split

T = TypeVar("T")
Columns = tuple[str, ...]  # names of columns that a script reads together

# Columns of each kind of script. A script uses the first of its choices that the dataset has.
SFT_COLUMNS = (
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("text",),
    ("input", "output"),
    ("conversations",),
)
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (
    ("prompt", "completion", "label"),
    ("messages", "label"),
    ("conversations", "label"),
)
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # online scripts sample from these
# The encoder reads these beside the others.
READ_TOO = ("tools", "system", "system_prompt", "chat_template_kwargs", "image", "images")
OUR_COLUMNS = ("_source", *ADDED_COLUMNS)
EVAL_SIZE = 256  # default of --eval_size; at most a tenth of the training rows is set aside


def encode_each(
    rows: list[dict], encode: Callable[[dict], T], on_bad_row: str
) -> Iterator[tuple[dict, T]]:
    """Yield each row with its encoded value. `encode` raises `ValueError` for a bad row. With
    `on_bad_row` error this ends the run; with skip the row is skipped and reported."""
    bad = BadRows(on_bad_row)
    for row in rows:
        try:
            value = encode(row)
        except ValueError as error:
            bad.add(error, row["_source"])
        else:
            yield row, value
    bad.report()


# ---- reading ----


def load_rows(flag: str, dataset: str, split: str, args: BaseArgs) -> list[dict] | None:
    """Read all rows of a split; None if the dataset has no such split. Raises `ValueError` naming
    `flag`, the file or the row."""
    is_alone = len(args.dataset) == 1
    shards = open_split(flag, dataset, split, args.dataset_config, is_alone=is_alone)
    if shards is None:
        return None
    bad = BadRows(args.on_bad_row)
    rows = [row for shard in shards for row in shard.rows(bad)]
    bad.report()
    label = f"{flag} {dataset}"
    if not rows:
        raise ValueError(f"{label}: {'every row was skipped' if bad.errors else 'no rows in it'}")
    return rename_columns(label, rows, args.columns)


def rows_of_split(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: BaseArgs,
    whole_file: bool = False,
) -> list[dict]:  # fmt: skip
    """Read the rows of a split of several datasets; with `whole_file` all rows of files, whatever
    the split. Raises `ValueError` naming `split_flag` if a dataset has no such split."""
    if any(weights_of(datasets).values()):
        problem = "only the --dataset of training scripts takes weights"
        raise ValueError(f"{flag} {' '.join(datasets)}: {problem}")
    rows: list[dict] = []
    for dataset in datasets:
        is_whole = whole_file and files_named(dataset)
        own = load_rows(flag, dataset, "train" if is_whole else split, args)
        if own is None:
            raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
        rows += own
    return rows


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
    return [
        {name: value for name, value in row.items() if name not in old_names.values()}
        | {new: row[old] for new, old in old_names.items() if old in row}
        for row in rows
    ]


# ---- training and held-out rows ----


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """Read the training rows and at most `--eval_size` held-out rows. The two are disjoint:
    held-out rows are from each `--eval_dataset`, from the dataset's own `--eval_split`, or removed
    from the training rows.

    Datasets with weights have equal parts of the held-out rows. The column `_dataset` names the
    dataset of a row if training datasets have weights, and the held-out set if there are several or
    it has a name. With `--eval_every 0` there are no held-out rows."""
    sources = sources_of(args.dataset)
    size = args.eval_size or EVAL_SIZE
    if args.eval_every and size < len(sources):
        problem = f"less than one row for each of {len(sources)} datasets"
        raise ValueError(f"--eval_size {size}: {problem}; raise it or set --eval_every 0")
    train: list[dict] = []
    held_out: list[dict] = []
    for name, (datasets, _) in sources.items():
        own = rows_of_split("--dataset", datasets, "--dataset_split", args.dataset_split, args)
        if args.eval_every and args.eval_dataset is None:
            own, chosen = _set_aside(own, datasets, args, size // len(sources))
            held_out += _with_dataset(chosen, name)
        train += _with_dataset(own, name)
    if args.eval_every and args.eval_dataset is not None:
        held_out = held_out_rows(args)
    return train, held_out


def _set_aside(
    rows: list[dict], datasets: Sequence[str], args: TrainArgs, size: int
) -> tuple[list[dict], list[dict]]:
    """Return training rows, and `size` rows of the datasets' own held-out split, or else of the
    training rows."""
    draw = random.Random(0)  # not --seed: runs with other seeds are evaluated on the same rows
    held_out: list[dict] = []
    for dataset in datasets if args.eval_split != args.dataset_split else ():
        held_out += load_rows("--dataset", dataset, args.eval_split, args) or []
    if held_out:
        return rows, draw.sample(held_out, min(size, len(held_out)))
    if args.eval_size is None:
        size = max(1, min(size, len(rows) // 10))
    if len(rows) <= size:
        problem = f"no training rows left of {len(rows)}"
        raise ValueError(f"--eval_size {size}: {problem}; lower it or set --eval_every 0")
    draw.shuffle(rows)
    return rows[size:], rows[:size]


def held_out_rows(args: TrainArgs) -> list[dict]:
    """Read at most `--eval_size` rows of each `--eval_dataset`."""
    held_out: list[dict] = []
    sets = eval_sets_of(args.eval_dataset)
    flags = ("--eval_split", args.eval_split, args)
    for name, dataset in datasets_by_name(sets).items():
        rows = rows_of_split("--eval_dataset", [dataset], *flags, whole_file=True)
        rows = random.Random(0).sample(rows, min(args.eval_size or EVAL_SIZE, len(rows)))
        held_out += _with_dataset(rows, name if len(sets) > 1 or sets[dataset] else "")
    return held_out


def _with_dataset(rows: list[dict], name: str) -> list[dict]:
    """Return the rows with the column `_dataset`, unless the name is empty."""
    return [row | dict(_dataset=name) for row in rows] if name else rows


def require_held_out(rows: Iterable[dict], left: Iterable[dict], why: str) -> None:
    """Raise `ValueError` if no held-out row is left, or none of one held-out set."""
    lost = {row.get("_dataset") for row in rows} - {row.get("_dataset") for row in left}
    if lost:
        name = min(lost, key=str)
        raise ValueError(f"no held-out rows {f'of {name} ' if name else ''}are left{why}")


# ---- columns ----


def require_columns(flag: str, rows: list[dict], choices: Sequence[Columns]) -> Columns:
    """Return the first of `choices` that the first row of each dataset has. Raises `ValueError` if
    none fits, or if a column would be ignored although its name (`context`, `history`) says that it
    is a part of the prompt or of the answer."""
    first_rows: dict[str | None, dict] = {}
    for row in rows:
        first_rows.setdefault(row.get("_dataset"), row)
    examples = [*first_rows.values()]
    # Tables have None in a missing column.
    names = set.intersection(*({x for x in row if row[x] is not None} for row in examples))
    columns = next((columns for columns in choices if {*columns} <= names), None)
    if columns is None:
        needed = ", or ".join(" and ".join(columns) for columns in choices)
        found = ", ".join(name for name in examples[0] if name in names - {*OUR_COLUMNS})
        sources = ", ".join(row["_source"] for row in examples)
        problem = f"has the columns {found} ({sources}); needed: {needed}"
        raise ValueError(f"{flag} {problem}; --columns new=old renames columns")
    parts = {"context", "history", "documents"}
    if columns[0] in ("prompt", "question", "input"):
        parts.add("instruction" if columns[0] == "input" else "input")
    if columns[0] == "chosen" and isinstance(rows[0].get("chosen"), str):  # may be the prompt
        parts |= {"instruction", "question", "problem", "query", "input"}
    if columns not in PROMPT_COLUMNS:
        parts |= {"reasoning", "thinking"}
    unread = unread_columns(rows, columns)
    if columns != ("text",) and (lost := [name for name in unread if name in parts]):
        problem = f"nothing reads {' and '.join(lost)} ({unread[lost[0]]})"
        advice = "join it with the prompt or the answer"
        if columns[0] == "chosen":
            advice = "make a column prompt of it"
        advice += f", or ignore it by --columns {' '.join(f'_{name}={name}' for name in lost)}"
        raise ValueError(f"{flag}: {problem} beside {' and '.join(columns)}; {advice}")
    return columns


def unread_columns(rows: list[dict], columns: Columns) -> dict[str, str]:
    """Return the columns that nothing reads beside `columns`, each with the place of the first row
    that has a value in it. Names with `_` are ours, or ignored by the user."""
    found: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            is_blank = isinstance(value, str) and not value.strip()
            if is_blank or value in (None, [], {}) or name.startswith("_"):
                continue
            if name not in (*columns, *READ_TOO):
                found.setdefault(name, row["_source"])
    return found
