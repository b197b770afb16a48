"""Datasets -> training rows and held-out rows.

A row is a dict of the dataset's columns, `_source` (`train.jsonl:17`), which is in every error
about the row, and `_dataset` if metrics are split by dataset. Every rank reads all rows."""

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from common.config.flags import datasets_by_name, eval_sets_of, sources_of, weights_of
from common.config.groups import DataArgs, TrainArgs
from common.parallel import distributed
from common.text.columns import prompt_digest, rename_columns, require_old_names
from common.text.files import TASKS, BadRows, Shard, files_named, open_split, splits_of

T = TypeVar("T")

EVAL_SIZE = 256  # default of --eval_size; at most a tenth of the training rows is set aside
# Names of splits for an evaluation, such as test_prefs.
HELD_OUT = re.compile(
    r"(?<![a-z])(test|val|valid|validation|dev|eval|evaluation|held_?out)(?![a-z])"
)


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


def load_rows(flag: str, dataset: str, split: str, args: DataArgs) -> list[dict] | None:
    """Read all rows of a split, under the data's own names of columns; None if the dataset has no
    such split. Raises `ValueError` naming `flag`, the file or the row."""
    shards = _shards(flag, dataset, split, args)
    return None if shards is None else _read(f"{flag} {dataset}", shards, args)


def _shards(flag: str, dataset: str, split: str, args: DataArgs) -> list[Shard] | None:
    is_alone = len(args.dataset) == 1
    return open_split(flag, dataset, split, args.dataset_config, is_alone=is_alone)


def _open(flag: str, dataset: str, split_flag: str, split: str, args: DataArgs) -> list[Shard]:
    shards = _shards(flag, dataset, split, args)
    if shards is None:
        raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
    return shards


def _read(label: str, shards: list[Shard], args: DataArgs) -> list[dict]:
    bad = BadRows(args.on_bad_row)
    rows = [row for shard in shards for row in shard.rows(bad)]
    bad.report()
    if not rows:
        raise ValueError(f"{label}: {'every row was skipped' if bad.errors else 'no rows in it'}")
    return rows


def rows_of_split(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: DataArgs,
    whole_file: bool = False,
) -> list[dict]:  # fmt: skip
    """Read the rows of a split of several datasets, with columns renamed; with `whole_file` all
    rows of files, whatever the split. Raises `ValueError` naming `split_flag` if a dataset has no
    such split."""
    rows = _own_rows(flag, datasets, split_flag, split, args, whole_file)
    require_old_names(f"{flag} {' '.join(datasets)}", rows, args.columns)
    return rename_columns(rows, args.columns)


def _own_rows(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: DataArgs,
    whole_file: bool,
) -> list[dict]:  # fmt: skip
    if any(weights_of(datasets).values()):
        problem = "only the --dataset of training scripts takes weights"
        raise ValueError(f"{flag} {' '.join(datasets)}: {problem}")
    rows: list[dict] = []
    for dataset in datasets:
        part = "train" if whole_file and files_named(dataset) else split
        rows += _read(f"{flag} {dataset}", _open(flag, dataset, split_flag, part, args), args)
    return rows


# ---- training and held-out rows ----


class Source(NamedTuple):
    """What is read of a dataset with a weight; without weights, of all datasets together."""

    name: str  # in metrics; empty without weights
    shards: dict[str, list[Shard]]  # of each dataset
    rows: list[dict]
    own_split: list[dict]  # rows of `--eval_split` in these datasets; most have none


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """Read the training rows, and at most `--eval_size` rows of each held-out set. The two are
    disjoint: held-out rows are from each `--eval_dataset`, from the dataset's own `--eval_split`,
    or removed from the training rows. A line says how many have a prompt that is trained too.

    Datasets with weights have equal parts of the held-out rows. The column `_dataset` names the
    dataset of a row if training datasets have weights, and the held-out set if there are several or
    it has a name. With `--eval_every 0` there are no held-out rows."""
    count = len(sources_of(args.dataset))
    size = args.eval_size or EVAL_SIZE
    if args.eval_every and size < count:
        problem = f"less than one row for each of {count} datasets"
        raise ValueError(f"--eval_size {size}: {problem}; raise it or set --eval_every 0")
    sources, eval_sets = _read_all(args)
    train: list[dict] = []
    held_out: list[dict] = []
    are_apart = count == 1 and not eval_sets  # the prompts of both sides
    for source in sources:
        rows, chosen, is_by_prompt = _hold_out(source, size // count, args)
        train += _with_dataset(rows, source.name)
        held_out += _with_dataset(chosen, source.name)
        are_apart &= is_by_prompt
    held_out += rename_columns(eval_sets, args.columns)
    if held_out and not are_apart:
        _say_shared_prompts(train, held_out)
    return train, held_out


def _read_all(args: TrainArgs) -> tuple[list[Source], list[dict]]:
    """Read each source, its training rows with columns renamed, and the rows of each
    `--eval_dataset`."""
    flags = ("--dataset_split", args.dataset_split, args)
    shards = {dataset: _open("--dataset", dataset, *flags) for dataset in weights_of(args.dataset)}
    sources = []
    for name, (datasets, _) in sources_of(args.dataset).items():
        own = {dataset: shards[dataset] for dataset in datasets}
        rows = [row for x in datasets for row in _read(f"--dataset {x}", own[x], args)]
        has_own = args.eval_every and args.eval_dataset is None
        own_split = _own_split(datasets, args) if has_own else []
        sources.append(Source(name, own, rows, own_split))
    eval_sets = rows_of_eval_sets(args) if args.eval_every and args.eval_dataset else []
    trained = chain(*(source.rows for source in sources))
    own_splits = chain(*(source.own_split for source in sources))
    require_old_names(args.dataset_flag, chain(trained, own_splits, eval_sets), args.columns)
    return [x._replace(rows=rename_columns(x.rows, args.columns)) for x in sources], eval_sets


def _own_split(datasets: Sequence[str], args: TrainArgs) -> list[dict]:
    """Read the rows of the datasets' own held-out split, which most do not have."""
    rows: list[dict] = []
    if args.eval_split == args.dataset_split:
        return rows
    for dataset in datasets:
        rows += load_rows("--dataset", dataset, args.eval_split, args) or []
    return rows


def _hold_out(source: Source, size: int, args: TrainArgs) -> tuple[list[dict], list[dict], bool]:
    """Return the training rows of a source, at most `size` held-out rows, and whether all rows of a
    prompt are on one side for sure."""
    if not args.eval_every or args.eval_dataset is not None:
        return source.rows, [], True
    if source.own_split:
        # not --seed: runs with other seeds are evaluated on the same rows
        chosen = random.Random(0).sample(source.own_split, min(size, len(source.own_split)))
        return source.rows, rename_columns(chosen, args.columns), False
    parts = _set_aside(source.rows, size, is_given=args.eval_size is not None)
    _say_unread_splits(source.shards, args)
    return parts


def _set_aside(rows: list[dict], size: int, is_given: bool) -> tuple[list[dict], list[dict], bool]:
    """Set held-out rows aside: at most `size`, and at most a tenth of all unless `size` is given.
    Return the training rows, the others, and whether all rows of a prompt are on one side. They
    are, unless prompts have so many rows that less than half of `size` would be set aside."""
    if not is_given:
        size = max(1, min(size, len(rows) // 10))
    if len(rows) <= size:
        problem = f"no training rows left of {len(rows)}"
        raise ValueError(f"--eval_size {size}: {problem}; lower it or set --eval_every 0")
    pairs = [(row, prompt_digest(row)) for row in rows]
    random.Random(0).shuffle(pairs)  # not --seed, see `_hold_out`
    counts = Counter(prompt for _, prompt in pairs)
    chosen: set[bytes] = set()
    left = size
    for _, prompt in pairs:
        if prompt not in chosen and counts[prompt] <= left:
            chosen.add(prompt)
            left -= counts[prompt]
    if left > size // 2 or len(chosen) == len(counts):
        return [row for row, _ in pairs[size:]], [row for row, _ in pairs[:size]], False
    train = [row for row, prompt in pairs if prompt not in chosen]
    return train, [row for row, prompt in pairs if prompt in chosen], True


def _say_unread_splits(shards: dict[str, list[Shard]], args: DataArgs) -> None:
    """Print which splits for an evaluation the datasets have, if rows of training are set aside."""
    for dataset, own in shards.items():
        names: Iterable[str] = ()
        if os.path.isdir(os.path.expanduser(dataset)) and dataset not in TASKS:
            names = splits_of(f"--dataset {dataset}", dataset, args.dataset_config)
        elif info := getattr(own[0].content, "info", None):  # of the hub
            names = info.splits or ()
        names = [str(x) for x in names if HELD_OUT.search(str(x)) and x != args.dataset_split]
        if names:
            problem = f"the split {' or '.join(names)} is not read, training rows are set aside"
            distributed.say(f"--dataset {dataset}: {problem}; see --eval_split {names[0]}")


def rows_of_eval_sets(args: TrainArgs) -> list[dict]:
    """Read at most `--eval_size` rows of each `--eval_dataset`, under the data's own names of
    columns."""
    held_out: list[dict] = []
    sets = eval_sets_of(args.eval_dataset)
    flags = ("--eval_split", args.eval_split, args)
    for name, dataset in datasets_by_name(sets).items():
        rows = _own_rows("--eval_dataset", [dataset], *flags, whole_file=True)
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


def _say_shared_prompts(rows: list[dict], held_out: list[dict]) -> None:
    """Print how many of the held-out rows have a prompt that one of the rows has."""
    digests = [prompt_digest(row) for row in held_out]
    prompts = {*digests}
    trained = {digest for row in rows if (digest := prompt_digest(row)) in prompts}
    shared = [row for row, digest in zip(held_out, digests, strict=True) if digest in trained]
    if shared:
        count = f"{len(shared)} of {len(held_out)} held-out rows"
        example = shared[0]["_source"]
        distributed.say(f"{count} have a prompt that is trained too, such as {example}")
