"""Reading datasets: files, folders, the hub or a built-in task -> rows.

A row is a dict of the dataset's columns plus `_source` (`train.jsonl:17`), which every complaint about it names. Every
rank reads all rows.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from common.config.flags import BaseArgs, eval_sets_of, pairs_of, weights_of
from common.config.groups import TrainArgs
from common.data.files import BadRows, files_of, is_a_file, kind_of, read_file, read_folder, read_hub
from common.data.tasks import TASKS

T = TypeVar("T")

# What the supervised scripts can train on: the first of these whose columns the dataset has.
SFT_COLUMNS = (("messages",), ("prompt", "completion"), ("question", "answer"), ("text",), ("input", "output"))
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (("prompt", "completion", "label"),)
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # what the online scripts can sample from
OUR_COLUMNS = ("_source", "_dataset")  # where a row stands, and with weights of which dataset it is


def usable(rows: list[dict], encode: Callable[[dict], T], on_bad_row: str) -> Iterator[tuple[dict, T]]:
    """Each row with what `encode` makes of it, of those that `--on_bad_row` allows: `encode` raises `ValueError`."""
    bad = BadRows(on_bad_row)
    for row in rows:
        try:
            value = encode(row)
        except ValueError as error:
            bad.add(error, row["_source"])
        else:
            yield row, value
    bad.tell()


def sources_of(datasets: Sequence[str]) -> dict[str, tuple[list[str], float]]:
    """What training rows are drawn from, with the weight of each: every dataset by its name in metrics or, where they
    have no weights, all of them as one without a name."""
    weights = weights_of(datasets)
    if len(weights) == 1 or None in weights.values():
        return {"": (list(weights), 1.0)}
    return {name: ([dataset], weights[dataset]) for name, dataset in named(dict.fromkeys(weights)).items()}


def named(datasets: dict[str, str | None]) -> dict[str, str]:
    """Datasets by their names in metrics: those given, else the last parts of their paths or, where these are not
    unique, all of them as they are."""
    short = [name or Path(dataset).name.removesuffix(kind_of(Path(dataset))) for dataset, name in datasets.items()]
    if len(set(short)) < len(short) or not all(short):
        short = [name or dataset for dataset, name in datasets.items()]
    return dict(zip(short, datasets, strict=True))


def load_rows(
    flag: str, dataset: str, split: str, config: str | None = None, columns: Sequence[str] = (),
    on_bad_row: str = "error",
) -> list[dict] | None:  # fmt: skip
    """All rows of one split: a built-in task, a file, files by a glob, a folder or a Hugging Face dataset. `columns`
    and `on_bad_row` are the flags.

    None if the dataset is there but has no such split. Raises `ValueError` naming `flag`, the file or the row.
    """
    path, bad = Path(dataset).expanduser(), BadRows(on_bad_row)
    if dataset in TASKS:
        rows, name = TASKS[dataset](split) if split in ("train", "test") else None, f"{dataset}/{split}"
    elif files := files_of(path):
        rows = [row for f in files for row in read_file(flag, f, bad)] if split == "train" else None
        name = path.name
    elif path.is_dir():
        rows, name = read_folder(flag, path, split, bad), f"{path.name}/{split}"
    elif is_a_file(dataset):
        raise ValueError(f"{flag} {dataset}: no such file")
    else:
        rows, name = read_hub(flag, dataset, split, config), f"{dataset}/{split}"
    if rows is None:
        return None
    bad.tell()
    if not rows:
        raise ValueError(f"{flag} {dataset}: {name} {'has no row that can be read' if bad.found else 'is empty'}")
    for number, row in enumerate(rows, 1):
        row.setdefault("_source", f"{name}:{number}")
    return renamed(f"{flag} {dataset}", rows, pairs_of("columns", columns)) if columns else rows


def rows_of_split(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: BaseArgs, whole_file: bool = False
) -> list[dict]:
    """`load_rows` of each dataset, where there has to be such a split; with `whole_file` a file, which has no splits,
    is taken whole.

    Raises `ValueError` naming `split_flag`.
    """
    rows: list[dict] = []
    if any(weights_of(datasets).values()):
        raise ValueError(f"{flag} {' '.join(datasets)}: weights are of the --dataset of scripts that train")
    for dataset in datasets:
        whole = whole_file and files_of(Path(dataset).expanduser())
        found = load_rows(
            flag, dataset, "train" if whole else split, args.dataset_config, args.columns, args.on_bad_row
        )
        if found is None:
            raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
        rows += found
    return rows


def renamed(data: str, rows: list[dict], columns: dict[str, str]) -> list[dict]:
    """The rows with columns named anew, `columns` being new -> old. Raises `ValueError` for an old one that no row has,
    and for a new one that the data has already."""
    found = dict.fromkeys(column for row in rows for column in row if column != "_source")
    for new, old in columns.items():
        if old not in found:
            raise ValueError(f"--columns {new}={old}: no column {old}, {data} has {', '.join(found)}")
        if new == "_source" or (new in found and new not in columns.values()):
            raise ValueError(f"--columns {new}={old}: {data} has a column {new} already")
    return [
        {k: v for k, v in row.items() if k not in columns.values()}
        | {new: row[old] for new, old in columns.items() if old in row}
        for row in rows
    ]


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """The training rows and at most `--eval_size` held-out rows, disjoint: from each `--eval_dataset`, from the
    dataset's own `--eval_split`, or else set aside from the training rows. No held-out rows if `--eval_every 0`.

    Datasets with weights each have an equal part of the held-out rows, and every row says in `_dataset` whose it is;
    so it does with several `--eval_dataset`, or one with a name.
    """
    sources, train, held_out = sources_of(args.dataset), [], []
    if args.eval_every and args.eval_size < len(sources):
        many = f"{len(sources)} datasets"
        raise ValueError(f"--eval_size {args.eval_size} is less than a row of each of {many}; or --eval_every 0")
    for name, (datasets, _) in sources.items():
        mark = dict(_dataset=name) if name else {}
        ours = _with_held_out(datasets, args, args.eval_size // len(sources))
        for rows, found in zip((train, held_out), ours, strict=True):
            rows += [row | mark for row in found] if mark else found
    if args.eval_every and args.eval_dataset is not None:
        held_out = held_out_rows(args)
    return train, held_out


def held_out_rows(args: TrainArgs) -> list[dict]:
    """At most `--eval_size` rows of each `--eval_dataset`. Those of several, or of one that has a name, know it."""
    held_out, sets = [], eval_sets_of(args.eval_dataset)
    for name, dataset in named(sets).items():
        rows = rows_of_split("--eval_dataset", [dataset], "--eval_split", args.eval_split, args, whole_file=True)
        mark = dict(_dataset=name) if len(sets) > 1 or sets[dataset] else {}
        held_out += [row | mark for row in random.Random(0).sample(rows, min(args.eval_size, len(rows)))]
    return held_out


def _with_held_out(datasets: Sequence[str], args: TrainArgs, size: int) -> tuple[list[dict], list[dict]]:
    """The training rows of these datasets, and as many of their own held-out rows or set aside from them."""
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
    if len(train) <= size:
        raise ValueError(f"--eval_size {size} leaves no training rows of {len(train)}; or --eval_every 0")
    order.shuffle(train)
    return train[size:], train[:size]


def require_columns(
    flag: str, rows: list[dict], choices: Sequence[tuple[str, ...]], on_bad_row: str = "error"
) -> tuple[str, ...]:
    """The first of `choices` that the rows have, to go by the first row of each dataset or, where bad rows are skipped,
    the first that has any of them. Raises `ValueError` saying what was found, where, and what would do."""
    of_dataset = {row.get("_dataset"): row for row in reversed(rows)}
    if on_bad_row == "skip":
        usable_rows = (row for row in reversed(rows) if any(has(row, columns) for columns in choices))
        of_dataset |= {row.get("_dataset"): row for row in usable_rows}
    firsts = list(of_dataset.values())[::-1]
    found = [column for column in firsts[0] if column not in OUR_COLUMNS and all(has(row, [column]) for row in firsts)]
    for columns in choices:
        if all(column in found for column in columns):
            if "input" in columns and "instruction" in found:
                raise ValueError(f"{flag} would lose its instruction beside input: make one column prompt of both")
            return columns
    wanted = ", or ".join(" and ".join(columns) for columns in choices)
    where = ", ".join(row["_source"] for row in firsts)
    raise ValueError(f"{flag} has the columns {', '.join(found)} ({where}); needed: {wanted}")


def has(row: dict, columns: Sequence[str]) -> bool:
    """Whether something is in each of these columns: tables have None in what a row has not."""
    return all(row.get(column) is not None for column in columns)


def require_held_out(rows: list[dict], left: Iterable[dict], why: str) -> None:
    """Raises `ValueError` if of the held-out rows, or of those of a set, none is left."""
    lost = {row.get("_dataset"): row for row in rows}.keys() - {row.get("_dataset") for row in left}
    if lost:
        name = min(lost, key=str)
        raise ValueError(f"no held-out rows {f'of {name} ' if name else ''}are left{why}")


def reasons(counts: dict[str, int]) -> str:
    """What happened to rows, by how many: `3 dropped as too long, 1 truncated`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
