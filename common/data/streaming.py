"""`--streaming`: training rows that are read as they are needed, of files or of the hub, never all of them.

Rank 0 reads and tokenises; the others get each batch from it. Rows stand in shards: files, or those of a hub data set.
A pass takes the shards in an order drawn from (seed, epoch), reads `--shuffle_buffer` rows ahead and draws those in an
order drawn from (seed, where they begin). So the cursor is small: a run that resumes reads once more the rows that were
read ahead, and goes on behind those of them that were drawn.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist

from common.config.flags import BaseArgs, Positive, pairs_of, weights_of
from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.files import BadRows, shards_of, untold_bad_rows
from common.data.packing import Sample
from common.data.rows import held_out_rows, renamed, require_columns
from common.data.tokenize import require_left, require_some
from common.parallel import distributed

T = TypeVar("T")


@dataclass
class StreamArgs(BaseArgs):
    """Flags of data that is read as it comes."""

    streaming: bool = False
    """read training rows when they are needed, also from the hub, with neither disk nor memory for all of them"""
    shuffle_buffer: Positive[int] = 10_000
    """with --streaming: rows that are read ahead and drawn in random order"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_read("shuffle_buffer", self.streaming, "there is no --streaming")
        if not self.streaming:
            return
        if self.max_steps is None:
            raise ValueError("--streaming needs --max_steps: how many rows there are is not known")
        if any(weights_of(self.dataset).values()):
            raise ValueError(f"--streaming: {self.dataset_flag}: datasets are read one after another, without weights")
        if self.eval_every and self.eval_dataset is None:
            raise ValueError("--streaming sets no rows aside: name an --eval_dataset, or --eval_every 0")


class Stream:
    """Samples of rows that are read when they are drawn, and the order in which they are: `samples[i]` is for the
    numbers that the last `draw` gave. Its state is every rank's."""

    many = "a stream of"  # training rows

    def __init__(self, encode: Callable[..., tuple[list[Sample], Counter]], choices: Sequence[tuple[str, ...]], args):
        """`encode(rows, columns)`, the columns being the first of `choices` that the first rows have. Raises
        `ValueError` if there is no such data."""
        self.encode, self.choices, self.args = encode, choices, args
        self.shards = [
            shard
            for dataset in args.dataset
            for shard in shards_of("--dataset", dataset, args.dataset_split, args.dataset_config)
        ]
        self.place = -1, 0, 0  # epoch, shard by its place in the epoch, and row, where the rows read ahead begin
        self._go_to((0, 0, 0), 0)

    def _go_to(self, place: tuple[int, int, int], drawn: int) -> None:
        """To the rows that are read ahead from there, of which so many were drawn."""
        if place != self.place:
            self.reader: Iterator[tuple[int, int, dict]] | None = None
            self.ahead: list[dict] = []
        self.place, self.drawn = place, drawn
        self.batch: list[Sample] = []
        self.whole = place[1:] == (0, 0) and not drawn  # what follows is of this pass, or of what is left of it
        self.kept, self.counts, self.bad = 0, Counter(), BadRows(self.args.on_bad_row)

    def order(self, args: TrainArgs) -> "Stream":
        """Its own."""
        return self

    def __getitem__(self, i: int) -> Sample:
        if self.batch:
            return self.batch[i]
        state = self.state_dict()  # nothing is drawn yet: a look ahead
        self.draw(1)
        (sample,) = self.batch
        self.load_state_dict(state)
        return sample

    def draw(self, count: int) -> range:
        """The numbers of the next `count` samples; goes on into the next pass where this one ends. Collective."""
        batch: list[Sample] = []
        while distributed.is_main() and len(batch) < count:
            batch += self._encoded(self._next())
        self.batch, self.place, self.drawn = _of_rank_0((batch, self.place, self.drawn))
        return range(count)

    def _encoded(self, row: dict) -> list[Sample]:
        """The sample of a row, or none."""
        with untold_bad_rows() as told:
            samples, counts = self.encode([row], self.columns)
        for kind, errors in (item for found in told for item in found.items()):
            self.bad.found.setdefault(kind, []).extend(errors)
        self.counts.update(counts)
        self.kept += len(samples)
        for sample in samples:
            sample.row = dict(_source=row["_source"])  # the rest would go to all ranks
        return samples

    def _next(self) -> dict:
        if self.reader is None:
            self._read_ahead()
        while self.drawn >= len(self.ahead):
            if self.ahead:
                self.place, self.drawn = self.behind, 0
            else:
                self._end_pass()
            self._read_ahead()
        self.drawn += 1
        return self.ahead[self.drawn - 1]

    def _read_ahead(self) -> None:
        """The next `--shuffle_buffer` rows, in the order in which they are drawn; none at the end of a pass."""
        if self.reader is None:
            self.reader = self._rows()
        read = list(islice(self.reader, self.args.shuffle_buffer))
        self.ahead = [row for _, _, row in read]
        if not read:
            return
        self.behind = self.place[0], *read[-1][:2]
        if pairs := pairs_of("columns", self.args.columns):
            self.ahead = renamed(self.args.dataset_flag, self.ahead, pairs)
        self.columns = require_columns(self.args.dataset_flag, self.ahead, self.choices, self.args.on_bad_row)
        seed = distributed.fold_seed(self.args.seed, *self.place)
        random.Random(seed).shuffle(self.ahead)

    def _rows(self) -> Iterator[tuple[int, int, dict]]:
        """The rows that are left of this pass, each with the place of its shard and its number there, from 1."""
        order, (epoch, first, skipped) = list(range(len(self.shards))), self.place
        random.Random(distributed.fold_seed(self.args.seed, epoch)).shuffle(order)
        for place in range(first, len(order)):
            rows = enumerate(self.shards[order[place]](self.bad), 1)
            for number, row in islice(rows, skipped, None):
                yield place, number, row
            skipped = 0

    def _end_pass(self) -> None:
        for reason, count in self.counts.items():
            print(f"{count} training rows of pass {self.place[0] + 1} {reason}", flush=True)
        self.bad.tell()
        if self.whole:
            require_some(self.args.dataset_flag, self.kept, self.counts)
        self._go_to((self.place[0] + 1, 0, 0), 0)

    @property
    def cursor(self) -> dict:
        """For metrics: whole passes."""
        return dict(epoch=self.place[0], index=0, num_rows=1)

    def state_dict(self) -> dict:
        return dict(place=self.place, drawn=self.drawn, num_shards=len(self.shards))

    def load_state_dict(self, state: dict) -> None:
        """Raises `ValueError` if there were more or fewer shards: the data has changed."""
        if state["num_shards"] != len(self.shards):
            was, now = state["num_shards"], len(self.shards)
            raise ValueError(f"the checkpoint is of {was} shards, now {self.args.dataset_flag} has {now}: other data")
        self._go_to(tuple(state["place"]), state["drawn"])


def _of_rank_0(value: T) -> T:
    if distributed.world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def stream(
    encode_rows: Callable[..., tuple[list[Sample], Counter]], choices: Sequence[tuple[str, ...]], tokenizer, args
) -> list[tuple[Stream | list[Sample], Counter]]:
    """Training samples as a stream, what happens to rows being told at the end of each pass; and the held-out ones."""
    encode = partial(encode_rows, encoder=Encoder(tokenizer, args), args=args)
    held_out: tuple[list[Sample], Counter] = [], Counter()
    if args.eval_every:
        rows = held_out_rows(args)
        flag = f"--eval_dataset {' '.join(args.eval_dataset)}"
        held_out = encode(rows, require_columns(flag, rows, choices, args.on_bad_row))
        require_left(rows, (sample.row for sample in held_out[0]), held_out[1])
    training = Stream(encode, choices, args)
    training[0]  # what is wrong with the data is said before the model is loaded
    return [(training, Counter()), held_out]
