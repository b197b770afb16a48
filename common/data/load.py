"""Rows -> samples of the training rows and of the held-out rows. The ranks share the encoding."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from common.config.extra import extra
from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.files import BadRows, collect_bad_rows
from common.data.order import Order, make_order
from common.data.rows import (
    Columns,
    reasons,
    require_held_out,
    require_training_rows,
    train_and_eval_columns,
)
from common.data.sample import Sample
from common.parallel import distributed

ROWS_AT_ONCE = 1000  # that a rank encodes before the ranks exchange their samples

Item = Sample | list[Sample]  # samples or groups; all items of a script have the same kind and size
EncodeRows = Callable[[list[dict], Columns, Encoder, TrainArgs], tuple[list[Item], Counter]]


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

    def order(self, args: TrainArgs) -> Order:
        return make_order(self.rows, args)


class Part(NamedTuple):
    """Samples of the training rows, or of the held-out rows."""

    samples: Samples
    counts: Counter
    """rows that were dropped or changed, by reason"""
    rows: list[dict]
    """rows of the data before any was dropped"""


def load_samples(
    encode_rows: EncodeRows,
    choices: Sequence[Columns],
    tokenizer,
    args: TrainArgs,
    kept: Sequence[str] = (),
    streams: bool = False,
) -> list[tuple[Samples, Counter]]:
    """Return the samples of the training rows and of the held-out rows, each with the number of
    rows that were dropped or changed, by reason. With `streams` training rows are read when they
    are drawn.

    `encode_rows(rows, columns, encoder, args)` makes the samples. The data needs all columns of one
    of `choices`; the columns of `kept` are encoded too if any row has them. Collective. Raises
    `ValueError` for a bad row, and if no row is left."""
    if streams:
        with extra("streaming", "--streaming"):
            from extras.streaming.streaming import load_stream
        return load_stream(encode_rows, choices, tokenizer, args)
    encoder = Encoder(tokenizer, args)
    training, held_out = (
        in_memory(*encode_on_all_ranks(encode_rows, rows, columns, encoder, args), rows)
        for rows, columns in train_and_eval_columns(args, choices, kept)
    )
    require_training_rows(args.dataset_flag, len(training.samples), training.counts)
    require_held_out_samples(held_out)
    return [training[:2], held_out[:2]]


def encode_on_all_ranks(
    encode_rows: EncodeRows, rows: list[dict], columns: Columns, encoder: Encoder, args: TrainArgs
) -> tuple[list[Item], Counter]:
    """Return `encode_rows` of all rows on every rank; each rank has encoded a part. Collective.
    Raises the error of the first bad row on every rank."""
    items: list[Item] = []
    counts: Counter = Counter()
    bad = BadRows(args.on_bad_row)
    notes: list[str] = []
    encoder.say = notes.append
    for start in range(0, len(rows), ROWS_AT_ONCE * distributed.world_size()):
        first = start + ROWS_AT_ONCE * distributed.rank()
        error = None
        found: tuple[list[Item], Counter] = ([], Counter())
        with collect_bad_rows() as reports:
            try:
                found = encode_rows(rows[first : first + ROWS_AT_ONCE], columns, encoder, args)
            except ValueError as caught:
                error = caught
        parts = distributed.gather_objects((*found, reports, error))
        for own_items, own_counts, own_reports, own_error in parts:
            if own_error is not None:
                raise own_error
            items += own_items
            counts.update(own_counts)
            bad.errors += chain(*own_reports)
    for note in [*chain(*distributed.gather_objects(notes))][:1]:
        distributed.say(note)
    bad.report()
    return items, counts


def in_memory(items: list[Item], counts: Counter, rows: list[dict]) -> Part:
    """Return the samples of `rows`, some of which may have none."""
    sample_rows = [(item[0] if isinstance(item, list) else item).row for item in items]
    return Part(Samples(sample_rows, items.__getitem__), counts, rows)


def require_held_out_samples(part: Part) -> None:
    """Raise `ValueError` if no held-out sample is left, or none of one held-out set."""
    why = f": {reasons(part.counts)}; see --max_length and --eval_split"
    require_held_out(part.rows, part.samples.rows, why)
