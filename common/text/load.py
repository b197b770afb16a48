"""Load and encode the data of the scripts that train on data (`load_samples`): samples of the
training rows and of the held-out rows. Each rank encodes a part of the rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from common.config.extra import extra
from common.config.flags import STRICT, weights_of
from common.config.groups import NO_IMAGES, ImageArgs, TrainArgs
from common.packs.order import Order, make_order
from common.packs.sample import Sample, with_shared_ids, without_shared_ids
from common.parallel import distributed
from common.text.columns import Columns, require_columns, unread_columns
from common.text.encode import Encoder, truncate
from common.text.files import BadRows
from common.text.messages import bad_row
from common.text.rows import require_held_out, train_and_eval_rows

FIRST_ROWS = 20  # look at this many rows to guess what is true of all
ROWS_AT_ONCE = 1000  # a rank encodes this many rows before the ranks exchange their samples

# Each script has a function of this type, which makes the samples of a row.
EncodeRow = Callable[[dict, Columns, Encoder, TrainArgs], list[Sample]]


@dataclass(config=STRICT)
class StreamArgs:
    """Streaming"""

    streaming: bool = False
    """read training rows, from files or the hub, when they are drawn, not all at the start"""

    @model_validator(mode="after")
    def _check_stream(self: Any) -> Any:  # reads flags of `TrainArgs`
        if not self.streaming:
            return self
        if self.max_steps is None:
            raise ValueError("--streaming: the number of rows is unknown; set --max_steps")
        if any(weights_of(self.dataset).values()):
            problem = "data sets are read one after another; omit the weights"
            raise ValueError(f"--streaming {self.dataset_flag}: {problem}")
        if self.eval_every and self.eval_dataset is None:
            advice = "name an --eval_dataset, or set --eval_every 0"
            raise ValueError(f"--streaming sets no rows aside; {advice}")
        return self


class Samples(Sequence):
    """The samples of each row, as a sequence. Item i has the samples of `rows[i]`; `make(i)` makes
    them each time they are read. Held-out samples also have `all_rows`: all rows of the data, even
    those without a sample."""

    def __init__(
        self, rows: list[dict], make: Callable[[int], list[Sample]], all_rows: Sequence[dict] = ()
    ):
        self.rows = rows
        self.make = make
        self.all_rows = all_rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int | slice) -> list:
        numbers = range(len(self))
        if isinstance(i, slice):
            return [self.make(k) for k in numbers[i]]
        return self.make(numbers[i])  # raises IndexError

    def order(self, args: TrainArgs) -> Order:
        return make_order(self.rows, args)


def load_samples(
    encode_row: EncodeRow, choices: Sequence[Columns], tokenizer, args: TrainArgs,
    optional: Sequence[str] = (), stream: bool = False, apart: bool = False,
    image_args: ImageArgs = NO_IMAGES,
) -> list[tuple[Samples, Counter]]:  # fmt: skip
    """Return the samples of the training rows and those of the held-out rows. With each comes a
    counter: how many rows were dropped or changed, by reason. With `stream`, training rows are read
    only when they are drawn.

    `encode_row(row, columns, encoder, args)` makes the group of samples of a row. `columns` are one
    of the `choices` (see `choose_columns`), and each of `optional` that some row has. If one
    sample of a group must be dropped, the whole group is; with `apart`, only this sample. Raises
    `ValueError` for a bad row, and if no row is left. Collective."""
    if stream:
        with extra("streaming", "--streaming"):
            from extras.streaming.streaming import load_stream
        return load_stream(encode_row, choices, Encoder(tokenizer, args, image_args), args, apart)
    train, held_out = train_and_eval_rows(args)
    columns = require_columns(args.dataset_flag, [*train, *held_out], choices)
    say_unread(train, (*columns, *optional))
    encoder = Encoder(tokenizer, args, image_args)
    loaded = []
    for rows in (train, held_out):
        found = [name for name in optional if any(name in row for row in rows)]
        loaded.append(encode_all(encode_row, rows, (*columns, *found), encoder, args, apart))
    (samples, counts), (held_out_samples, held_out_counts) = loaded
    if not samples:
        raise ValueError(f"{args.dataset_flag}: no rows are left: {reasons(counts)}")
    require_held_out(held_out, held_out_samples.rows, f": {reasons(held_out_counts)}")
    held_out_samples = Samples(held_out_samples.rows, held_out_samples.make, held_out)
    return [(samples, counts), (held_out_samples, held_out_counts)]


def say_unread(rows: list[dict], columns: Columns) -> None:
    """Print the columns of the data that the script does not read, and warn of answers that repeat
    their prompts."""
    if unread := unread_columns(rows, columns):
        distributed.say(f"not used in training: {', '.join(unread)}")
    if columns[0] != "chosen":
        _say_repeated(rows, *columns)


def _say_repeated(rows: list[dict], prompt: str, *answers: str) -> None:
    """Warn of a column of answers if all answers in the first rows begin with their prompts."""
    for answer in answers:
        texts = [(row.get(prompt), row.get(answer)) for row in rows[:FIRST_ROWS]]
        texts = [pair for pair in texts if all(isinstance(x, str) and x.strip() for x in pair)]
        if texts and all(answered.strip().startswith(asked.strip()) for asked, answered in texts):
            problem = f"column {answer} begins with column {prompt}, so this stands there twice"
            distributed.say(f"warning: {problem}; take it out of {answer}")


def encode_all(
    encode_row: EncodeRow, rows: list[dict], columns: Columns, encoder: Encoder, args: TrainArgs,
    apart: bool = False,
) -> tuple[Samples, Counter]:  # fmt: skip
    """Return the samples of all rows, and how many rows were dropped or changed, by reason. Every
    rank encodes a part of the rows, and gets the samples of all. If there is a bad row, every rank
    raises the error of the first. Collective."""
    groups: list[list[Sample]] = []
    counts: Counter = Counter()
    bad = BadRows(args.on_bad_row)
    rows_of_ranks = ROWS_AT_ONCE * distributed.world_size()
    for start in range(0, len(rows), rows_of_ranks):
        first = start + ROWS_AT_ONCE * distributed.rank()
        own = []
        for row in rows[first : first + ROWS_AT_ONCE]:
            try:
                own.append(encode(encode_row, row, columns, encoder, args, apart))
            except ValueError as error:
                own.append(error)
        parts = distributed.gather_objects(own)
        for encoded, row in zip(chain(*parts), rows[start : start + rows_of_ranks], strict=True):
            if isinstance(encoded, ValueError):
                bad.add(encoded, row["_source"])
                continue
            group, notes = encoded
            counts.update(notes)
            if group:
                groups.append([replace(s, row=s.row or row) for s in group])
    for kind, note in distributed.gather_dict(encoder.said).items():
        encoder.say_once(note, kind)
    bad.report()
    # The row of the last sequence of a conversation names all its images.
    rows_of_groups = [group[-1].row for group in groups]
    return Samples(rows_of_groups, lambda i: with_shared_ids(groups[i])), counts


def encode(
    encode_row: EncodeRow, row: dict, columns: Columns, encoder: Encoder, args: TrainArgs,
    apart: bool = False,
) -> tuple[list[Sample], list[str]]:  # fmt: skip
    """Return the samples of a row, with at most `--max_length` tokens each, and notes: how the row
    was changed or, if there are no samples, why it was dropped. Raises `ValueError` for a bad row.

    To save memory, the first ids that a sample shares with the sample before it are left out
    (`with_shared_ids` puts them back). So is the sample's row if it equals `row`."""
    group = encode_row(dict(row), columns, encoder, args)
    notes = []
    length = max((len(sample.ids) for sample in group), default=0)
    if length > args.max_length:
        if args.overlong == args.on_bad_row == "error":
            problem = f"{length} tokens exceed --max_length {args.max_length}"
            raise bad_row(row, f"{problem}; set --overlong drop or truncate")
        if args.overlong == "truncate":
            notes.append("truncated (--max_length)")
            group = [truncate(sample, args.max_length) for sample in group]
        elif apart and (short := [x for x in group if len(x.ids) <= args.max_length]):
            notes.append("with turns dropped as too long (--max_length)")
            group = short
        else:
            return [], ["dropped as too long (--max_length)"]
    trained = [sample for sample in group if any(sample.loss_mask[1:])]  # nothing predicts id 0
    if not trained or (len(trained) < len(group) and not apart):
        return [], ["dropped because no token is trained"]
    if len(group) == 2 and not apart and group[0].ids == group[1].ids:
        return [], ["with chosen = rejected, dropped"]
    notes += [f"with turns left out: {why}" for why in dict.fromkeys(group[0].turns_left_out)]
    unknown = encoder.tokenizer.unk_token_id  # for GPT-2 this is its EOS
    if unknown != encoder.tokenizer.eos_token_id and any(unknown in s.ids for s in group):
        notes.append("with characters that the tokenizer lacks")
    rows = [{} if sample.row == row else sample.row for sample in trained]
    pairs = zip(without_shared_ids(trained), rows, strict=True)
    return [replace(s, row=own) for s, own in pairs], notes


def reasons(counts: Counter) -> str:
    """Return the counts as text: `3 dropped as too long, 1 truncated`. Bad rows have no count."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "all are bad"
