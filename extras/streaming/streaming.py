"""`--streaming`: training rows are read, from files or the hub, when a step draws them.

Rank 0 reads and tokenises, and hands each batch to the other ranks. A pass reads the shards (files,
or data sets of the hub) in an order drawn from (seed, pass), `SHUFFLE_BUFFER` rows at a time, and
shuffles these. A run's position is its pass and the number of rows drawn in it. A resumed run reads
that pass again from its start, but tokenises only the rows after its position."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from common.config.groups import TrainArgs
from common.packs.sample import Sample, with_shared_ids
from common.parallel import distributed
from common.text.columns import (
    Columns,
    prompt_digest,
    rename_columns,
    require_all_read,
    require_columns,
    require_old_names,
)
from common.text.encode import Encoder
from common.text.files import TASKS, BadRows, open_split
from common.text.load import EncodeRow, Samples, encode, encode_all, reasons, say_unread
from common.text.rows import require_held_out, rows_of_eval_sets
from common.train.inputs import digest_of_file

SHUFFLE_BUFFER = 10_000  # rows that are read ahead and shuffled
ALL_BLOCKS = 4096  # blocks that are read for the digests of all files together
LEAST_BLOCKS = 3  # but at least so many of each file


def load_stream(
    encode_row: EncodeRow, choices: Sequence[Columns], encoder: Encoder, args, apart: bool
) -> list[tuple[Any, Counter]]:
    """Return a stream of training samples and the held-out samples in memory, each with counts of
    dropped rows (those of the stream are empty), as `load_samples` does. Collective. Raises
    `ValueError` for bad data at the start of the stream."""
    rows = rows_of_eval_sets(args) if args.eval_every else []
    stream = StreamedSamples(encode_row, choices, encoder, args, apart, rows)
    rows = rename_columns(rows, args.columns)
    held_out, counts = encode_all(encode_row, rows, stream.columns, encoder, args, apart)
    require_held_out(rows, held_out.rows, f": {reasons(counts)}")
    return [(stream, Counter()), (Samples(held_out.rows, held_out.make, rows), counts)]


class StreamedSamples:
    """Training samples that are read when they are drawn, in groups, one per row. The stream is
    also its own order: `draw` reads the next groups, and `samples[i]` takes the numbers that it
    returned; at first, `samples[0]` is the first group. All ranks have the same position."""

    rows = ()  # unknown at the start

    def __init__(
        self, encode_row: EncodeRow, choices: Sequence[Columns], encoder: Encoder, args,
        apart: bool, held_out: Sequence[dict] = (),
    ):  # fmt: skip
        """The first `SHUFFLE_BUFFER` rows, together with `held_out`, rows in memory under the
        data's own names of columns, decide which of `choices` is read."""
        self.encode_row = encode_row
        self.apart = apart
        self.choices = choices
        self.encoder = encoder
        self.args = args
        self.columns: Columns | None = None
        self.held_out = held_out
        self.held_out_prompts = {*map(prompt_digest, rename_columns(held_out, args.columns))}
        self.shards = []
        options = dict(streaming=True, is_alone=len(args.dataset) == 1)
        split = args.dataset_split
        for dataset in args.dataset:
            flag = f"--dataset {dataset}"
            if dataset in TASKS:
                raise ValueError(f"{flag}: a built-in task cannot be streamed")
            shards = open_split("--dataset", dataset, split, args.dataset_config, **options)
            if shards is None:
                raise ValueError(f"{flag} has no split {split!r}: see --dataset_split")
            self.shards += shards
        self.files = distributed.from_main(self._digests() if distributed.is_main() else None)
        self._continue_from(0, 0)
        self.draw(1)
        self.columns = distributed.from_main(self.columns)
        self._continue_from(0, 0)

    def _continue_from(self, epoch: int, drawn: int) -> None:
        self.position = (epoch, drawn)
        self._begin_counts()
        self.groups = self._groups(epoch, drawn)

    def order(self, args: TrainArgs) -> "StreamedSamples":
        return self

    def draw(self, count: int) -> range:
        """Read the next `count` groups, also across the end of a pass. Return their numbers.
        Collective."""
        self.batch = []
        if distributed.is_main():
            drawn = [*islice(self.groups, count)]
            self.batch = [group for group, _ in drawn]
            _, self.position = drawn[-1]
        self.batch, self.position = distributed.from_main((self.batch, self.position))
        return range(count)

    def __getitem__(self, i: int) -> list[Sample]:
        return with_shared_ids(self.batch[i])

    def _begin_counts(self) -> None:
        self.bad = BadRows(self.args.on_bad_row)
        self.counts: Counter = Counter()
        self.reported: tuple[int, Counter] = (0, Counter())

    def _report(self, when: str) -> None:
        """Print how many rows of this pass were dropped or changed, if that is news."""
        if self.reported != (now := (len(self.bad.errors), self.counts.copy())):
            for reason, rows in self.counts.items():
                print(f"{rows} training rows {when} {reason}", flush=True)
            self.bad.report()
        self.reported = now

    def _groups(self, epoch: int, drawn: int) -> Iterator[tuple[list[Sample], tuple[int, int]]]:
        """Yield the groups after a position, pass after pass, each with the position behind it.
        Report what a pass dropped or changed at its end. Raises `ValueError` if a whole pass has no
        group."""
        for number in count(epoch):
            kept = drawn
            for place, row in enumerate(self._rows(number), 1):
                if place <= drawn:
                    continue
                try:
                    group, notes = encode(
                        self.encode_row, row, self.columns, self.encoder, self.args, self.apart
                    )
                except ValueError as error:
                    self.bad.add(error, row["_source"])
                    continue
                self.counts.update(notes)
                if self.held_out_prompts and prompt_digest(row) in self.held_out_prompts:
                    self.counts["have the prompt of a held-out row"] += 1
                if group:
                    kept += 1
                    for sample in group:  # it goes to all ranks, without the other columns
                        of_sample = sample.row or row
                        names = {"_source", "_images"} & of_sample.keys()
                        sample.row = {name: of_sample[name] for name in names}
                    yield group, (number, place)
            self._report(f"of pass {number + 1}")
            if not kept:
                problem = f"no rows are left: {reasons(self.counts)}"
                raise ValueError(f"{self.args.dataset_flag}: {problem}")
            drawn = 0
            self._begin_counts()

    def _rows(self, epoch: int) -> Iterator[dict]:
        """Yield the rows of a pass. Raises `ValueError` for a row whose columns are of another kind
        than those of the first rows."""
        draw = random.Random(distributed.fold_seed(self.args.seed, epoch))
        shards = draw.sample(self.shards, len(self.shards))
        reader = chain.from_iterable(shard.rows(self.bad) for shard in shards)
        flag = self.args.dataset_flag
        while buffer := [*islice(reader, SHUFFLE_BUFFER)]:
            rows = rename_columns(buffer, self.args.columns)
            if self.columns is None:
                self.columns = self._choose_columns(buffer, rows)
            require_all_read(flag, rows, self.columns)
            draw.shuffle(rows)
            yield from rows

    def _choose_columns(self, buffer: list[dict], rows: list[dict]) -> Columns:
        flag = self.args.dataset_flag
        # A mapping in --columns may concern only one of several files.
        others = (row for shard in self.shards for row in islice(shard.rows(BadRows("skip")), 1))
        require_old_names(flag, chain(buffer, self.held_out, others), self.args.columns)
        held_out = rename_columns(self.held_out, self.args.columns)
        columns = require_columns(flag, [*rows, *held_out], self.choices)
        say_unread(rows, columns)
        return columns

    def epochs(self) -> dict[str, float]:
        """Return the number of finished passes, as a metric."""
        return dict(epoch=self.position[0])

    def state_dict(self) -> dict:
        """Return the position, and report what was dropped up to there."""
        self._report(f"of pass {self.position[0] + 1} so far")
        return dict(position=self.position, num_shards=len(self.shards), files=self.files)

    def _digests(self) -> dict[str, str]:
        """Return the digests of all shards that are files; data sets of the hub have none."""
        files = [shard.content for shard in self.shards if isinstance(shard.content, Path)]
        blocks = max(LEAST_BLOCKS, ALL_BLOCKS // max(1, len(files)))
        return {str(file): digest_of_file(file, blocks) for file in files}

    def load_state_dict(self, state: dict) -> None:
        """Continue at a position. Raises `ValueError` for other files or shards. Collective."""
        if "position" not in state:
            problem = "the checkpoint is of an older version; --resume never begins anew"
            raise ValueError(f"{self.args.dataset_flag}: {problem}")
        before = state["num_shards"]
        now = len(self.shards)
        if before != now:
            problem = f"has {now} shards, the checkpoint is of {before}: the data has changed"
            raise ValueError(f"{self.args.dataset_flag} {problem}")
        for file, digest in state.get("files", {}).items():
            if self.files.get(file, digest) != digest:
                problem = f"{file} is not as it was when the run began"
                advice = "restore it, or start over with --resume never"
                raise ValueError(f"{self.args.dataset_flag}: {problem}; {advice}")
        self._continue_from(*state["position"])
