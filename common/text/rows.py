"""Datasets -> training rows and held-out rows, and the columns that a script reads.

A row is a dict of the dataset's columns, `_source` (`train.jsonl:17`), which is in every error
about the row, and `_dataset` if metrics are split by dataset. Every rank reads all rows."""

import hashlib
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import TypeVar

from common.config.flags import datasets_by_name, eval_sets_of, pairs_of, sources_of, weights_of
from common.config.groups import BaseArgs, TrainArgs
from common.parallel import distributed
from common.text.files import ADDED_COLUMNS, BadRows, Shard, files_named, open_split, splits_of
from common.text.tasks import TASKS

T = TypeVar("T")
Columns = tuple[str, ...]  # names of columns that a script reads together

# Columns of each kind of script. A script uses the first of its choices that the dataset has.
SFT_COLUMNS = (
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("text",),
    ("input", "output"),
    ("conversations",),
)
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (
    ("prompt", "completion", "label"),
    ("messages", "label"),
    ("conversations", "label"),
)
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # online scripts sample from these
# The encoder reads these beside the others.
READ_TOO = ("tools", "system", "system_prompt", "chat_template_kwargs", "image", "images")
# By its name, a column is a part of what the model was asked, or of what it answered.
ASKED = tuple(
    "prompt messages conversations instruction instructions question problem query input inputs"
    " context contexts history document documents passage passages options choices".split()
)
ANSWERED = ("completion", "reasoning", "thinking")
CONVERSATIONS = ("messages", "conversations")
PROMPT_PARTS = (*ASKED, "system", "system_prompt", "image", "images")
OUR_COLUMNS = ("_source", *ADDED_COLUMNS)
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


def load_rows(flag: str, dataset: str, split: str, args: BaseArgs) -> list[dict] | None:
    """Read all rows of a split, under the data's own names of columns; None if the dataset has no
    such split. Raises `ValueError` naming `flag`, the file or the row."""
    is_alone = len(args.dataset) == 1
    shards = open_split(flag, dataset, split, args.dataset_config, is_alone=is_alone)
    return None if shards is None else _read(f"{flag} {dataset}", shards, args)


def _open(flag: str, dataset: str, split_flag: str, split: str, args: BaseArgs) -> list[Shard]:
    is_alone = len(args.dataset) == 1
    shards = open_split(flag, dataset, split, args.dataset_config, is_alone=is_alone)
    if shards is None:
        raise ValueError(f"{flag} {dataset} has no split {split!r}: see {split_flag}")
    return shards


def _read(label: str, shards: list[Shard], args: BaseArgs) -> list[dict]:
    bad = BadRows(args.on_bad_row)
    rows = [row for shard in shards for row in shard.rows(bad)]
    bad.report()
    if not rows:
        raise ValueError(f"{label}: {'every row was skipped' if bad.errors else 'no rows in it'}")
    return rows


def rows_of_split(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: BaseArgs,
    whole_file: bool = False,
) -> list[dict]:  # fmt: skip
    """Read the rows of a split of several datasets, with columns renamed; with `whole_file` all
    rows of files, whatever the split. Raises `ValueError` naming `split_flag` if a dataset has no
    such split."""
    rows = _own_rows(flag, datasets, split_flag, split, args, whole_file)
    require_old_names(f"{flag} {' '.join(datasets)}", rows, args.columns)
    return rename_columns(rows, args.columns)


def _own_rows(
    flag: str, datasets: Sequence[str], split_flag: str, split: str, args: BaseArgs,
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


# ---- --columns new=old ----


def rename_columns(rows: list[dict], columns: Sequence[str]) -> list[dict]:
    """Return rows with columns renamed as new=old, each row that has the old column. An old name
    may lead into a column: `reward_model.ground_truth`. Raises `ValueError` if a row has a new name
    already."""
    old_names = pairs_of("columns", columns)
    return [_renamed(row, old_names) for row in rows] if old_names else rows


def _renamed(row: dict, old_names: dict[str, str]) -> dict:
    renamed = {new: value for new, old in old_names.items() for value in _found(row, old)}
    kept = {name: value for name, value in row.items() if name not in old_names.values()}
    for new in (name for name in renamed if name in kept):
        pair = f"--columns {new}={old_names[new]}"
        advice = f"{pair} _{new}={new} ignores that one"
        raise ValueError(f"{pair}: {row['_source']} has a column {new} already; {advice}")
    return kept | renamed


def _found(value: object, name: str) -> list:
    """Return [the value of this name], or []. A name that no key is leads inside: its parts between
    dots are keys, or numbers of members from 0."""
    if isinstance(value, list):
        value = {str(i): member for i, member in enumerate(value)}
    if not isinstance(value, dict):
        return []
    if name in value:
        return [value[name]]
    dots = [i for i, character in enumerate(name) if character == "."]
    inside = (_found(value[name[:i]], name[i + 1 :]) for i in dots if name[:i] in value)
    return next(filter(None, inside), [])


def require_old_names(data: str, rows: Iterable[dict], columns: Sequence[str]) -> None:
    """Raise `ValueError` for a pair new=old of `--columns` if no row has the old name, or if the
    new one is ours. Reads rows until all are found."""
    missing = pairs_of("columns", columns)
    for new in (name for name in missing if name in OUR_COLUMNS):
        raise ValueError(f"--columns {new}={missing[new]}: {data} has a column {new} already")
    values: dict[str, object] = {}  # an example of each column
    for row in rows if missing else ():
        values |= {name: value for name, value in row.items() if values.get(name) is None}
        missing = {new: old for new, old in missing.items() if not _found(row, old)}
        if not missing:
            return
    for new, old in missing.items():
        there = f"{data} has {', '.join(name for name in values if name not in OUR_COLUMNS)}"
        outer = old.partition(".")[0]
        if outer != old and outer in values:
            value = values[outer]
            keys = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
            there = f"{outer} is {'an object with ' if isinstance(value, dict) else ''}{keys}"
        raise ValueError(f"--columns {new}={old}: no column {old}; {there}")


# ---- training and held-out rows ----


def train_and_eval_rows(args: TrainArgs) -> tuple[list[dict], list[dict]]:
    """Read the training rows and at most `--eval_size` held-out rows. The two are disjoint:
    held-out rows are from each `--eval_dataset`, from the dataset's own `--eval_split`, or removed
    from the training rows. A line says how many have a prompt that is trained too.

    Datasets with weights have equal parts of the held-out rows. The column `_dataset` names the
    dataset of a row if training datasets have weights, and the held-out set if there are several or
    it has a name. With `--eval_every 0` there are no held-out rows."""
    sources = {name: datasets for name, (datasets, _) in sources_of(args.dataset).items()}
    size = args.eval_size or EVAL_SIZE
    if args.eval_every and size < len(sources):
        problem = f"less than one row for each of {len(sources)} datasets"
        raise ValueError(f"--eval_size {size}: {problem}; raise it or set --eval_every 0")
    splits = ("--dataset_split", args.dataset_split, args)
    shards = {dataset: _open("--dataset", dataset, *splits) for dataset in weights_of(args.dataset)}
    train: dict[str, list[dict]] = {}
    held_out: dict[str, list[dict]] = {}
    for name, datasets in sources.items():
        train[name] = [row for x in datasets for row in _read(f"--dataset {x}", shards[x], args)]
        if args.eval_every and args.eval_dataset is None:
            held_out[name] = _own_split(datasets, args)
    eval_sets = rows_of_eval_sets(args) if args.eval_every and args.eval_dataset else []
    everything = [*chain(*train.values(), *held_out.values(), eval_sets)]
    require_old_names(args.dataset_flag, everything, args.columns)
    for name, rows in train.items():
        train[name] = rename_columns(rows, args.columns)
    are_apart = len(sources) == 1  # the prompts of both sides
    for name, rows in held_out.items():
        if rows:
            are_apart = False
            # not --seed: runs with other seeds are evaluated on the same rows
            chosen = random.Random(0).sample(rows, min(size // len(sources), len(rows)))
            held_out[name] = rename_columns(chosen, args.columns)
        else:
            train[name], held_out[name], is_by_prompt = _set_aside(
                train[name], size // len(sources), args
            )
            are_apart &= is_by_prompt
            _say_unread_splits({x: shards[x] for x in sources[name]}, args)
    training, chosen = (
        [row for name, rows in each.items() for row in _with_dataset(rows, name)]
        for each in (train, held_out)
    )
    chosen += rename_columns(eval_sets, args.columns)
    are_apart &= not eval_sets
    if not are_apart and (shared := shared_prompts(training, chosen)):
        problem = f"{len(shared)} of {len(chosen)} held-out rows have a prompt that is trained too"
        distributed.say(f"{problem}, such as {shared[0]['_source']}")
    return training, chosen


def _own_split(datasets: Sequence[str], args: TrainArgs) -> list[dict]:
    """Read the rows of the datasets' own held-out split, which most do not have."""
    rows: list[dict] = []
    for dataset in datasets if args.eval_split != args.dataset_split else ():
        rows += load_rows("--dataset", dataset, args.eval_split, args) or []
    return rows


def _set_aside(rows: list[dict], size: int, args: TrainArgs) -> tuple[list[dict], list[dict], bool]:
    """Return training rows, at most `size` other rows, and whether all rows of a prompt are on one
    side. They are not if prompts have so many rows that less than half of `size` would be set
    aside."""
    if args.eval_size is None:
        size = max(1, min(size, len(rows) // 10))
    if len(rows) <= size:
        problem = f"no training rows left of {len(rows)}"
        raise ValueError(f"--eval_size {size}: {problem}; lower it or set --eval_every 0")
    pairs = [(row, prompt_digest(row)) for row in rows]
    random.Random(0).shuffle(pairs)  # not --seed, see above
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


def _say_unread_splits(shards: dict[str, list[Shard]], args: TrainArgs) -> None:
    """Print which splits for an evaluation the datasets have, if rows of training are set aside."""
    for dataset, own in shards.items():
        names: Iterable[str] = ()
        if os.path.isdir(Path(dataset).expanduser()) and dataset not in TASKS:
            names = splits_of(f"--dataset {dataset}", dataset, args.dataset_config)
        elif info := getattr(own[0].content, "info", None):  # of the hub
            names = info.splits or ()
        names = [str(x) for x in names if HELD_OUT.search(str(x)) and x != args.dataset_split]
        if names:
            problem = f"the split {' or '.join(names)} is not read, training rows are set aside"
            distributed.say(f"--dataset {dataset}: {problem}; see --eval_split {names[0]}")


def held_out_rows(args: TrainArgs) -> list[dict]:
    """Read at most `--eval_size` rows of each `--eval_dataset`."""
    return rename_columns(rows_of_eval_sets(args), args.columns)


def rows_of_eval_sets(args: TrainArgs) -> list[dict]:
    """Read the rows of `held_out_rows` under the data's own names of columns."""
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


# ---- the prompt of a row, whatever its columns ----


def shared_prompts(rows: Iterable[dict], held_out: Collection[dict]) -> list[dict]:
    """Return the held-out rows whose prompt one of the rows has."""
    if not held_out:
        return []
    digests = [prompt_digest(row) for row in held_out]
    prompts = {*digests}
    shared = {digest for row in rows if (digest := prompt_digest(row)) in prompts}
    return [row for row, digest in zip(held_out, digests, strict=True) if digest in shared]


def prompt_digest(row: dict) -> bytes:
    """Return a digest of what the model is asked in a row: the same for a text and a user's message
    with it. A row without a column for it is taken whole."""
    asked = [
        row[name][:-1] if name in CONVERSATIONS and isinstance(row[name], list) else row[name]
        for name in PROMPT_PARTS
        if name in row
    ]  # the last turn of a conversation is the answer
    texts = texts_of(asked)
    texts = texts or common_start(row.get("chosen"), row.get("rejected"))
    texts = texts or texts_of(row.get("text"))
    texts = texts or texts_of([row[name] for name in sorted(row) if name[0] != "_"])
    return hashlib.blake2b("\0".join(texts).encode(errors="replace"), digest_size=16).digest()


def common_start(chosen: object, rejected: object) -> list[str]:
    """Return the texts with which both sides of a pair begin."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return texts_of(os.path.commonprefix([chosen, rejected]))
    if isinstance(chosen, list) and isinstance(rejected, list):
        pairs = zip(chosen, rejected, strict=False)
        return texts_of([x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return []


def texts_of(value: object) -> list[str]:
    """Return the texts in a value, of messages their contents, without white space at the ends."""
    if isinstance(value, str):
        return [text] if (text := value.strip()) else []
    if isinstance(value, dict):
        is_message = "role" in value or "from" in value
        content = value.get("content", value.get("value")) if is_message else [*value.values()]
        return texts_of(content)
    if isinstance(value, list | tuple):
        return [text for member in value for text in texts_of(member)]
    if isinstance(value, bytes):
        return [hashlib.blake2b(value, digest_size=16).hexdigest()]
    return [] if value is None else [str(value)]


# ---- columns ----


def choose_columns(flag: str, rows: Iterable[dict], choices: Sequence[Columns]) -> Columns:
    """Return the columns that a script reads: of the `choices` that every dataset has, the one that
    is the first for most rows. Raises `ValueError` if no choice fits."""
    names_of: dict[str | None, Counter[Columns]] = {}  # columns with values, of each dataset
    first_rows: dict[str | None, dict] = {}
    for row in rows:
        dataset = row.get("_dataset")
        first_rows.setdefault(dataset, row)
        # Tables have None in a missing column.
        names = tuple([name for name in row if row[name] is not None])
        names_of.setdefault(dataset, Counter())[names] += 1
    usable = [
        columns
        for columns in choices
        if all(any({*columns} <= {*names} for names in own) for own in names_of.values())
    ]
    if not usable:
        needed = ", or ".join(" and ".join(columns) for columns in choices)
        common = set.intersection(*({*chain(*own)} for own in names_of.values()))
        order = dict.fromkeys(chain(*chain(*names_of.values())))
        found = ", ".join(name for name in order if name in common - {*OUR_COLUMNS})
        sources = ", ".join(row["_source"] for row in first_rows.values())
        problem = f"has the columns {found} ({sources}); needed: {needed}"
        raise ValueError(f"{flag} {problem}; --columns new=old renames columns")
    votes: Counter[Columns] = Counter()
    for names, count in chain(*(own.items() for own in names_of.values())):
        if fitting := [columns for columns in usable if {*columns} <= {*names}]:
            votes[fitting[0]] += count
    return max(usable, key=votes.__getitem__)  # the first of equals


def require_columns(
    flag: str, rows: Collection[dict], choices: Sequence[Columns], also_read: Collection[str] = ()
) -> Columns:
    """Return the columns that a script reads, see `choose_columns`; `also_read`: names of others.
    Raises `ValueError` if a column would be ignored that is a part of the prompt or of the answer
    by its name, such as `context`."""
    columns = choose_columns(flag, rows, choices)
    require_all_read(flag, rows, columns, also_read)
    return columns


def require_all_read(
    flag: str, rows: Iterable[dict], columns: Columns, also_read: Collection[str] = ()
) -> None:
    """Raise `ValueError` for a part of a prompt or of an answer that nothing reads, unless its text
    stands in what is read."""
    parts = {*ASKED, *ANSWERED} - {*columns, *also_read}
    if columns in PROMPT_COLUMNS:
        parts -= {*CONVERSATIONS, *ANSWERED}  # they have the answer
    elif "chosen" in columns:
        parts -= {"completion"}
    lost: dict[str, str] = {}
    for row in rows:
        names = [name for name in row if name in parts and not is_blank(row[name])]
        if names and all(row.get(name) is not None for name in columns):  # else it is a bad row
            for name in names:
                if not _stands_in(row, name, columns):
                    lost.setdefault(name, row["_source"])
    if lost:
        place = next(iter(lost.values()))
        problem = f"nothing reads {' and '.join(lost)} ({place}) beside {' and '.join(columns)}"
        advice = "join it with the prompt or the answer"
        if columns[0] == "chosen":
            advice = "make a column prompt of it"
        elif columns in PROMPT_COLUMNS:
            advice = "join it with the prompt, name it in the `columns` of a reward"
        advice += f", or ignore it by --columns {' '.join(f'_{name}={name}' for name in lost)}"
        raise ValueError(f"{flag}: {problem}; {advice}")


def _stands_in(row: dict, name: str, columns: Columns) -> bool:
    """Return whether all texts of a column are whole words of what is read: of the prompt, for a
    part of the answer also of the answer. Where `text` is read, it does not tell what is trained.
    """
    if columns == ("text",) and name in ("prompt", "completion", *CONVERSATIONS):
        return False
    if columns[0] == "chosen":
        read = common_start(row["chosen"], row["rejected"])
    elif name in (*ANSWERED, *CONVERSATIONS) or columns == ("text",):
        read = texts_of([row[column] for column in columns])
    elif columns[0] in CONVERSATIONS and isinstance(row[columns[0]], list):
        turns = [x for x in row[columns[0]] if isinstance(x, dict)]
        answers = ("assistant", "gpt")
        read = texts_of([x for x in turns if x.get("role", x.get("from")) not in answers])
    else:
        read = texts_of(row[columns[0]])
    read += texts_of([row.get("system"), row.get("system_prompt")])
    texts = [text for text in texts_of(row[name]) if text not in read]
    whole = " ".join(" ".join(read).split()) if texts else ""
    return all(_is_in(" ".join(text.split()), whole) for text in texts)


def _is_in(words: str, text: str) -> bool:
    start = text.find(words)
    while start >= 0:
        edges = text[start - 1 : start] + words[0], words[-1] + text[start + len(words) :][:1]
        if not any(len(edge) == 2 and edge.isalnum() for edge in edges):
            return True
        start = text.find(words, start + 1)
    return False


def is_blank(value: object) -> bool:
    return (isinstance(value, str) and not value.strip()) or value in (None, [], {})


def unread_columns(rows: list[dict], columns: Columns) -> dict[str, str]:
    """Return the columns that nothing reads beside `columns`, each with the place of the first row
    that has a value in it. Names with `_` are ours, or ignored by the user."""
    found: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            if is_blank(value) or name.startswith("_"):
                continue
            if name not in (*columns, *READ_TOO):
                found.setdefault(name, row["_source"])
    return found
