"""Tables of docs/scaling.md for 8, 64 and 1,024 ranks, on one core and without a GPU.

    OMP_NUM_THREADS=1 python bench/scale.py packing       rank 0 packs, other ranks are simulated
    OMP_NUM_THREADS=1 python bench/scale.py gathers       objects of all ranks, by size and receiver
    OMP_NUM_THREADS=1 python bench/scale.py queue         prompts of all ranks, on every rank
    OMP_NUM_THREADS=1 python bench/scale.py schedules     bench/stream_simulation.py
    OMP_NUM_THREADS=1 python bench/scale.py gloo          real processes: 8 and 64
    OMP_NUM_THREADS=1 python bench/scale.py rows          private memory of a rank for its data
    torchrun --nproc_per_node 2 bench/scale.py count grpo.py FLAGS    collectives of a step

Each rank has 8 prompts of a step with 8 completions each. Lengths are lognormal, half of the
variance from the prompt. "short": like GSM8K, median 170 tokens, at most 1,024, --pack_tokens
8192. "long": median 1,500, standard deviation of the logarithm 1, at most 16,234, --pack_tokens
16384. The functions of common/ run as they are. Only the collectives are replaced: they return what
the other ranks would have sent, from pickled bytes."""

import argparse
import math
import multiprocessing
import os
import pickle
import random
import runpy
import sys
import tempfile
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from common.data import packing, transfer
from common.data.sample import Completion
from common.parallel import distributed
from common.parallel.placement import GroupShape

RANKS = (8, 64, 1024)
PROMPTS, COMPLETIONS = 8, 8  # of a rank


class Lengths(NamedTuple):
    name: str
    prompt: int
    median: int
    of_prompt: float  # standard deviation of the logarithm
    of_sample: float
    most: int
    pack_tokens: int

    def drawn(self, rank: int) -> list[list[int]]:
        """Return the lengths of a rank's completions, without prompts."""
        draw = random.Random(rank)
        centers = [draw.gauss(math.log(self.median), self.of_prompt) for _ in range(PROMPTS)]
        return [
            [
                min(self.most, max(2, round(math.exp(draw.gauss(center, self.of_sample)))))
                for _ in range(COMPLETIONS)
            ]
            for center in centers
        ]


LOADS = (
    Lengths("short", 100, 170, 0.25, 0.35, 1024, 8192),
    Lengths("long", 150, 1500, 0.71, 0.71, 16234, 16384),
)


def groups_of(load: Lengths, rank: int) -> list[list[Completion]]:
    """Return a rank's completions with random ids."""
    draw = random.Random(rank)
    groups = []
    for lengths in load.drawn(rank):
        prompt = draw.choices(range(1000, 100_000), k=load.prompt)
        groups.append([])
        for n in lengths:
            ids = prompt + draw.choices(range(1000, 100_000), k=n)
            logprobs = [-draw.random() for _ in ids]
            mask = [i >= load.prompt for i in range(len(ids))]
            streams = dict(rollout_logprobs=logprobs, versions=[0] * len(ids))
            groups[-1].append(Completion(ids, mask, load.prompt, **streams))
    return groups


def outline_of(load: Lengths, rank: int) -> transfer.Outline:
    """Return what `packing._pack` gathers from a rank."""
    P, count = load.prompt, PROMPTS * COMPLETIONS
    shapes = [
        GroupShape([P + n - 1 for n in lengths], [0, *[P - 1] * (len(lengths) - 1)], [0] * 8)
        for lengths in load.drawn(rank)
    ]
    first = rank * count
    indices = list(range(first, first + count))
    streams = ["rollout_logprobs", "versions"]
    return transfer.Outline(shapes, indices, [None] * count, [[]] * count, streams)


def megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f}" if size < 1e7 else f"{size / 1e6:,.0f}"


def print_table(*rows: str) -> None:
    print("\n| " + " | ".join(rows) + " |\n|" + "---|" * len(rows), flush=True)


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


# ---- the packing of a step, on rank 0 ----


def pack_on_rank_0(load: Lengths, ranks: int, traced: bool = False) -> SimpleNamespace:
    """Pack as rank 0 of `ranks`; `traced`: measure Python's memory, which slows everything."""
    own = groups_of(load, 0)
    positions = [range(rank, PROMPTS * ranks, ranks) for rank in range(ranks)]
    outlines = [pickle.dumps(outline_of(load, rank)) for rank in range(1, ranks)]
    sizes = [pickle.dumps(dict.fromkeys(each, COMPLETIONS)) for each in positions[1:]]
    found = SimpleNamespace(gathered=0, gather=0.0, place=0.0)

    def gather_objects(value: object) -> list:
        start = time.perf_counter()
        others = sizes if isinstance(value, dict) else outlines
        found.gathered += len(pickle.dumps(value)) + sum(map(len, others))
        values = [value, *map(pickle.loads, others)]
        found.gather += time.perf_counter() - start
        return values

    def place(*args):
        start = time.perf_counter()
        found.placed = real_place(*args)
        found.place += time.perf_counter() - start
        return found.placed

    def all_to_all(out: torch.Tensor, sent: torch.Tensor, _, sent_sizes: list[int]) -> None:
        found.sent = (len(sent) - sent_sizes[0]) * sent.shape[1] * 4  # without its own rows
        out.zero_()

    real_place = packing.place
    os.environ |= dict(WORLD_SIZE=str(ranks), RANK="0")
    distributed.gather_objects, packing.place = gather_objects, place
    dist.all_to_all_single = all_to_all
    if traced:
        tracemalloc.start()
    start = time.perf_counter()
    arguments = (own, positions[0], 1, load.pack_tokens, torch.device("cpu"), 16)
    packing.pack_minibatches(*arguments)
    found.seconds = time.perf_counter() - start
    found.memory = tracemalloc.get_traced_memory()[1] if traced else 0
    tracemalloc.stop()
    packing.place = real_place
    return found


def print_packing() -> None:
    print_table(
        "lengths", "ranks", "completions", "micro-batches", "max / mean cost", "samples that move",
        "sent by rank 0, MB", "gathered, MB", "unpickle, s", "place, s", "pack, s", "Python, MB",
    )  # fmt: skip
    for load in LOADS:
        for ranks in RANKS:
            found = pack_on_rank_0(load, ranks)
            memory = pack_on_rank_0(load, ranks, traced=True).memory
            parts, rows = found.placed
            costs = [[sum(parts[key].cost for key in keys) for keys in row] for row in rows]
            imbalance = sum(map(max, costs)) / (sum(map(sum, costs)) / ranks)
            moved = [
                (owner != rank) * len(parts[owner, i].lengths)
                for row in rows
                for rank, keys in enumerate(row)
                for owner, i in keys
            ]
            count = ranks * PROMPTS * COMPLETIONS
            seconds = (f"{x:.2f}" for x in (found.gather, found.place, found.seconds))
            print_row(
                load.name, f"{ranks:,}", f"{count:,}", len(rows), f"{imbalance:.3f}",
                f"{sum(moved) / count:.0%}", megabytes(found.sent), megabytes(found.gathered),
                *seconds, megabytes(memory),
            )  # fmt: skip


# ---- objects that ranks gather ----


def save_plan() -> tuple[list, int]:
    """Return the checkpoint plans of 8 ranks that share a copy, for weights and two moments of 399
    tensors, as in Qwen3-8B; and the pickled bytes of one."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.setup(0)
    mesh = init_device_mesh("cpu", (1,))
    whole = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
    kinds = ("model", "optimizer.state.exp_avg", "optimizer.state.exp_avg_sq")
    names = [f"{kind}.hf.model.layers.{n}.self_attn.q_proj.weight" for kind in kinds
             for n in range(399)]  # fmt: skip
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict.fromkeys(names, whole), is_coordinator=True)
    plan = planner.create_local_plan()
    plans = []
    for rank in range(8):
        offset = torch.Size([rank, 0])
        items = []
        for item in plan.items:
            chunk = replace(item.tensor_data.chunk, offsets=offset, sizes=torch.Size([1, 4]))
            index = MetadataIndex(item.index.fqn, offset)
            tensor = replace(item.tensor_data, chunk=chunk)
            items.append(replace(item, index=index, tensor_data=tensor))
        plans.append(replace(plan, items=items))
    distributed.cleanup()
    return plans, len(pickle.dumps(plans[0]))


def print_gathers() -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from common.metrics.logger import _line
    from common.metrics.meter import Meter

    meter = Meter()
    for name in range(60):  # metrics of a step of grpo.py, nearly
        meter.mean(f"completions/metric_{name}", 1.0, 2.0)
    totals = {name: (kind, *map(float, rows[0])) for name, (kind, rows) in meter.values.items()}
    plans, size_of_plan = save_plan()
    sizes = {
        "sizes of groups, every rank": len(pickle.dumps(dict.fromkeys(range(8), 8))),
        "rewards of a `gather_rows`, every rank": len(
            pickle.dumps((list(range(8)), torch.zeros(8, 8, dtype=torch.float64)))
        ),
        "totals of 60 metrics, every rank": len(pickle.dumps(totals)),
        "plan of a checkpoint, rank 0": size_of_plan,
    }
    for load in LOADS:
        sizes[f"outline, {load.name}, every rank"] = len(pickle.dumps(outline_of(load, 0)))
        lines = []
        for sample in (sample for group in groups_of(load, 0) for sample in group):
            sample.row = dict(prompt="four" * load.prompt)
            sample.text = "four" * (len(sample.ids) - load.prompt)  # 4 letters a token
            lines.append(_line(1, sample, 1.0, 0.5))
        sizes[f"logged completions, {load.name}, rank 0"] = len(pickle.dumps(lines))
    print_table("object, receiver", "KB of a rank", *(f"{n:,} ranks, MB" for n in RANKS))
    for name, size in sizes.items():
        print_row(name, f"{size / 1e3:.1f}", *(megabytes(size * n) for n in RANKS))
    for ranks in RANKS:
        planner = DefaultSavePlanner()
        copies = [pickle.loads(pickle.dumps(plan)) for plan in plans * (ranks // 8)]
        start = time.perf_counter()
        planner.create_global_plan(copies)
        print(f"plan of a checkpoint for {ranks:,} ranks: {time.perf_counter() - start:.1f} s")


# ---- the queue of prompts ----


def print_queue() -> None:
    from common.data.order import RowOrder
    from common.rollout.prompt_queue import PromptQueue

    print_table("--oversample", "ranks", "prompts in flight", "draw, ms", "choose, ms", "state, KB")
    for oversample in (1.0, 1.25):
        for ranks in RANKS:
            prompts = PROMPTS * ranks
            args = SimpleNamespace(prompts_per_step=prompts, max_staleness=2, oversample=oversample)
            queue = PromptQueue(RowOrder(100_000, 0), args, 0, ranks, prefetch_steps=1)
            milliseconds = [1000 * seconds(lambda: queue.draw(0, 100))]  # noqa: B023
            milliseconds += [1000 * seconds(lambda: queue.choose(()))]  # noqa: B023
            state = len(repr(queue.state_dict()))
            print_row(
                oversample, f"{ranks:,}", len(queue.in_flight),
                *(f"{x:.2f}" for x in milliseconds), f"{state / 1e3:.0f}",
            )  # fmt: skip


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


# ---- schedules of rollout ranks ----


def print_schedules() -> None:
    from bench import stream_simulation as simulation

    # an engine whose step takes 11 ms for one completion and 24 ms for 256: assumed
    points = [(1, 0.011), (32, 0.012), (128, 0.016), (256, 0.024)]
    ways = [way for way in simulation.WAYS if way.partial and way.staleness <= 2]
    print_table("schedule", "ranks", "steps/hour", "sampling", "trainers wait", "simulated in, s")
    for ranks in RANKS:
        steps = 40 if ranks < 1024 else 16
        machine = simulation.Machine(points, 3e-5)
        machine, _ = simulation.with_training(machine, train=0.7, hand_over=0.02)
        for way in ways:
            start = time.perf_counter()
            load = simulation.load_of(ranks)
            result = simulation.simulate(way, load, machine, steps, steps // 4)
            print_row(
                way.name, f"{ranks:,}", f"{3600 / result.step:.1f}", f"{result.sampling:.0%}",
                f"{result.waiting:.0%}", f"{time.perf_counter() - start:.0f}",
            )  # fmt: skip


# ---- real ranks ----


def gather_on_gloo(rank: int, ranks: int, store: str, results) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    outline = outline_of(LOADS[1], rank)
    times = [seconds(lambda: distributed.gather_objects(outline)) for _ in range(5)]
    connections = len(os.listdir("/proc/self/fd"))
    distributed.barrier()
    if rank == 0:
        results.put((median(times), connections))
    dist.destroy_process_group()


def print_gloo() -> None:
    print_table("ranks", "gather of outlines, s, on 2 cores", "open files of a rank")
    fork = multiprocessing.get_context("fork")  # processes share the libraries' memory
    for ranks in (8, 64):
        with tempfile.TemporaryDirectory() as folder:
            results = fork.Queue()
            arguments = [(rank, ranks, f"{folder}/store", results) for rank in range(ranks)]
            processes = [fork.Process(target=gather_on_gloo, args=each) for each in arguments]
            for process in processes:
                process.start()
            took, files = results.get(timeout=600)
            for process in processes:
                process.join()
        print_row(ranks, f"{took:.3f}", files)


# ---- rows of data ----


def memory_of_data(kind: str, file: Path, results) -> None:
    """Put the growth of private memory and the seconds of a start on the queue."""
    import grpo
    import sft
    from bench.data import private_gb
    from common.data.load import load_samples
    from common.data.order import RowOrder
    from common.model.hub import load_tokenizer, resolve_model
    from common.rollout.prompts import load_prompts

    tokenizer = load_tokenizer(resolve_model("tiny"))
    before, start = private_gb()[0], time.perf_counter()
    if kind == "sft.py":
        args = sft.Args(dataset=(str(file),), max_length=2048)
        kept = load_samples(sft.encode_rows, sft.SFT_COLUMNS, tokenizer, args, sft.ENCODE_FLAGS)
    elif kind == "grpo.py":
        args = grpo.Args(dataset=(str(file),), reward=("exact_match",))
        kept = load_prompts(args, tokenizer, 4096)
    else:
        kept = RowOrder(sum(1 for _ in file.open()), 0)
    took = time.perf_counter() - start
    results.put((private_gb()[0] - before, took, bool(kept)))


def print_rows() -> None:
    print_table("data", "rows", "file, MB", "private memory of a rank, MB", "seconds")
    draw = random.Random(0)
    letters = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz     ", k=1_000_000))
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = folder
        file = Path(folder, "rows.jsonl")
        for rows in (10_000, 100_000, 1_000_000):
            with file.open("w") as out:
                for i in range(rows):
                    text = letters[i % 999_000 : i % 999_000 + 300]
                    out.write(f'{{"prompt": "{text[:200]}", "completion": "{text[200:]}", ')
                    out.write(f'"answer": "{i}"}}\n')
            for kind in ("order of the rows", "grpo.py", "sft.py"):
                results = fork.Queue()
                child = fork.Process(target=memory_of_data, args=(kind, file, results))
                child.start()
                gigabytes, took, _ = results.get(timeout=3600)
                child.join()
                size = file.stat().st_size / 1e6
                print_row(
                    kind, f"{rows:,}", f"{size:.0f}", f"{1000 * gigabytes:.0f}", f"{took:.0f}"
                )


# ---- collectives of a step ----


def count(script: str) -> None:
    """Run a script with the flags in `sys.argv`; rank 0 prints its collectives of each step."""
    from common.train.run import Run

    calls: Counter = Counter()
    sent: dict[str, int] = defaultdict(int)

    def counted(name: str, function: Callable, size: Callable) -> Callable:
        def call(*args, **kwargs):
            calls[name] += 1
            sent[name] += size(args)
            return function(*args, **kwargs)

        return call

    def size_of(x: object) -> int:
        return x.nbytes if isinstance(x, torch.Tensor) else len(pickle.dumps(x))

    dist.all_gather_object = counted(
        "gathered objects", dist.all_gather_object, lambda args: size_of(args[1])
    )
    dist.gather_object = counted(
        "objects for one rank", dist.gather_object, lambda args: size_of(args[0])
    )
    dist.all_reduce = counted("reductions", dist.all_reduce, lambda args: size_of(args[0]))
    dist.all_to_all_single = counted(
        "samples", dist.all_to_all_single, lambda args: size_of(args[1])
    )
    real_steps = Run.steps

    def steps(run: Run):
        for step in real_steps(run):
            calls.clear()
            sent.clear()
            yield step
            lines = ", ".join(f"{calls[name]} {name} ({sent[name]:,} bytes)" for name in calls)
            distributed.say(f"rank 0 in step {step + 1}: {lines}")

    Run.steps = steps
    runpy.run_path(script, run_name="__main__")


TABLES = dict(
    packing=print_packing, gathers=print_gathers, queue=print_queue, schedules=print_schedules,
    gloo=print_gloo, rows=print_rows,
)  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["count"]:
        sys.argv[:] = sys.argv[2:]
        return count(sys.argv[0])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=TABLES)
    for name in parser.parse_args().tables:
        TABLES[name]()
    return None


if __name__ == "__main__":
    main()
