"""Measurements of docs/scaling.md with real data and real ranks.

    OMP_NUM_THREADS=1 python bench/scale_runs.py rows    memory of a rank for its rows
    torchrun --nproc_per_node 2 bench/scale_runs.py gather           milliseconds of a gather
    torchrun --nproc_per_node 2 bench/scale_runs.py grpo.py FLAGS    collectives of a step

The third command runs a script. For each step, rank 0 prints its collectives with the bytes that
it sends, and its number of open files (connections are files)."""

import os
import pickle
import random
import runpy
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from common.parallel import distributed

# ---- rows of data ----


def measure_rows(file: Path, results) -> None:
    """Put the megabytes of grpo.py's prompts, of their order, and the seconds of reading on a
    queue."""
    import grpo
    from bench.data import private_gb
    from common.data.order import RowOrder
    from common.model.hub import load_tokenizer, resolve_model
    from common.rollout.prompts import load_prompts

    args = grpo.Args(dataset=(str(file),), reward=("exact_match",))
    tokenizer = load_tokenizer(resolve_model("tiny"))
    before, _ = private_gb()
    start = time.perf_counter()
    prompts, _ = load_prompts(args, tokenizer, 4096)
    seconds = time.perf_counter() - start
    loaded, _ = private_gb()
    order = RowOrder(len(prompts), 0)
    ordered, _ = private_gb()
    assert order.num_rows == len(prompts)
    results.put((1000 * (loaded - before), 1000 * (ordered - loaded), seconds))


def print_rows() -> None:
    print(
        "| rows | file, MB | prompts of a rank, MB | order, MB | seconds |\n|---|---|---|---|---|"
    )
    letters = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz     ", k=1_000_300))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        for rows in (10_000, 100_000, 1_000_000):
            with file.open("w") as out:
                for i in range(rows):
                    out.write(f'{{"prompt": "{letters[i : i + 300]}", "answer": "{i}"}}\n')
            results = get_context("fork").Queue()
            child = get_context("fork").Process(target=measure_rows, args=(file, results))
            child.start()
            prompts, order, seconds = results.get(timeout=3600)
            child.join()
            size = file.stat().st_size / 1e6
            print(
                f"| {rows:,} | {size:.0f} | {prompts:.0f} | {order:.0f} | {seconds:.0f} |",
                flush=True,
            )


# ---- collectives of a step ----


def print_gather() -> None:
    from bench.scale import LOADS, timed

    _, rank, ranks = distributed.setup(0)
    outline = LOADS[1].outline(rank)
    seconds = [timed(distributed.gather_objects, outline)[1] for _ in range(50)]
    distributed.say(f"{ranks} ranks: {1000 * median(seconds):.2f} ms")
    distributed.cleanup()


def count(script: str) -> None:
    """Run a script; rank 0 prints the collectives of each step, and its open files."""
    from common.train.run import Run

    calls, sent = Counter(), Counter()

    def counted(name: str, place: int) -> None:
        collective = getattr(dist, name)

        def call(*args, **kwargs):
            x = [*args, *kwargs.values()][place]
            calls[name] += 1
            sent[name] += x.nbytes if isinstance(x, torch.Tensor) else len(pickle.dumps(x))
            return collective(*args, **kwargs)

        setattr(dist, name, call)

    def counted_steps(run: Run):
        for step in steps(run):
            calls.clear()
            sent.clear()
            yield step
            each = ", ".join(f"{n} {name} ({sent[name]:,} bytes)" for name, n in calls.items())
            files = len(os.listdir("/proc/self/fd"))
            distributed.say(f"step {step + 1}, rank 0: {each}; {files} open files")

    for name, place in dict(all_gather_object=1, gather_object=0, all_reduce=0,
                            all_to_all_single=1).items():  # fmt: skip
        counted(name, place)
    steps, Run.steps = Run.steps, counted_steps
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:] == ["rows"]:
        print_rows()
    elif sys.argv[1:] == ["gather"]:
        print_gather()
    elif len(sys.argv) > 2:
        sys.argv[:] = sys.argv[1:]
        count(sys.argv[0])
    else:
        sys.exit(__doc__)
