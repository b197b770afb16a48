"""Rows -> samples, and of large data only once: on each machine one rank has them tokenised by several processes into
files that all its ranks read from, in this run and in the next of the same data and flags.

The cache of `datasets` has a folder `onefile_tokens`, and in it one for each digest of all that decides the samples:
the content of the data's files, the tokenizer with its chat template, flags, and the code. Whoever changes a file, a
flag or the way rows are encoded gets another folder; none is ever deleted here.
"""

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from common.config.flags import eval_sets_of
from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.files import BadRows, files_behind
from common.data.order import RowOrder, WeightedOrder, make_order
from common.data.packing import Sample, first
from common.data.rows import require_columns, sources_of, train_and_eval_rows
from common.data.streaming import Stream, StreamArgs, stream
from common.data.tokenize import (
    PARTS,
    EncodeRows,
    Item,
    build,
    columns_of,
    datasets_of,
    require_left,
    require_some,
)
from common.parallel import distributed

SMALLEST = 32 << 20  # bytes of data below which every rank tokenises for itself: that is done in seconds
# Flags that say which rows there are and what their ids are. The process that tokenises knows these and the script's
# alone, so that one which is missing here is an AttributeError and never a wrong sample.
FLAGS = ("dataset", "dataset_flag", "dataset_split", "dataset_config", "eval_dataset", "eval_split", "eval_size",
         "columns", "on_bad_row", "prompt_format", "system_prompt", "template_kwargs")  # fmt: skip
# Modules of common/ that make samples of files.
CODE = ("data/chat", "data/encode", "data/files", "rewards/reward_model", "data/rows", "data/tasks", "data/token_cache",
        "data/tokenize")  # fmt: skip


class Counted:
    """Samples, or groups of them, of which it is known how many there are; `rows` says of which dataset each is."""

    @property
    def many(self) -> int:
        return len(self)

    def order(self, args: TrainArgs) -> RowOrder | WeightedOrder:
        return make_order(self.rows, args)


class InMemory(Counted, list):
    """Samples as they are."""

    @property
    def rows(self) -> list[dict]:
        return [first(item).row for item in self]


class OnDisk(Counted, Sequence):
    """Samples in a file, each made anew when it is drawn.

    They are read, not mapped: the kernel keeps once for all ranks what they read, and a rank's memory does not grow. Of
    its row a sample has `_source`, `_dataset` and the columns that are kept.
    """

    def __init__(self, folder: Path, part: str, names: list[str]):
        self.index = np.load(folder / f"{part}.npy", mmap_mode="r")
        self.datasets = [dict(_dataset=name) for name in names] + [{}]  # number -1 is none
        self.file = (folder / f"{part}.bin").open("rb")
        if os.fstat(self.file.fileno()).st_size != (self.index.reshape(-1, 6)[-1, :2].sum() if len(self) else 0):
            raise ValueError(f"{folder} is damaged: delete it")

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int | slice) -> Item | list[Item]:
        if isinstance(i, slice):
            return [self[number] for number in range(len(self))[i]]
        place = self.index[i].tolist()
        return [self._sample(*ours) for ours in place] if self.index.ndim == 3 else self._sample(*place)

    def _sample(self, start: int, size: int, tokens: int, prompt_length: int, dataset: int, weighted: int) -> Sample:
        record = os.pread(self.file.fileno(), size, start)
        ids, mask = np.frombuffer(record, np.int32, tokens), np.frombuffer(record, bool, tokens, 4 * tokens)
        weights = np.frombuffer(record, np.float64, tokens, 5 * tokens).tolist() if weighted else None
        row = json.loads(record[(13 if weighted else 5) * tokens :]) | self.datasets[dataset]
        return Sample(ids.tolist(), mask.tolist(), weights=weights, prompt_length=prompt_length, row=row)

    @property
    def rows(self) -> list[dict]:
        return [self.datasets[number] for number in datasets_of(self.index)]


Samples = InMemory | OnDisk | Stream | list[Item]


def load_samples(
    encode_rows: EncodeRows, choices: Sequence[tuple[str, ...]], tokenizer, args: TrainArgs, flags: Sequence[str],
    kept: Sequence[str] = (),
) -> list[tuple[Samples, Counter]]:  # fmt: skip
    """What `encode_rows(rows, columns, encoder, args)` makes of the training rows and of the held-out ones; the columns
    are the first of `choices` that the data has, and of `kept`, those that samples keep of their rows, each that any of
    these rows has. `flags` are those of the script that it reads. Collective.

    Raises `ValueError` as it does, for the first bad row, and if the machines do not have the same data.
    """
    if isinstance(args, StreamArgs) and args.streaming:
        training, (held_out, counts) = stream(encode_rows, choices, tokenizer, args)
        return [training, (InMemory(held_out), counts)]
    known = SimpleNamespace(
        **{name: getattr(args, name) for name in (*FLAGS, *flags)}, eval_every=min(args.eval_every, 1)
    )
    key = _digest(encode_rows, choices, kept, tokenizer, known) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    keys = set(distributed.gather_objects(key)) - {None}
    if len(keys) > 1:
        raise ValueError(f"{args.dataset_flag}: the files are not the same on all machines")
    if not (found := keys.pop()):
        parts = _encoded(encode_rows, choices, kept, tokenizer, args)
        return [(InMemory(items), counts) for items, counts in parts]
    folder = cache_folder() / found
    if key and not folder.exists():
        build(folder, encode_rows, choices, kept, tokenizer, known)
    distributed.barrier()
    about = json.loads((folder / "about.json").read_text())
    for kinds in about["told"]:
        (bad := BadRows("skip")).found = kinds
        bad.tell()
    return [(OnDisk(folder, part, about["names"]), Counter(about["counts"][part])) for part in PARTS]


def _encoded(encode_rows: EncodeRows, choices, kept, tokenizer, args: TrainArgs) -> list[tuple[list[Item], Counter]]:
    encoder, parts = Encoder(tokenizer, args), train_and_eval_rows(args)
    columns = require_columns(args.dataset_flag, parts[0], choices, args.on_bad_row)
    training, held_out = (encode_rows(rows, columns_of(rows, columns, kept), encoder, args) for rows in parts)
    require_some(args.dataset_flag, len(training[0]), training[1])
    require_left(parts[1], (first(item).row for item in held_out[0]), held_out[1])
    return [training, held_out]


# ---- which samples ----


def cache_folder() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "onefile_tokens"


def _digest(encode_rows: EncodeRows, choices: Sequence, kept: Sequence, tokenizer, args: SimpleNamespace) -> str:
    """Of all that decides the samples; empty for small data.

    Of a file its content counts, not its time: copies and clocks make that wrong both ways, and reading is far faster
    than tokenising. Of the script all that stands before `main`.
    """
    import tokenizers
    import transformers

    files = _files(args)
    if sum(file.stat().st_size for file in files) < SMALLEST:
        return ""
    script, here = Path(encode_rows.__code__.co_filename), Path(__file__).parents[1]
    code = [script.read_text().partition("\ndef main(")[0], *((here / f"{name}.py").read_text() for name in CODE)]
    versions = tokenizers.__version__, transformers.__version__
    what = [versions, encode_rows.__qualname__, code, choices, kept, sorted(vars(args).items())]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        tokenizer.save_pretrained(folder)
        files += sorted(file for file in Path(folder).rglob("*") if file.is_file())
        what += [(file.name, content) for file, content in zip(files, threads.map(_content, files), strict=True)]
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def _files(args: SimpleNamespace) -> list[Path]:
    """Those that the rows stand in."""
    named = [("--dataset", name) for names, _ in sources_of(args.dataset).values() for name in names]
    splits = {args.dataset_split, args.eval_split} if args.eval_every else {args.dataset_split}
    if args.eval_every and args.eval_dataset is not None:
        named += [("--eval_dataset", dataset) for dataset in eval_sets_of(args.eval_dataset)]
    files = [
        file for flag, name in named for split in sorted(splits)
        for file in files_behind(flag, name, split, args.dataset_config)
    ]  # fmt: skip
    return list(dict.fromkeys(files))


def _content(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "blake2b").hexdigest()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
