"""Rows -> samples of the training and held-out rows: in memory, as a stream, or tokenised once per machine.

For large data, one rank of each machine starts the tokenisation. The results are Arrow files in the cache of
`datasets`, in `onefile_tokens/<digest>`. All ranks of the machine read them, in this run and in later runs. The digest
covers everything that determines the samples: the content of the data files, the tokenizer with its chat template,
flags and code. Complete folders are never deleted.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from common.config.groups import TrainArgs
from common.config.specs import eval_sets_of, weights_of
from common.config.training import StreamArgs
from common.data import durable
from common.data.encode import Encoder
from common.data.files import BadRows, open_shards, quiet_datasets
from common.data.order import RowOrder, WeightedOrder, make_order
from common.data.rows import (
    held_out_rows,
    reasons,
    require_columns,
    require_held_out,
    require_training_rows,
    split_of,
    train_and_eval_columns,
)
from common.data.sample import Sample, first
from common.data.streaming import StreamedSamples
from common.parallel import distributed
from common.parallel.console import visible

SMALLEST = 32 << 20  # bytes of data below which every rank tokenises for itself, in seconds
# Flags that determine rows and ids. The process that tokenises gets only these and the script's own flags. A flag that
# is missing here therefore raises AttributeError and does not give a wrong sample.
FLAGS = ("dataset", "dataset_flag", "dataset_split", "dataset_config", "eval_dataset", "eval_split", "eval_size",
         "columns", "on_bad_row", "prompt_format", "system_prompt", "template_kwargs", "special_text")  # fmt: skip

Item = Sample | list[Sample]  # samples or groups; all items of a script have the same kind and size
EncodeRows = Callable[[list[dict], tuple[str, ...], Encoder, TrainArgs], tuple[list[Item], Counter]]


class Samples(Sequence):
    """Samples or groups of them, which `make` makes when they are read; `rows` has the data row of each."""

    def __init__(self, rows: list[dict], make: Callable[[int], Item]):
        self.rows, self.make = rows, make

    @property
    def num_rows(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int | slice) -> Item | list[Item]:
        chosen = range(len(self))[i]  # raises IndexError
        return [self.make(k) for k in chosen] if isinstance(i, slice) else self.make(chosen)

    def order(self, args: TrainArgs) -> RowOrder | WeightedOrder:
        return make_order(self.rows, args)


def load_samples(
    encode_rows: EncodeRows, choices: Sequence[tuple[str, ...]], tokenizer, args: TrainArgs, flags: Sequence[str],
    kept: Sequence[str] = (),
) -> list[tuple[Samples, Counter]]:  # fmt: skip
    """Return the samples of the training rows and of the held-out rows, each with the number of rows that were dropped
    or changed, by reason.

    `encode_rows(rows, columns, encoder, args)` makes the samples. `columns` has the first of `choices` that the data
    has, and the columns of `kept` that any row has; samples keep the columns of `kept`. `flags`: the script's own flags
    that `encode_rows` reads. Collective. Raises `ValueError` for a bad row, if no row is left, or if machines have
    different data.
    """
    if isinstance(args, StreamArgs) and args.streaming:
        return _stream(encode_rows, choices, tokenizer, args)
    known = {name: getattr(args, name) for name in (*FLAGS, *flags)}
    task = encode_rows, choices, kept, tokenizer, SimpleNamespace(**known, eval_every=min(args.eval_every, 1))
    tokenises = int(os.environ.get("LOCAL_RANK", 0)) == 0
    digests = set(distributed.gather_objects(_digest(*task) if tokenises else None)) - {None}
    if len(digests) > 1:
        raise ValueError(f"{args.dataset_flag}: the files differ between machines; copy the same files to all")
    if digest := digests.pop():
        folder = Path(quiet_datasets().config.HF_DATASETS_CACHE) / "onefile_tokens" / digest
        if tokenises and _damage(folder):
            _write(folder, *task)
        distributed.barrier()
        training, held_out = _read(folder)
    else:
        encode = partial(encode_rows, encoder=Encoder(tokenizer, args), args=args)
        parts = train_and_eval_columns(args, choices, kept)
        training, held_out = (_in_memory(*encode(rows, columns), rows) for rows, columns in parts)
    require_training_rows(args.dataset_flag, len(training.samples), training.counts)
    _require_held_out(held_out)
    return [training[:2], held_out[:2]]


class Part(NamedTuple):
    """Samples of the training rows, or of the held-out rows."""

    samples: Samples
    counts: Counter
    """rows that were dropped or changed, by reason"""
    rows: list[dict]
    """rows of the data before any was dropped; from disk, one row for each dataset, with its `_dataset`"""


def _require_held_out(part: Part) -> None:
    why = f": {reasons(part.counts)}; see --max_length and --eval_split"
    require_held_out(part.rows, part.samples.rows, why)


def _stream(encode_rows: EncodeRows, choices: Sequence, tokenizer, args) -> list[tuple[Samples, Counter]]:
    """Return a stream of training samples, whose counts are empty, and held-out samples in memory."""
    encode = partial(encode_rows, encoder=Encoder(tokenizer, args), args=args)
    held_out = _in_memory([], Counter(), [])
    if args.eval_every:
        rows, flag = held_out_rows(args), f"--eval_dataset {' '.join(args.eval_dataset)}"
        held_out = _in_memory(*encode(rows, require_columns(flag, rows, choices, args.on_bad_row)), rows)
        _require_held_out(held_out)
    training = StreamedSamples(encode, choices, args)
    training[0]  # reports bad data before the model is loaded
    return [(training, Counter()), held_out[:2]]


def _in_memory(items: list[Item], counts: Counter, rows: list[dict]) -> Part:
    return Part(Samples([first(item).row for item in items], items.__getitem__), counts, rows)


# ---- the folder of a digest ----


def _write(folder: Path, *task) -> None:
    """Tokenise into `folder`, unless another run has completed it meanwhile. The folder has another name until it is
    complete. An incomplete folder of this machine was left by a killed process and is deleted."""
    from common.data.tokenize import tokenise

    incomplete = folder.with_name(f"{folder.name}.{socket.gethostname()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{incomplete}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock of a killed process
            if not (problem := _damage(folder)):
                return
            if folder.exists():
                print(visible(f"{folder} is damaged ({problem}); tokenising the data again"), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir()
            distributed.say(f"tokenising the data, once on this machine, into {folder.parent}")
            try:
                tokenise(incomplete, *task)
                durable.rename(incomplete, folder)
            except OSError:
                if not folder.exists():  # else another machine with the same disk was faster
                    raise
            finally:
                shutil.rmtree(incomplete, ignore_errors=True)
    except OSError as error:
        why = f"cannot write {folder} ({error.strerror or error}); set HF_DATASETS_CACHE"
        raise distributed.RunError(f"the tokenised data: {why}") from error


def _damage(folder: Path) -> str | None:
    """Return what is wrong with the files in the folder, None if they are as they were written."""
    try:
        files = durable.read_json(folder / "about.json")["files"]
        return "a file was changed" if durable.fingerprints(folder, files) != files else None
    except (OSError, ValueError, KeyError) as error:
        return distributed.first_line(error)


def _read(folder: Path) -> list[Part]:
    """Return the samples of a folder, and report its bad rows as the first start did."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    about, parts = durable.read_json(folder / "about.json"), []
    reports = about["bad_rows"]
    for name in about["parts"]:
        files = [pa.memory_map(str(file)) for file in sorted(folder.glob(f"{name}*.arrow"))]
        tables = [pa.ipc.open_stream(file).read_all() for file in files]
        if not tables:
            parts.append(_in_memory([], Counter(), []))
            continue
        table = pa.concat_tables(tables)
        numbers = np.flatnonzero(pc.list_value_length(table["samples"]))  # indices of the rows with samples
        datasets = table["dataset"].combine_chunks().dictionary_encode()
        rows = [dict(_dataset=dataset) if dataset else {} for dataset in datasets.dictionary.to_pylist()]
        kept = [rows[i] for i in datasets.indices.to_numpy()[numbers]]
        samples = Samples(kept, partial(_item, table["samples"], table["is_group"], numbers))
        parts.append(Part(samples, Counter(pc.list_flatten(table["reasons"]).to_pylist()), rows))
        reports.append(pc.list_flatten(table["errors"]).to_pylist())
    for errors in reports:
        (bad := BadRows("skip")).errors = errors
        bad.report()
    return parts


def _item(samples, is_group, numbers: Sequence[int], i: int) -> Item:
    """Build item `i`, a sample or a group, from Arrow columns. `numbers`: row of each item."""
    number = int(numbers[i])
    group = [Sample(**sample | dict(row=json.loads(sample["row"]))) for sample in samples[number].as_py()]
    return group if is_group[number].as_py() else group[0]


# ---- the digest ----


def _digest(encode_rows: EncodeRows, choices: Sequence, kept: Sequence, tokenizer, args: SimpleNamespace) -> str:
    """Return the digest of everything that determines the samples; empty for small data.

    It covers the content of files and not their times, which copies and clocks change; reading is much faster than
    tokenising. It covers the script up to its `main`.
    """
    import tokenizers
    import transformers

    files = _files(args)
    if sum(file.stat().st_size for file in files) < SMALLEST:
        return ""
    common = Path(__file__).parents[1]
    modules = [*sorted((common / "data").glob("*.py")), common / "rewards" / "reward_model.py"]
    script, _, _ = Path(encode_rows.__code__.co_filename).read_text().partition("\ndef main(")
    code = [encode_rows.__qualname__, script, *(module.read_text() for module in modules)]
    parts = [tokenizers.__version__, transformers.__version__, code, choices, kept, sorted(vars(args).items())]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        tokenizer.save_pretrained(folder)
        files += sorted(file for file in Path(folder).rglob("*") if file.is_file())
        parts += [(file.name, content) for file, content in zip(files, threads.map(_content, files), strict=True)]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _files(args: SimpleNamespace) -> list[Path]:
    """Return the files of the training and held-out rows."""
    named = [("--dataset", name) for name in weights_of(args.dataset)]
    if args.eval_every and args.eval_dataset is not None:
        named += [("--eval_dataset", name) for name in eval_sets_of(args.eval_dataset)]
    splits = (args.dataset_split, args.eval_split) if args.eval_every else (args.dataset_split,)
    shards = [
        shard for flag, name in named for split in dict.fromkeys(split_of(name, split) for split in splits)
        for shard in open_shards(flag, name, split, args.dataset_config) or ()
    ]  # fmt: skip
    return list(dict.fromkeys(file for shard in shards for file in shard.files))


def _content(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "blake2b").hexdigest()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
