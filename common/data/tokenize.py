"""Rows -> Arrow files of samples, by `datasets.Dataset.map`, for token_cache.py. This module
imports `datasets`.

A rank starts a new process, which forks one worker per core. The new process is safe to fork: it
has no threads, CUDA context or connections. When it ends, all its memory is free. Each data row
becomes one row of Arrow, with the samples of the row or the reason why it has none."""

import ctypes
import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

from datasets import Dataset, Features, List, Value

from common.data import durable
from common.data.encode import Encoder
from common.data.files import collect_bad_rows
from common.data.rows import train_and_eval_columns
from common.data.sample import Sample
from common.data.tables import quiet_datasets
from common.parallel import distributed

PARTS = ("train", "held_out")
BATCH = 200  # rows that a worker tokenises at a time
# Input of `map`: data rows, pickled because they have any shape. A large type, because a column may
# exceed 2 GiB.
ROW = Features(row=Value("large_binary"))
SAMPLE = dict(
    ids=List(Value("int32")),
    loss_mask=List(Value("bool")),
    weights=List(Value("float64")),
    prompt_length=Value("int32"),
    row=Value("string"),
    context_turns=Value("int32"),
)
# Output of `map`: the samples of a data row. A group, a single sample, or none if the row was
# dropped.
TOKENISED = Features(
    samples=List(SAMPLE),
    is_group=Value("bool"),
    dataset=Value("string"),
    image_source=Value("string"),  # of a row with images; else empty
    reasons=List(Value("string")),
    errors=List(Value("string")),
)


def tokenise(folder: Path, *task) -> None:
    """Call `write_samples` in a new process and raise its exception, or `RunError` if a process is
    killed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, spawn, initializer=end_with_parent, initargs=(os.getpid(),)
    ) as pool:
        error = pool.submit(write_samples, folder, *task).exception()
    worker_died = "has abruptly died" in str(error)  # a worker of `map`
    if isinstance(error, BrokenProcessPool) or worker_died:
        problem = "a process was killed; check the free memory of the machine"
        raise distributed.RunError(f"tokenising the data: {problem}")
    if error is not None:
        raise error


def end_with_parent(parent: int) -> None:
    """Make this process end with its parent and ignore Ctrl-C. Does nothing in a worker that `map`
    forks from a thread, to replace a dead worker: the kernel would end it with the thread, and
    `map` would wait for its lock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if threading.current_thread().name != "MainThread":
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def write_samples(
    folder: Path,
    encode_rows: Callable,
    choices: Sequence,
    kept: Sequence[str],
    tokenizer,
    args: SimpleNamespace,
) -> None:
    """Write the samples of the training and held-out rows, and `about.json`: numbers of rows,
    unreadable rows."""
    os.register_at_fork(after_in_child=partial(end_with_parent, os.getpid()))
    quiet_datasets()
    with collect_bad_rows() as reports:
        datasets = train_and_eval_columns(args, choices, kept)
    encoder = Encoder(tokenizer, args)
    workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    for part, (rows, columns) in zip(PARTS, datasets, strict=True):
        pickled = Dataset.from_dict(dict(row=[pickle.dumps(row) for row in rows]), ROW)
        rows.clear()
        encode_batch = partial(
            _encode_batch,
            encode=partial(encode_rows, columns=columns, encoder=encoder, args=args),
            kept=kept,
            failed=folder / "failed",
            num_rows=math.ceil(len(pickled) / workers),
        )
        pickled.map(
            encode_batch,
            with_indices=True,
            with_rank=True,
            batched=True,
            batch_size=BATCH,
            writer_batch_size=BATCH,
            remove_columns=["row"],
            features=TOKENISED,
            num_proc=workers,
            cache_file_name=str(folder / f"{part}.arrow"),
            new_fingerprint=folder.name,
        )
    files = durable.fingerprints(folder, sorted(path.name for path in folder.glob("*.arrow")))
    durable.write_json(folder / "about.json", dict(parts=PARTS, bad_rows=reports, files=files))


def _encode_batch(
    batch: dict[str, list],
    numbers: list[int],
    worker: int | None,
    *,
    encode: Callable,
    kept: Sequence[str],
    failed: Path,
    num_rows: int,
) -> dict[str, list]:
    """Convert data rows to `TOKENISED`. The first worker prints a line after each tenth of its
    `num_rows`. A worker that raises creates the file `failed`. Then the other workers skip their
    rows, because `map` waits for them."""
    tenths = 10 * numbers[0] // num_rows
    if not worker and tenths > 10 * max(0, numbers[0] - BATCH) // num_rows:
        distributed.say(f"tokenised {10 * tenths}% of the rows")
    rows = [] if failed.exists() else [pickle.loads(row) for row in batch["row"]]
    try:
        samples = [_encode_row(row, encode, kept) for row in rows]
    except ValueError:
        failed.touch()
        raise
    return {name: [row[name] for row in samples] for name in TOKENISED}


def _encode_row(row: dict, encode: Callable, kept: Sequence[str]) -> dict:
    """Convert a data row to a row of `TOKENISED`. Its samples keep `_source`, `_dataset`, the
    places of images and the columns `kept`."""
    with collect_bad_rows() as reports:
        items, counts = encode([row])
    is_group = bool(items) and isinstance(items[0], list)
    names = ("_source", "_dataset", "_images", *kept)
    samples = []
    for sample in items[0] if is_group else items:
        fields = {name: getattr(sample, name) for name in SAMPLE}
        assert sample == Sample(**fields), "the sample has a field that is not stored"
        fields["row"] = json.dumps({name: sample.row[name] for name in names if name in sample.row})
        samples.append(fields)
    return dict(
        samples=samples,
        is_group=is_group,
        dataset=row.get("_dataset", ""),
        image_source=row["_source"] if row.get("images") else "",
        reasons=list(counts.elements()),
        errors=list(chain(*reports)),
    )
