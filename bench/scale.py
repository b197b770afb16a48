"""Tables of docs/scaling.md for 8, 64 and 1,024 ranks, on one core.

    OMP_NUM_THREADS=1 python bench/scale.py packing      rank 0 packs; the others are simulated
    OMP_NUM_THREADS=1 python bench/scale.py gathers      objects that ranks gather
    OMP_NUM_THREADS=1 python bench/scale.py queue        prompts of all ranks, on every rank
    OMP_NUM_THREADS=1 python bench/scale.py schedules    bench/stream_simulation.py

A step has 8 prompts of each rank with 8 completions each. Lengths are lognormal, half of the
variance from the prompt. "short": like GSM8K, median 170 tokens, at most 1,024, --pack_tokens
8192. "long": median 1,500, standard deviation of the logarithm 1, at most 16,234, --pack_tokens
16384. The functions of common/ run as they are. Only collectives are replaced: they return what the
other ranks would have sent, from pickled bytes."""

import math
import os
import pickle
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from common.data import packing
from common.data.sample import Completion
from common.data.transfer import Outline
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
        logarithms = [[draw.gauss(x, self.of_sample) for _ in range(COMPLETIONS)] for x in centers]
        return [[min(self.most, max(2, round(math.exp(x)))) for x in xs] for xs in logarithms]

    def groups(self) -> list[list[Completion]]:
        """Return the completions of rank 0 with random ids."""
        draw, groups = random.Random(0), []
        for lengths in self.drawn(0):
            prompt = draw.choices(range(1000, 100_000), k=self.prompt)
            groups.append([])
            for n in lengths:
                ids = prompt + draw.choices(range(1000, 100_000), k=n)
                mask = [i >= self.prompt for i in range(len(ids))]
                streams = dict(rollout_logprobs=[-0.5] * len(ids), versions=[0] * len(ids))
                # four letters a token
                row, text = dict(prompt="four" * self.prompt), "four" * n
                groups[-1].append(Completion(ids, mask, self.prompt, row, text=text, **streams))
        return groups

    def outline(self, rank: int) -> Outline:
        """Return what the packer gathers from a rank."""
        count = PROMPTS * COMPLETIONS
        shared = [0, *[self.prompt - 1] * (COMPLETIONS - 1)]
        groups = [[self.prompt + n - 1 for n in lengths] for lengths in self.drawn(rank)]
        shapes = [GroupShape(lengths, shared, [0] * COMPLETIONS) for lengths in groups]
        indices = [*range(rank * count, (rank + 1) * count)]
        return Outline(
            shapes, indices, [None] * count, [[]] * count, ["rollout_logprobs", "versions"]
        )


LOADS = (
    Lengths("short", 100, 170, 0.25, 0.35, 1024, 8192),
    Lengths("long", 150, 1500, 0.71, 0.71, 16234, 16384),
)


def print_row(*cells: object, head: bool = False) -> None:
    texts = [f"{x:,.3g}" if isinstance(x, float) and x < 100 else f"{x:,.0f}"
             if isinstance(x, float | int) else str(x) for x in cells]  # fmt: skip
    print(f"| {' | '.join(texts)} |" + ("\n|" + "---|" * len(cells)) * head, flush=True)


def timed(function: Callable, *args) -> tuple:
    """Return the result of a call and its seconds."""
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def pack_on_rank_0(load: Lengths, ranks: int, traced: bool) -> SimpleNamespace:
    """Pack as rank 0; `traced`: measure Python's memory, which slows everything."""
    groups = load.groups()
    positions = [range(rank, PROMPTS * ranks, ranks) for rank in range(ranks)]
    outlines = [pickle.dumps(load.outline(rank)) for rank in range(1, ranks)]
    sizes = [pickle.dumps(dict.fromkeys(each, COMPLETIONS)) for each in positions[1:]]
    found = SimpleNamespace(gathered=0, unpickled=0.0)

    def gather_objects(value: object) -> list:
        others = sizes if isinstance(value, dict) else outlines
        found.gathered += len(pickle.dumps(value)) + sum(map(len, others))
        values, seconds = timed(lambda: [*map(pickle.loads, others)])
        found.unpickled += seconds
        return [value, *values]

    def placed(*args):
        (found.parts, found.rows), found.placed = timed(place, *args)
        return found.parts, found.rows

    def all_to_all(out: torch.Tensor, sent: torch.Tensor, _, sent_sizes: list[int]) -> None:
        found.sent = (len(sent) - sent_sizes[0]) * sent.shape[1] * 4  # without its own rows
        out.zero_()

    place, packing.place = packing.place, placed
    distributed.gather_objects, dist.all_to_all_single = gather_objects, all_to_all
    os.environ |= dict(WORLD_SIZE=str(ranks), RANK="0")
    if traced:
        tracemalloc.start()
    flags = (1, load.pack_tokens, torch.device("cpu"), 16)
    _, found.packed = timed(packing.pack_minibatches, groups, positions[0], *flags)
    found.memory = tracemalloc.get_traced_memory()[1] if traced else 0
    tracemalloc.stop()
    packing.place = place
    return found


def print_packing() -> None:
    print_row("lengths", "ranks", "completions", "micro-batches", "max / mean cost", "moved, %",
              "sent by rank 0, MB", "gathered by each rank, MB", "unpickle, s", "place, s",
              "whole, s", "Python's memory, MB", head=True)  # fmt: skip
    for load, ranks in ((load, ranks) for load in LOADS for ranks in RANKS):
        found = pack_on_rank_0(load, ranks, traced=False)
        memory = pack_on_rank_0(load, ranks, traced=True).memory
        costs = [[sum(found.parts[key].cost for key in keys) for keys in row] for row in found.rows]
        places = [enumerate(row) for row in found.rows]
        moved = [key for rank, keys in chain(*places) for key in keys if key[0] != rank]
        count = ranks * PROMPTS * COMPLETIONS
        print_row(load.name, ranks, count, len(found.rows),
                  f"{sum(map(max, costs)) / (sum(map(sum, costs)) / ranks):.3f}",
                  100 * sum(len(found.parts[key].lengths) for key in moved) / count,
                  found.sent / 1e6, found.gathered / 1e6, found.unpickled, found.placed,
                  found.packed, memory / 1e6)  # fmt: skip


def save_plans() -> list:
    """Return the checkpoint plans of 8 ranks that share a copy: weights and moments of 399 tensors,
    as in Qwen3-8B."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.setup(0)
    shards = distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    kinds = ("model", "optimizer.state.exp_avg", "optimizer.state.exp_avg_sq")
    names = [f"{kind}.hf.model.layers.{n}.self_attn.q_proj.weight" for kind in kinds
             for n in range(399)]  # fmt: skip
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict.fromkeys(names, shards), is_coordinator=True)
    plan = planner.create_local_plan()
    distributed.cleanup()
    plans = []
    for rank in range(8):
        offsets, sizes, items = torch.Size([rank, 0]), torch.Size([1, 4]), []
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = replace(item.tensor_data.chunk, offsets=offsets, sizes=sizes)
            data = replace(item.tensor_data, chunk=chunk)
            items.append(replace(item, index=replace(item.index, offset=offsets), tensor_data=data))
        plans.append(replace(plan, items=items))
    return plans


def print_gathers() -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from common.metrics.logger import _line

    plans = save_plans()
    objects = {
        "rewards, every rank": ([*range(8)], torch.zeros(8, 8, dtype=torch.float64)),
        "60 metrics, every rank": {f"completions/metric_{n}": ("mean", 1.0, n) for n in range(60)},
        "plan of a checkpoint, rank 0": plans[0],
    }
    for load in LOADS:
        lines = [_line(1, sample, 1.0, 0.5) for sample in chain(*load.groups())]
        objects[f"outline, {load.name}, every rank"] = load.outline(0)
        objects[f"logged completions, {load.name}, rank 0"] = lines
    print_row("object, receiver", "KB of a rank", *(f"{n:,} ranks, MB" for n in RANKS), head=True)
    for name, gathered in objects.items():
        size = len(pickle.dumps(gathered))
        print_row(name, size / 1e3, *(size * n / 1e6 for n in RANKS))
    for ranks in RANKS:
        copies = [pickle.loads(pickle.dumps(plan)) for plan in plans * (ranks // 8)]
        _, seconds = timed(DefaultSavePlanner().create_global_plan, copies)
        print(f"rank 0 plans a checkpoint of {ranks:,} ranks: {seconds:.1f} s")


def print_queue() -> None:
    from common.data.order import RowOrder
    from common.rollout.prompt_queue import PromptQueue

    head = "--oversample", "ranks", "prompts in flight", "draw, ms", "choose, ms", "state, KB"
    print_row(*head, head=True)
    for oversample, ranks in ((x, ranks) for x in (1.0, 1.25) for ranks in RANKS):
        args = SimpleNamespace(prompts_per_step=PROMPTS * ranks, max_staleness=2)
        args.oversample = oversample
        queue = PromptQueue(RowOrder(100_000, 0), args, 0, ranks, prefetch_steps=1)
        (_, drawn), (_, chosen) = timed(queue.draw, 0, 100), timed(queue.choose, ())
        state = len(repr(queue.state_dict()))
        in_flight = len(queue.in_flight)
        print_row(oversample, ranks, in_flight, 1000 * drawn, 1000 * chosen, state / 1e3)


def print_schedules() -> None:
    from bench import stream_simulation as simulation

    # assumed: an engine step of 11 ms for one completion, 24 ms for 256
    machine = simulation.Machine([(1, 0.011), (32, 0.012), (128, 0.016), (256, 0.024)], 3e-5)
    machine, _ = simulation.with_training(machine, train=0.7, hand_over=0.02)
    print_row("schedule", "ranks", "steps/hour", "sampling, %", "trainers wait, %", head=True)
    for way in simulation.WAYS:
        for ranks in RANKS if way.partial and way.staleness <= 2 else ():
            load, steps = simulation.load_of(ranks), 40 if ranks < 1024 else 24
            result = simulation.simulate(way, load, machine, steps, steps // 4)
            shares = (100 * result.sampling, 100 * result.waiting)
            print_row(way.name, ranks, 3600 / result.step, *shares)


TABLES = dict(packing=print_packing, gathers=print_gathers, queue=print_queue,
              schedules=print_schedules)  # fmt: skip

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TABLES:
        sys.exit(__doc__)
    TABLES[sys.argv[1]]()
