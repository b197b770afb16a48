"""`--streaming`: training rows that are read when they are drawn, from files or the hub.

Rank 0 reads and tokenises; the other ranks get each batch from it. A pass reads the shards (files,
or shards of a hub dataset) in an order drawn from (seed, epoch), `SHUFFLE_BUFFER` rows at a time,
and shuffles these by (seed, place of the first row). The position of a run is this place and the
number of rows drawn from the buffer. A resumed run reads the buffer again and continues behind
those rows."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.files import BadRows, Shard, collect_bad_rows
from common.data.load import EncodeRows, Samples, in_memory, require_held_out_samples
from common.data.rows import (
    Columns,
    held_out_rows,
    rename_columns,
    require_columns,
    require_training_rows,
)
from common.data.sample import Sample
from common.data.shards import open_shards
from common.data.tasks import TASKS
from common.parallel import distributed

SHUFFLE_BUFFER = 10_000  # rows that are read ahead and drawn in random order

# epoch, shard by its place in the epoch, and number of rows of the shard before
Place = tuple[int, int, int]
# position of a run: the place of the shuffle buffer, and the number of rows drawn from it
Position = tuple[Place, int]


def load_stream(
    encode_rows: EncodeRows, choices: Sequence[Columns], tokenizer, args
) -> list[tuple["StreamedSamples | Samples", Counter]]:
    """Return a stream of training samples, whose counts are empty, and held-out samples in memory,
    see `load_samples`. Collective."""
    encoder = Encoder(tokenizer, args)

    def encode(rows: list[dict], columns: Columns):
        return encode_rows(rows, columns, encoder, args)

    held_out = in_memory([], Counter(), [])
    if args.eval_every:
        rows = held_out_rows(args)
        flag = f"--eval_dataset {' '.join(args.eval_dataset)}"
        columns = require_columns(flag, rows, choices, args.on_bad_row)
        held_out = in_memory(*encode(rows, columns), rows)
        require_held_out_samples(held_out)
    training = StreamedSamples(encode, choices, args)
    training[0]  # reports bad data before the model is loaded
    return [(training, Counter()), held_out[:2]]


class StreamedSamples:
    """Samples of rows that are read when they are drawn, and their order. `samples[i]` takes the
    numbers that the last `draw` returned. Every rank has the same position."""

    num_rows = "a stream of"  # training rows

    def __init__(
        self, encode: Callable[..., tuple[list[Sample], Counter]], choices: Sequence[Columns], args
    ):
        """`encode(rows, columns)` gets the first of `choices` that the rows of a shuffle buffer
        have. Raises `ValueError` if there is no such data."""
        self.encode = encode
        self.choices = choices
        self.args = args
        self.shards = list(chain(*(_training_shards(dataset, args) for dataset in args.dataset)))
        self._continue_from((0, 0, 0), 0)

    def _continue_from(self, place: Place, drawn: int) -> None:
        self.position = (place, drawn)
        self.samples = self._samples(place, drawn)
        self.batch: list[Sample] = []

    def order(self, args: TrainArgs) -> "StreamedSamples":
        return self

    def draw(self, count: int) -> range:
        """Draw the next `count` samples, across the end of a pass; return their numbers.
        Collective."""
        if distributed.is_main():
            drawn = list(islice(self.samples, count))
            self.batch = [sample for sample, _ in drawn]
            _, self.position = drawn[-1]
        self.batch, self.position = distributed.from_main((self.batch, self.position))
        return range(count)

    def __getitem__(self, i: int) -> Sample:
        """Return a drawn sample; before the first draw the next sample, without drawing it. Then it
        is collective."""
        if self.batch:
            return self.batch[i]
        ahead = [next(self.samples)] if distributed.is_main() else []
        self.samples = chain(ahead, self.samples)
        (sample,) = distributed.from_main([sample for sample, _ in ahead])
        return sample

    def _samples(self, place: Place, drawn: int) -> Iterator[tuple[Sample, Position]]:
        """Yield the samples behind a position, pass after pass, each with the position behind it.
        Report at the end of a pass what was dropped or changed. Raises `ValueError` if a whole pass
        has no sample."""
        while True:
            epoch = place[0]
            begun = [*place[1:], drawn]
            bad = BadRows(self.args.on_bad_row)
            counts = Counter()
            kept = 0
            for row, columns, position in self._shuffled_rows(place, drawn, bad):
                with collect_bad_rows() as reports:
                    samples, changed = self.encode([row], columns)
                bad.errors += chain(*reports)
                counts.update(changed)
                kept += len(samples)
                for sample in samples:
                    # the other columns would go to all ranks
                    names = {"_source", "_images"} & sample.row.keys()
                    sample.row = {name: sample.row[name] for name in names}
                    yield sample, position
            for reason, count in counts.items():
                print(f"{count} training rows of pass {epoch + 1} {reason}", flush=True)
            bad.report()
            if not any(begun):  # a whole pass
                require_training_rows(self.args.dataset_flag, kept, counts)
            place = (epoch + 1, 0, 0)
            drawn = 0

    def _shuffled_rows(
        self, place: Place, drawn: int, bad: BadRows
    ) -> Iterator[tuple[dict, Columns, Position]]:
        """Yield the rows of a pass behind a position, each with its columns and the position behind
        it."""
        reader = self._rows(place, bad)
        while buffer := list(islice(reader, SHUFFLE_BUFFER)):
            _, end = buffer[-1]
            flag = self.args.dataset_flag
            rows = rename_columns(flag, [row for row, _ in buffer], self.args.columns)
            columns = require_columns(flag, rows, self.choices, self.args.on_bad_row)
            random.Random(distributed.fold_seed(self.args.seed, *place)).shuffle(rows)
            for number, row in enumerate(rows[drawn:], drawn + 1):
                yield row, columns, (place, number) if number < len(rows) else (end, 0)
            place = end
            drawn = 0

    def _rows(self, place: Place, bad: BadRows) -> Iterator[tuple[dict, Place]]:
        """Yield the rows of a pass behind a place, each with the place behind it."""
        epoch, first_shard, skipped = place
        order = list(range(len(self.shards)))
        random.Random(distributed.fold_seed(self.args.seed, epoch)).shuffle(order)
        for shard in range(first_shard, len(order)):
            rows = enumerate(self.shards[order[shard]].rows(bad), 1)
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
        before = state["num_shards"]
        now = len(self.shards)
        if before != now:
            problem = f"has {now} shards, the checkpoint is of {before}: the data has changed"
            raise ValueError(f"{self.args.dataset_flag} {problem}")
        self._continue_from(tuple(state["place"]), state["drawn"])


def _training_shards(dataset: str, args: TrainArgs) -> list[Shard]:
    """Open the training split of a dataset. Raises `ValueError` if there is none."""
    flag = f"--dataset {dataset}"
    if dataset in TASKS:
        raise ValueError(f"{flag}: a built-in task cannot be streamed")
    split = args.dataset_split
    shards = open_shards("--dataset", dataset, split, args.dataset_config, streaming=True)
    if shards is None:
        raise ValueError(f"{flag} has no split {split!r}: see --dataset_split")
    return shards
