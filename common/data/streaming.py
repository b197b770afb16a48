"""`--streaming`: training rows that are read when they are drawn, from files or the hub.

Rank 0 reads and tokenises; the other ranks get each batch from it. A pass reads the shards (files, or shards of a hub
dataset) in an order drawn from (seed, epoch), `--shuffle_buffer` rows at a time, and shuffles these by (seed, place of
the first row). The position of a run is this place and the number of rows drawn from the buffer. A resumed run reads
the buffer again and continues behind those rows.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist

from common.config.groups import TrainArgs
from common.config.specs import pairs_of
from common.data.files import BadRows, Shard, collect_bad_rows, open_shards
from common.data.rows import Columns, renamed, require_columns, require_training_rows
from common.data.sample import Sample
from common.data.tasks import TASKS
from common.parallel import distributed

T = TypeVar("T")
Place = tuple[int, int, int]  # epoch, shard by its place in the epoch, and number of rows of the shard before
Position = tuple[Place, int]  # of a run: the place of the shuffle buffer, and the number of rows drawn from it


class StreamedSamples:
    """Samples of rows that are read when they are drawn, and their order. `samples[i]` takes the numbers that the last
    `draw` returned. Every rank has the same position."""

    num_rows = "a stream of"  # training rows

    def __init__(self, encode: Callable[..., tuple[list[Sample], Counter]], choices: Sequence[Columns], args):
        """`encode(rows, columns)` gets the first of `choices` that the rows of a shuffle buffer have. Raises
        `ValueError` if there is no such data."""
        self.encode, self.choices, self.args = encode, choices, args
        self.shards = [shard for dataset in args.dataset for shard in streamed_shards(dataset, args)]
        self._continue_from((0, 0, 0), 0)

    def _continue_from(self, place: Place, drawn: int) -> None:
        self.position, self.samples, self.batch = (place, drawn), self._samples(place, drawn), []

    def order(self, args: TrainArgs) -> "StreamedSamples":
        return self

    def draw(self, count: int) -> range:
        """Draw the next `count` samples, across the end of a pass; return their numbers. Collective."""
        if distributed.is_main():
            drawn = list(islice(self.samples, count))
            self.batch, self.position = [sample for sample, _ in drawn], drawn[-1][1]
        self.batch, self.position = of_rank_0((self.batch, self.position))
        return range(count)

    def __getitem__(self, i: int) -> Sample:
        """Return a drawn sample; before the first draw the next sample, without drawing it. Then it is collective."""
        if self.batch:
            return self.batch[i]
        ahead = [next(self.samples)] if distributed.is_main() else []
        self.samples = chain(ahead, self.samples)
        return of_rank_0([sample for sample, _ in ahead])[0]

    def _samples(self, place: Place, drawn: int) -> Iterator[tuple[Sample, Position]]:
        """Yield the samples behind a position, pass after pass, each with the position behind it. Report at the end of
        a pass what was dropped or changed. Raises `ValueError` if a whole pass has no sample."""
        while True:
            epoch, is_whole = place[0], (place[1:], drawn) == ((0, 0), 0)
            bad, counts, kept = BadRows(self.args.on_bad_row), Counter(), 0
            for row, columns, position in self._shuffled_rows(place, drawn, bad):
                with collect_bad_rows() as reports:
                    samples, changed = self.encode([row], columns)
                bad.errors += chain(*reports)
                counts.update(changed)
                kept += len(samples)
                for sample in samples:
                    sample.row = dict(_source=row["_source"])  # the other columns would go to all ranks
                    yield sample, position
            for reason, count in counts.items():
                print(f"{count} training rows of pass {epoch + 1} {reason}", flush=True)
            bad.report()
            if is_whole:
                require_training_rows(self.args.dataset_flag, kept, counts)
            place, drawn = (epoch + 1, 0, 0), 0

    def _shuffled_rows(self, place: Place, drawn: int, bad: BadRows) -> Iterator[tuple[dict, Columns, Position]]:
        """Yield the rows of a pass behind a position, each with its columns and the position behind it."""
        reader = self._rows(place, bad)
        while buffer := list(islice(reader, self.args.shuffle_buffer)):
            rows, end = [row for row, _ in buffer], buffer[-1][1]
            if pairs := pairs_of("columns", self.args.columns):
                rows = renamed(self.args.dataset_flag, rows, pairs)
            columns = require_columns(self.args.dataset_flag, rows, self.choices, self.args.on_bad_row)
            random.Random(distributed.fold_seed(self.args.seed, *place)).shuffle(rows)
            for number, row in enumerate(rows[drawn:], drawn + 1):
                yield row, columns, (place, number) if number < len(rows) else (end, 0)
            place, drawn = end, 0

    def _rows(self, place: Place, bad: BadRows) -> Iterator[tuple[dict, Place]]:
        """Yield the rows of a pass behind a place, each with the place behind it."""
        (epoch, first_shard, skipped), order = place, list(range(len(self.shards)))
        random.Random(distributed.fold_seed(self.args.seed, epoch)).shuffle(order)
        for shard in range(first_shard, len(order)):
            rows = enumerate(self.shards[order[shard]].read(bad), 1)
            for number, row in islice(rows, skipped, None):
                yield row, (epoch, shard, number)
            skipped = 0

    @property
    def cursor(self) -> dict:
        """Return the number of whole passes, for metrics."""
        return dict(epoch=self.position[0][0], index=0, num_rows=1)

    def state_dict(self) -> dict:
        return dict(place=self.position[0], drawn=self.position[1], num_shards=len(self.shards))

    def load_state_dict(self, state: dict) -> None:
        """Raises `ValueError` for another number of shards: the data has changed."""
        if (before := state["num_shards"]) != (now := len(self.shards)):
            data = self.args.dataset_flag
            raise ValueError(f"{data} has {now} shards, the checkpoint is of {before}: the data has changed")
        self._continue_from(tuple(state["place"]), state["drawn"])


def streamed_shards(dataset: str, args: TrainArgs) -> list[Shard]:
    """Open the training split of a dataset. Raises `ValueError` if there is none."""
    if dataset in TASKS:
        raise ValueError(f"--dataset {dataset}: a built-in task cannot be streamed")
    if (shards := open_shards("--dataset", dataset, args.dataset_split, args.dataset_config, streaming=True)) is None:
        raise ValueError(f"--dataset {dataset} has no split {args.dataset_split!r}: see --dataset_split")
    return shards


def of_rank_0(value: T) -> T:
    """Return the value of rank 0 on every rank. Collective."""
    if distributed.world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]
