"""Rows -> samples of the training rows and of the held-out rows.

Every rank reads and tokenises small data itself, in memory. A stream and large data have modules of
their own: streaming.py and token_cache.py."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.config.groups import TrainArgs
from common.config.specs import eval_sets_of, weights_of
from common.data.encode import Encoder
from common.data.files import open_shards
from common.data.order import RowOrder, WeightedOrder, make_order
from common.data.rows import (
    reasons,
    require_held_out,
    require_training_rows,
    split_of,
    train_and_eval_columns,
)
from common.data.sample import Sample
from common.parallel import distributed

LARGE = 32 << 20  # bytes of data that are tokenised once per machine; less takes seconds

Item = Sample | list[Sample]  # samples or groups; all items of a script have the same kind and size
EncodeRows = Callable[[list[dict], tuple[str, ...], Encoder, TrainArgs], tuple[list[Item], Counter]]


class Samples(Sequence):
    """Samples or groups of them, which `make` makes when they are read; `rows` has the data row of
    each."""

    def __init__(self, rows: list[dict], make: Callable[[int], Item]):
        self.rows = rows
        self.make = make

    @property
    def num_rows(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int | slice) -> Item | list[Item]:
        chosen = range(len(self))[i]  # raises IndexError
        return [self.make(k) for k in chosen] if isinstance(i, slice) else self.make(chosen)

    def order(self, args: TrainArgs) -> RowOrder | WeightedOrder:
        return make_order(self.rows, args)


class Part(NamedTuple):
    """Samples of the training rows, or of the held-out rows."""

    samples: Samples
    counts: Counter
    """rows that were dropped or changed, by reason"""
    rows: list[dict]
    """rows of the data before any was dropped; from disk, one row for each dataset, with its
    `_dataset`"""


def load_samples(
    encode_rows: EncodeRows,
    choices: Sequence[tuple[str, ...]],
    tokenizer,
    args: TrainArgs,
    flags: Sequence[str],
    kept: Sequence[str] = (),
) -> list[tuple[Samples, Counter]]:
    """Return the samples of the training rows and of the held-out rows, each with the number of
    rows that were dropped or changed, by reason.

    `encode_rows(rows, columns, encoder, args)` makes the samples. `columns` has the first of
    `choices` that the data has, and the columns of `kept` that any row has; samples keep the
    columns of `kept`. `flags`: the script's own flags that `encode_rows` reads. Collective. Raises
    `ValueError` for a bad row, if no row is left, or if machines have different data."""
    if getattr(args, "streaming", False):
        from extras.streaming.streaming import load_stream

        return load_stream(encode_rows, choices, tokenizer, args)
    if _is_large(args):
        from common.data.token_cache import load_tokenised

        training, held_out = load_tokenised(encode_rows, choices, tokenizer, args, flags, kept)
    else:
        encoder = Encoder(tokenizer, args)
        training, held_out = (
            in_memory(*encode_rows(rows, columns, encoder, args), rows)
            for rows, columns in train_and_eval_columns(args, choices, kept)
        )
    require_training_rows(args.dataset_flag, len(training.samples), training.counts)
    require_held_out_samples(held_out)
    return [training[:2], held_out[:2]]


def in_memory(items: list[Item], counts: Counter, rows: list[dict]) -> Part:
    """Return the samples of `rows`, some of which may have none."""
    sample_rows = [(item[0] if isinstance(item, list) else item).row for item in items]
    return Part(Samples(sample_rows, items.__getitem__), counts, rows)


def require_held_out_samples(part: Part) -> None:
    """Raise `ValueError` if no held-out sample is left, or none of one held-out set."""
    why = f": {reasons(part.counts)}; see --max_length and --eval_split"
    require_held_out(part.rows, part.samples.rows, why)


def is_first_on_machine() -> bool:
    """Return whether this rank works for all ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def _is_large(args: TrainArgs) -> bool:
    """Return whether the files of the data have at least `LARGE` bytes, on any machine.
    Collective."""
    size = 0
    if is_first_on_machine():
        size = sum(file.stat().st_size for file in data_files(args))
    return max(distributed.gather_objects(size)) >= LARGE


def data_files(args: TrainArgs) -> list[Path]:
    """Return the files of the training and held-out rows."""
    datasets = [("--dataset", dataset) for dataset in weights_of(args.dataset)]
    splits = [args.dataset_split]
    if args.eval_every:
        splits.append(args.eval_split)
    if args.eval_every and args.eval_dataset is not None:
        datasets += [("--eval_dataset", dataset) for dataset in eval_sets_of(args.eval_dataset)]
    files: dict[Path, None] = {}
    for flag, dataset in datasets:
        for split in dict.fromkeys(split_of(dataset, split) for split in splits):
            for shard in open_shards(flag, dataset, split, args.dataset_config) or ():
                files |= dict.fromkeys(shard.files)
    return list(files)
