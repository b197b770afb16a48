"""Transfer of samples: as rows of a table, ids and streams go to the ranks that train on them.

Shapes: I ids of samples; C columns: id, loss mask and the streams, a float as its bits.
"""

from itertools import accumulate, chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.data.sample import Sample
from common.parallel import distributed
from common.parallel.context import context_group_size
from common.parallel.placement import GroupShape, Key, Rows

# Optional per-token streams of a Sample, beside its own `streams`; in a PackedBatch they are
# `<name>_T`.
STREAMS = ("rollout_logprobs", "versions", "weights")
INTEGERS = ("stored_at",)


class Outline(NamedTuple):
    """Shapes and indices of a rank's samples, which all ranks have before samples move."""

    shapes: list[GroupShape]
    indices: list[int]  # of the samples, in the order of the shapes
    datasets: list[str | None]  # of each sample
    images: list[list]  # of each sample
    streams: list[str]


class Placed(NamedTuple):
    """A sample in the table of the rank that trains on it."""

    first_row: int
    num_targets: int
    shared: int  # first targets that are those of the sample before it
    index: int
    dataset: str | None
    images: list = []  # ImageSpan, those of a shared prefix too


def streams_of(sample: Sample) -> dict[str, list[float]]:
    """Return the per-token streams of a sample by name."""
    streams = {name: getattr(sample, name, None) for name in STREAMS}
    streams = {name: values for name, values in streams.items() if values is not None}
    if sample.stored_at is not None:  # each token's place follows those of the trained ones before
        streams["stored_at"] = [0, *accumulate(sample.loss_mask[1:-1], initial=sample.stored_at)]
    return streams | sample.streams


def _stream(streams: dict[str, list[float]], name: str, num_ids: int) -> list[float]:
    """Return a stream of a sample. Raises `ValueError` unless it has one number for each id."""
    values = streams.get(name, [])
    if len(values) != num_ids:
        wrong = f"{len(values)} numbers for {num_ids} ids"
        advice = "give every sample of a batch one number for each of its ids"
        raise ValueError(f"stream {name}: {wrong}; {advice}")
    return values


def sample_table(samples: list[Sample], streams: list[str]) -> Tensor:
    """Return one row for each id of the samples: id, loss mask and streams, where a float stands as
    its bits. Int32 [I, C]."""
    ids = chain.from_iterable(sample.ids for sample in samples)
    mask = chain.from_iterable(sample.loss_mask for sample in samples)
    columns = [torch.tensor([*ids], dtype=torch.int32), torch.tensor([*mask], dtype=torch.int32)]
    lengths_and_streams = [(len(sample.ids), streams_of(sample)) for sample in samples]
    for name in streams:
        values = chain.from_iterable(_stream(x, name, n) for n, x in lengths_and_streams)
        dtype = torch.int32 if name in INTEGERS else torch.float32
        columns.append(torch.tensor([*values], dtype=dtype).view(torch.int32))
    return torch.stack(columns, dim=1)


def send_rows(
    table_IC: Tensor, groups: dict[Key, GroupShape], rows: Rows
) -> tuple[Tensor, dict[Key, int]]:
    """Send each group's rows of the table to the ranks that train on it. Return the table of the
    groups that this rank receives, with rows of zeros at its end for padding, and the first row of
    each group. Collective."""
    rank = distributed.rank()
    R = context_group_size()
    num_ids = {key: sum(n + 1 for n in group.lengths) for key, group in groups.items()}
    first_rows = first_rows_of([key for key in groups if key[0] == rank], num_ids)
    if distributed.world_size() > 1:
        ranks = range(distributed.world_size())
        wanted = [[key for row in rows for key in row[to // R]] for to in ranks]
        sent = [[key for key in wanted[to] if key[0] == rank] for to in ranks]
        received = [[key for key in wanted[rank] if key[0] == owner] for owner in ranks]
        taken = [torch.arange(num_ids[key]) + first_rows[key] for key in chain(*sent)]
        sent_IC = table_IC[torch.cat([torch.zeros(0, dtype=torch.int64), *taken])]
        sent_sizes = [sum(num_ids[key] for key in keys) for keys in sent]
        received_sizes = [sum(num_ids[key] for key in keys) for keys in received]
        table_IC = sent_IC.new_empty(sum(received_sizes), sent_IC.shape[1])
        dist.all_to_all_single(table_IC, sent_IC, received_sizes, sent_sizes)
        first_rows = first_rows_of([*chain(*received)], num_ids)
    return torch.nn.functional.pad(table_IC, (0, 0, 0, R + 1)), first_rows


def first_rows_of(keys: list[Key], num_ids: dict[Key, int]) -> dict[Key, int]:
    starts = accumulate((num_ids[key] for key in keys), initial=0)
    return dict(zip(keys, starts, strict=False))


def placed_samples(
    outlines: list[Outline], groups: dict[Key, GroupShape], first_rows: dict[Key, int]
) -> dict[Key, list[Placed]]:
    """Return the samples of each group that this rank has."""
    samples = [zip(o.indices, o.datasets, o.images, strict=True) for o in outlines]
    placed = {}
    for key, group in groups.items():
        described = list(islice(samples[key[0]], len(group.lengths)))
        row = first_rows.get(key)
        if row is None:  # of another rank
            continue
        placed[key] = []
        for length, prefix, about in zip(group.lengths, group.shared, described, strict=True):
            placed[key].append(Placed(row, length, prefix, *about))
            row += length + 1
    return placed
