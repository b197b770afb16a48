"""Measure the start of a run on large data: seconds to the first batch and memory of a rank, with
and without the cache.

    python bench/data.py --rows 1000000 --in_memory_rows 20000

The data is generated conversations of 300 tokens of the built-in model. A start is the part of
sft.py before it loads the model (rows, ids, order), and here also one batch. Private memory belongs
to one rank only (`/proc/self/smaps_rollup`: Private_*). The part for the data is the growth since
libraries and tokenizer were loaded."""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sft
from common.data import load
from common.data.rows import SFT_COLUMNS
from common.model.hub import load_tokenizer, resolve_model
from common.parallel import distributed

TOKENS = 300


def write_rows(path: Path, rows: int) -> None:
    """Write conversations of two turns; the template adds 21 tokens."""
    rng = random.Random(0)
    letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     ", k=1_000_000))
    with path.open("w") as file:
        for _ in range(rows):
            start = rng.randrange(len(letters) - TOKENS)
            text, cut = letters[start : start + TOKENS - 21], rng.randrange(60, 200)
            messages = [
                dict(role="user", content=text[:cut]),
                dict(role="assistant", content=text[cut:]),
            ]
            file.write(json.dumps(dict(messages=messages)) + "\n")


def private_gb() -> tuple[float, float]:
    """Return the private memory of this process, and the part that the kernel could drop: unchanged
    file pages."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    clean, dirty = (
        int(lines[f"Private_{kind}"].split()[0]) * 1024 / 1e9 for kind in ("Clean", "Dirty")
    )
    return clean + dirty, clean


def start(dataset: str) -> None:
    """Measure the start of one rank; rank 0 prints a line of JSON."""
    _, rank, world_size = distributed.setup(0)
    args = sft.Args(dataset=(dataset,), max_length=2048, eval_size=256)
    tokenizer = load_tokenizer(resolve_model("tiny"), args)
    distributed.barrier()
    before, began = private_gb()[0], time.monotonic()
    (samples, _), _ = load.load_samples(
        sft.encode_rows, SFT_COLUMNS, tokenizer, args, flags=("max_length", "overlong", "train_on")
    )
    order = samples.order(args)
    tokens = sum(len(samples[i].ids) for i in order.draw(64)[rank::world_size])
    seconds = time.monotonic() - began
    for i in order.draw(20_000)[rank::world_size]:  # the samples are not kept
        samples[i]
    private, clean = private_gb()
    helper = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    found = dict(
        seconds=seconds,
        added=private - before,
        private=private,
        clean=clean,
        tokens=tokens,
        helper=helper,
    )
    every = distributed.gather_objects(found)
    if rank == 0:
        print("RESULT", json.dumps({name: max(one[name] for one in every) for name in found}))
    distributed.cleanup()


def launch(ranks: int, dataset: Path, cache: Path, in_memory: bool) -> dict:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        __file__,
    ]
    command += ["--child", str(dataset), *(["--in_memory"] if in_memory else [])]
    environment = os.environ | dict(HF_DATASETS_CACHE=str(cache), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.split("RESULT ")[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--in_memory_rows", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", help="folder for rows and cache; default: a temporary one")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--in_memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        load.LARGE = 2**62 if options.in_memory else 0
        start(options.child)
        distributed.end_process()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        few, many = (Path(folder) / f"{name}.jsonl" for name in ("few", "many"))
        write_rows(few, options.in_memory_rows)
        write_rows(many, options.rows)
        cache = Path(folder) / "cache"
        print(
            f"| {options.ranks} ranks | rows | seconds to the first batch | private GB of a rank "
            "| of it for data "
            "| of it droppable | GB of the process that tokenises |\n|---|---|---|---|---|---|---|"
        )
        for name, path, in_memory in (
            ("in memory", few, True), ("first start", few, False), ("second start", few, False),
            ("first start", many, False), ("second start", many, False),
        ):  # fmt: skip
            found = launch(options.ranks, path, cache, in_memory)
            rows = options.in_memory_rows if path == few else options.rows
            memory = " | ".join(
                f"{found[part]:.2f}" for part in ("private", "added", "clean", "helper")
            )
            print(f"| {name} | {rows:,} | {found['seconds']:.1f} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
