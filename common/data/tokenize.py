"""Rows -> files of samples: one rank of a machine starts a process, that one several more, and all are gone at the end.

What is written is for `OnDisk` in token_cache.py: of each part a `.bin` of records and a `.npy` that says where
each is; and `about.json`.
"""

import ctypes
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from common.config.groups import TrainArgs
from common.data.encode import Encoder
from common.data.files import untold_bad_rows
from common.data.packing import Sample
from common.data.rows import reasons, require_columns, require_held_out, train_and_eval_rows
from common.parallel import distributed

CHUNK = 1000  # rows that a process tokenises at a time
PARTS = "train", "held_out"

Item = Sample | list[Sample]  # of a script all of one kind, groups all of one size
EncodeRows = Callable[[list[dict], tuple[str, ...], Encoder, TrainArgs], tuple[list[Item], Counter]]


def columns_of(rows: list[dict], columns: tuple[str, ...], kept: Sequence[str]) -> tuple[str, ...]:
    """`columns`, and of those that are `kept` each that any of the rows has."""
    return columns + tuple(name for name in kept if name not in columns and any(name in row for row in rows))


def datasets_of(index: np.ndarray) -> list[int]:
    """The number of the dataset of each item in a part's index."""
    return (index if index.ndim == 2 else index[:, 0])[:, 4].tolist()


def require_some(flag: str, left: int, counts: Counter) -> None:
    """Raises `ValueError` if of the training rows none is left."""
    if not left:
        raise ValueError(f"{flag}: no rows are left: {reasons(counts)}; see --max_length")


def require_left(rows: list[dict], left: Iterable[dict], counts: Counter) -> None:
    """Raises `ValueError` if of the held-out rows, or of those of a set, none is left."""
    require_held_out(rows, left, f": {reasons(counts)}; see --max_length and --eval_split")


# ---- in the rank that has it done ----


def build(folder: Path, *what) -> None:
    """Makes the folder, unless another run does meanwhile. A build that is killed leaves one of another name, which the
    next build of the same on this machine deletes."""
    ours = folder.with_name(f"{folder.name}.{socket.gethostname()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{ours}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of a process that was killed the kernel gives it back
            if folder.exists():
                return
            shutil.rmtree(ours, ignore_errors=True)
            ours.mkdir()
            _tokenise_apart(ours, *what)
            try:
                ours.rename(folder)
            except OSError:
                if not folder.exists():  # else another machine on the same disk was faster
                    raise
                shutil.rmtree(ours)
    except OSError as error:
        why = f"cannot write {folder} ({error.strerror}); set HF_DATASETS_CACHE"
        raise distributed.RunError(f"the tokenised data: {why}") from error


def _tokenise_apart(folder: Path, *what) -> None:
    """`_tokenise` in a process of its own, whose memory goes with it. Started anew, not forked: it has no threads, CUDA
    or connections of this one."""
    context, speaks = multiprocessing.get_context("spawn"), distributed.is_main()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tokenise, args=(theirs, os.getpid(), folder, *what))
    process.start()
    theirs.close()
    said: object = f"tokenising the data, once on this machine, into {folder.parent}"
    while isinstance(said, str):
        if speaks:
            print(said, flush=True)
        try:
            said = ours.recv()
        except EOFError:
            process.join()
            died = f"tokenising the data: the process ended with code {process.exitcode}"
            said = distributed.RunError(died)
    process.join()
    if said is not None:
        shutil.rmtree(folder)
        raise said


# ---- in that process ----


def _tokenise(
    connection: Connection,
    parent: int,
    folder: Path,
    encode_rows: EncodeRows,
    choices,
    kept: Sequence[str],
    tokenizer,
    args: SimpleNamespace,
) -> None:
    """Writes the samples. The parent gets a line every ten seconds and at the end None, or what it is to raise."""
    _end_with(parent)
    end: BaseException | None = None
    try:
        encode = partial(encode_rows, encoder=Encoder(tokenizer, args), args=args)
        workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        ours = encode, os.getpid()
        context = multiprocessing.get_context("fork")  # this process is small yet, and has one thread
        with untold_bad_rows() as told, ProcessPoolExecutor(workers, context, _become_worker, ours) as pool:
            pool.submit(os.getpid).result()  # starts all, before the rows are there
            parts = train_and_eval_rows(args)
            columns = require_columns(args.dataset_flag, parts[0], choices, args.on_bad_row)
            names = list(dict.fromkeys(row["_dataset"] for row in chain(*parts) if "_dataset" in row))
            about = dict(names=names, told=told, counts={})
            for part, rows in zip(PARTS, parts, strict=True):
                chunks = _in_order(pool, workers, rows, columns_of(rows, columns, kept), kept, names)
                about["counts"][part], bad = _write(folder, part, chunks, len(rows), connection)
                told.append(bad)
            training, held_out = (datasets_of(np.load(folder / f"{part}.npy")) for part in PARTS)
            require_some(args.dataset_flag, len(training), about["counts"][PARTS[0]])
            left = [dict(_dataset=names[i]) if i >= 0 else {} for i in held_out]
            require_left(parts[1], left, about["counts"][PARTS[1]])
        (folder / "about.json").write_text(json.dumps(about))
    except (ValueError, OSError) as error:
        end = error
    except BrokenProcessPool:
        end = distributed.RunError("tokenising the data: a process was killed; has the machine enough memory?")
    connection.send(end)


def _end_with(parent: int) -> None:
    """This process ends when its parent does, and not before it because of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _in_order(pool: ProcessPoolExecutor, workers: int, rows: list[dict], *what) -> Iterator[tuple]:
    """What `_chunk` makes of all rows, never far ahead of what is taken."""
    ahead: deque = deque()
    for start in range(0, len(rows), CHUNK):
        ahead.append(pool.submit(_chunk, rows[start : start + CHUNK], *what))
        if len(ahead) > 2 * workers:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _write(
    folder: Path, part: str, chunks: Iterator[tuple], rows: int, connection: Connection
) -> tuple[Counter, dict[str, list[str]]]:
    """The chunks into the files of a part; how many rows something was done to, and the bad ones."""
    counts, bad, indices, place = Counter(), {}, [], 0
    last = time.monotonic()
    with (folder / f"{part}.bin").open("wb") as file:
        for number, (records, index, of_chunk, found) in enumerate(chunks, 1):
            index[..., 0] += place
            place += file.write(records)
            indices += [index] if len(index) else []
            counts.update(of_chunk)
            for kind, errors in found.items():
                bad.setdefault(kind, []).extend(errors)
            if time.monotonic() > last + 10:
                last = time.monotonic()
                connection.send(f"tokenised {min(number * CHUNK, rows):,} of {rows:,} rows")
        file.flush()
        os.fsync(file.fileno())
    np.save(folder / f"{part}.npy", np.concatenate(indices or [np.zeros((0, 6), np.int64)]))
    return counts, bad


# ---- in its workers ----

_encode: Callable[..., tuple[list[Sample], Counter]]


def _become_worker(encode: Callable, parent: int) -> None:
    global _encode
    _end_with(parent)
    _encode = encode


def _chunk(
    rows: list[dict], columns: tuple[str, ...], kept: Sequence[str], names: list[str]
) -> tuple[bytes, np.ndarray, Counter, dict[str, list[str]]]:
    """Records of the samples, one behind another; for each of [items] or [items, samples of a group] where it starts,
    its bytes, tokens, tokens of the prompt, the number of its dataset and whether its tokens have weights; how many
    rows something was done to; the bad ones."""
    with untold_bad_rows() as told:
        items, counts = _encode(rows, columns=columns)
    records, index, place = [], [], 0
    for sample in chain.from_iterable(item if isinstance(item, list) else [item] for item in items):
        ids, mask, weights, row = sample.ids, sample.loss_mask, sample.weights, sample.row
        stored = Sample(ids, mask, weights=weights, prompt_length=sample.prompt_length, row=row)
        assert sample == stored, "it has more than is stored"
        about = {name: row[name] for name in ("_source", *kept) if name in row}
        record = np.array(ids, np.int32).tobytes() + bytes(mask) + np.array(weights or [], np.float64).tobytes()
        records.append(record + json.dumps(about).encode())
        dataset = names.index(row["_dataset"]) if "_dataset" in row else -1
        index.append((place, len(records[-1]), len(ids), sample.prompt_length, dataset, weights is not None))
        place += len(records[-1])
    groups = (len(items), len(items[0])) if items and isinstance(items[0], list) else (len(items),)
    places = np.array(index, np.int64).reshape(*groups, 6)
    return b"".join(records), places, counts, {kind: errors for found in told for kind, errors in found.items()}
