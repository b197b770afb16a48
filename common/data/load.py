"""Rows -> samples of the training rows and of the held-out rows. The ranks share the encoding."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from common.config.extra import extra
from common.config.groups import TrainArgs
from common.data.encode import Encoder, truncate
from common.data.files import BadRows
from common.data.messages import bad_row
from common.data.order import Order, make_order
from common.data.rows import (
    Columns,
    require_columns,
    require_held_out,
    train_and_eval_rows,
    unread_columns,
)
from common.data.sample import Sample
from common.parallel import distributed

ROWS_AT_ONCE = 1000  # that a rank encodes before the ranks exchange their samples

SampleGroup = list[Sample]  # the samples of a row
EncodeRow = Callable[[dict, Columns, Encoder, TrainArgs], SampleGroup]


class Samples(Sequence):
    """Groups of samples, which `make` makes when they are read; `rows` has the data row of each."""

    def __init__(self, rows: list[dict], make: Callable[[int], SampleGroup]):
        self.rows = rows
        self.make = make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int | slice) -> SampleGroup | list[SampleGroup]:
        chosen = range(len(self))[i]  # raises IndexError
        return [self.make(k) for k in chosen] if isinstance(i, slice) else self.make(chosen)

    def order(self, args: TrainArgs) -> Order:
        return make_order(self.rows, args)


def load_samples(
    encode_row: EncodeRow, choices: Sequence[Columns], tokenizer, args: TrainArgs,
    optional: Sequence[str] = (), streams: bool = False,
) -> list[tuple[Samples, Counter]]:  # fmt: skip
    """Return the samples of the training rows and of the held-out rows, each with the number of
    rows that were dropped or changed, by reason. With `streams` training rows are read when they
    are drawn.

    `encode_row(row, columns, encoder, args)` makes the group of samples of a row. The columns are
    the first of `choices` that the data has, and those of `optional` that any row has. Collective.
    Raises `ValueError` for a bad row, and if no row is left."""
    if streams:
        with extra("streaming", "--streaming"):
            from extras.streaming.streaming import load_stream
        return load_stream(encode_row, choices, tokenizer, args)
    train, held_out = train_and_eval_rows(args)
    columns = require_columns(args.dataset_flag, train, choices)
    say_unread(train, (*columns, *optional))
    encoder = Encoder(tokenizer, args)
    loaded = []
    for rows in (train, held_out):
        found = [name for name in optional if any(name in row for row in rows)]
        loaded.append(encode_all(encode_row, rows, (*columns, *found), encoder, args))
    (samples, counts), (held_out_samples, held_out_counts) = loaded
    if not samples:
        raise ValueError(f"{args.dataset_flag}: no rows are left: {reasons(counts)}")
    require_held_out(held_out, held_out_samples.rows, f": {reasons(held_out_counts)}")
    return loaded


def say_unread(rows: list[dict], columns: Columns) -> None:
    """Print the columns that are neither among `columns` nor read beside them."""
    if unread := unread_columns(rows, columns):
        distributed.say(f"not used in training: {', '.join(unread)}")


class Encoded(NamedTuple):
    """What has become of a row."""

    group: SampleGroup | None = None  # None: it was dropped
    counts: tuple[str, ...] = ()  # why it was dropped, or how it was changed
    error: ValueError | None = None


def encode_all(
    encode_row: EncodeRow, rows: list[dict], columns: Columns, encoder: Encoder, args: TrainArgs
) -> tuple[Samples, Counter]:
    """Return the samples of all rows on every rank, and the number of rows that were dropped or
    changed, by reason; each rank has encoded a part. Collective. Raises the error of the first bad
    row on every rank."""
    groups: list[SampleGroup] = []
    counts: Counter = Counter()
    bad = BadRows(args.on_bad_row)
    for start in range(0, len(rows), ROWS_AT_ONCE * distributed.world_size()):
        first = start + ROWS_AT_ONCE * distributed.rank()
        own_rows = rows[first : first + ROWS_AT_ONCE]
        own = [encode(encode_row, row, columns, encoder, args) for row in own_rows]
        parts = distributed.gather_objects(own)
        for encoded, row in zip(chain(*parts), rows[start:], strict=False):
            if encoded.error:
                bad.add(encoded.error, row["_source"])
            counts.update(encoded.counts)
            if encoded.group:
                groups.append([replace(s, row=s.row or row) for s in encoded.group])
    for kind, note in distributed.gather_dict(encoder.said).items():
        encoder.say_once(note, kind)
    bad.report()
    return Samples([group[0].row for group in groups], lambda i: unpacked(groups[i])), counts


def encode(
    encode_row: EncodeRow, row: dict, columns: Columns, encoder: Encoder, args: TrainArgs
) -> Encoded:
    """Encode a row to samples of at most `--max_length` tokens, and say why it was dropped or
    changed. To save memory, ids are arrays (a seventh of a list), and a sample whose row is `row`
    travels without it."""
    counts = []
    try:
        group = encode_row(dict(row), columns, encoder, args)
        length = max(len(sample.ids) for sample in group)
        if length > args.max_length:
            if args.overlong == args.on_bad_row == "error":
                problem = f"{length} tokens exceed --max_length {args.max_length}"
                raise bad_row(row, f"{problem}; set --overlong drop or truncate")
            if args.overlong != "truncate":
                return Encoded(counts=("dropped as too long (--max_length)",))
            counts.append("truncated (--max_length)")
            group = [truncate(sample, args.max_length) for sample in group]
    except ValueError as error:
        return Encoded(error=error)
    if not all(any(sample.loss_mask[1:]) for sample in group):  # the first is never predicted
        return Encoded(counts=("dropped because no token is trained",))
    if len(group) == 2 and group[0].ids == group[1].ids:
        return Encoded(counts=("with chosen = rejected, dropped",))
    if any(sample.context_turns for sample in group):
        counts.append("with turns not trained: the chat template rewrites them")
    unknown = encoder.tokenizer.unk_token_id  # GPT-2 has its EOS here
    if unknown != encoder.tokenizer.eos_token_id and any(unknown in s.ids for s in group):
        counts.append("with characters that the tokenizer lacks")
    packed = []
    for sample in group:
        own = {} if sample.row == row else sample.row
        arrays = dict(ids=array("i", sample.ids), loss_mask=bytes(sample.loss_mask))
        packed.append(replace(sample, **arrays, row=own))
    return Encoded(packed, tuple(counts))


def unpacked(group: SampleGroup) -> SampleGroup:
    return [replace(s, ids=[*s.ids], loss_mask=[*map(bool, s.loss_mask)]) for s in group]


def reasons(counts: Counter) -> str:
    """Return the number of rows by reason as text: `3 dropped as too long, 1 truncated`."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
