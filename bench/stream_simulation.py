"""Simulate schedules for rollout ranks: 8 and 64 of them, completions of up to 16,384 tokens.

    OMP_NUM_THREADS=1 python bench/stream_simulation.py
    python bench/stream_simulation.py --seconds 1:0.011 32:0.012 128:0.016 256:0.024 --prefill 3e-5
    python bench/stream_simulation.py --check runs/stream/a_1+1_S=1_16_seed0_after

The second command is for another engine, the third compares with a run of bench/stream.py.

An engine step adds one token to every running completion. It takes as long as vLLM takes for this
number of completions, whatever their context. The seconds for 1, 8, 32, 128 and 256 completions are
measured here with `tiny`, or given.

Lengths are lognormal, cut at 16,384: median 1,500 tokens, standard deviation of the logarithm 1,
half of its variance from the prompt (mean about 2,400; one in a hundred is cut). Every rank has 8
prompts a step with 8 completions each. There are as many training ranks. A training step takes
--train times as long as a rank's share of a batch on average; a weight transfer takes --hand_over
times as long.

    lockstep          a batch starts when all ranks have finished the one before; S: batches that
                      may be ahead
    stream            common/rollout/remote_sampler.py: prompt d goes to rank d % R, (1 + S) batches
                      are in flight; new weights interrupt, and in-flight completions recompute
                      their prefix
    ... to the idlest prompts go to the rank with the fewest completions in flight
    ... drained       --partial_rollouts false: running completions end before new weights, and none
                      starts meanwhile
    ... oversampled   --oversample 1.25: S - 1 + 1.25 batches in flight, a step takes the oldest
                      complete ones

Columns: `sampling` is the fraction of time in which a rollout rank samples. `running` is its mean
number of completions meanwhile. `trainers wait` is the fraction of a step in which training ranks
are idle. `ahead` is the mean age of the oldest token of a completion, in steps."""

import argparse
import heapq
import math
import os
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

POINTS = (1, 8, 32, 128, 256)
SLOTS = 256
PUBLISHED = (
    "published: ROLL Flash 2.24x, async_rlhf 1.25x to 1.7x (arXiv:2410.18252); on GPUs, "
    "with other models and lengths"
)


# ---- the parts ----


@dataclass
class Machine:
    """Seconds of each operation."""

    points: list[tuple[int, float]]
    """running completions, and seconds of an engine step"""
    prefill: float
    """seconds per prefix token"""
    train: float = 0.0
    """seconds of a training step"""
    hand_over: float = 0.0

    def turn(self, running: int) -> float:
        numbers = [n for n, _ in self.points]
        i = min(max(1, bisect_left(numbers, running)), len(numbers) - 1)
        (n, low), (m, high) = self.points[i - 1 : i + 1]
        return low + (high - low) * (running - n) / (m - n)


@dataclass
class Load:
    """Work to do. `lengths()` draws the lengths of one prompt's completions."""

    ranks: int
    trainers: int
    prompts: int
    """prompts of a step, over all ranks"""
    lengths: Callable[[], list[int]]


@dataclass
class Way:
    """Schedule of the rollout ranks."""

    name: str
    staleness: int
    lockstep: bool = False
    to_the_idlest: bool = False
    partial: bool = True
    oversample: float = 1.0


@dataclass
class Result:
    step: float
    """seconds"""
    sampling: float
    running: float
    waiting: float
    """idle fraction of the training ranks"""
    ahead: float
    length: float
    """mean length of trained completions"""


@dataclass
class Rank:
    """Engine. Its clock is at `now`; `at` counts its steps."""

    machine: Machine
    now: float = 0.0
    at: float = 0.0
    running: list[tuple[float, int, int]] = field(default_factory=list)
    """heap of (step at which it ends, number of the prompt, length)"""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    """heap of (number of the prompt, length)"""
    sampled: float = 0.0
    """seconds"""
    sampled_together: float = 0.0
    """seconds times running completions"""

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    def admit(self) -> None:
        while self.waiting and len(self.running) < SLOTS:
            number, length = heapq.heappop(self.waiting)
            heapq.heappush(self.running, (self.at + length, number, length))

    def next_end(self) -> float:
        """Return the time at which the next completion ends."""
        if not self.running:
            return math.inf
        return self.now + (self.running[0][0] - self.at) * self.machine.turn(len(self.running))

    def sample_until(self, when: float) -> None:
        """Sample until `when`; the caller ensures that no completion ends before."""
        spent, running = (
            max(0.0, when - self.now),
            len(self.running),
        )  # a weight transfer may end after `when`
        if running:
            self.at += spent / self.machine.turn(running)
            self.sampled += spent
            self.sampled_together += spent * running
        self.now = max(self.now, when)

    def end_one(self, admit: bool = True) -> int:
        """Sample until the next completion ends, and return the prompt's number."""
        end, (at, number, _) = self.next_end(), self.running[0]
        self.sample_until(end)
        self.at = at
        heapq.heappop(self.running)
        if admit:
            self.admit()
        return number

    def take_weights(self, when: float) -> None:
        """Load the weights that arrive at `when`, and recompute the prefix of all running
        completions."""
        tokens = sum(self.at - (end - length) for end, _, length in self.running)
        self.now = when + tokens * self.machine.prefill


# ---- schedules ----


def lockstep(way: Way, load: Load, machine: Machine, steps: int, skipped: int) -> Result:
    ranks, generated, trained, lengths, waited, ahead = (
        [Rank(machine) for _ in range(load.ranks)],
        [],
        [],
        [],
        [],
        [],
    )
    for step in range(steps):
        free = trained[step - 1 - way.staleness] if step > way.staleness else 0.0
        began = max([free, *generated[-1:]]) + machine.hand_over
        for number in range(load.prompts):
            drawn = load.lengths()
            lengths += drawn if step >= skipped else []
            ranks[number % load.ranks].waiting += [(number, length) for length in drawn]
        for rank in ranks:
            rank.now = began
            heapq.heapify(rank.waiting)
            rank.admit()
            while rank.running:
                rank.end_one()
        generated.append(max(rank.now for rank in ranks))
        before = trained[-1] if trained else 0.0
        waited.append(max(0.0, generated[-1] - before))
        trained.append(max(before, generated[-1]) + machine.train)
        ahead.append(sum(end > began for end in trained[:-1]))
    return _result(ranks, trained, waited, ahead, lengths, skipped)


def stream(way: Way, load: Load, machine: Machine, steps: int, skipped: int) -> Result:
    ranks, count = [Rank(machine) for _ in range(load.ranks)], load.prompts // load.trainers
    beside = (
        round((way.staleness - (way.oversample > 1) + way.oversample - 1) * load.prompts)
        // load.trainers
    )
    drawn = [0] * load.trainers  # drawn prompts of each training rank
    begun: list[dict[int, int]] = [
        {} for _ in range(load.trainers)
    ]  # prompt -> step in which it started
    left: dict[int, int] = {}  # prompt -> completions that have not ended
    length_of: dict[int, int] = {}
    now, trained, waited, ahead, lengths = 0.0, [], [], [], []

    def chosen(trainer: int, step: int) -> list[int] | None:
        mine = sorted(begun[trainer])
        done = [number for number in mine if not left[number]]
        if way.oversample == 1 or len(done) == len(mine):
            return mine[:count] if all(not left[number] for number in mine[:count]) else None
        rest = [number for number in mine if number not in set(done[:count])]
        late = any(
            begun[trainer][x] + way.staleness < step + 1 + i // count for i, x in enumerate(rest)
        )
        return None if len(done) < count or late else done[:count]

    for step in range(steps):
        for rank in ranks:
            while rank.next_end() <= now:
                left[rank.end_one()] -= 1
            rank.sample_until(now)
        if not way.partial:
            for rank in ranks:
                while rank.running:
                    left[rank.end_one(admit=False)] -= 1
        given = max(now, *(rank.now for rank in ranks)) + machine.hand_over
        for rank in ranks:
            rank.take_weights(given)
        for trainer in range(load.trainers):
            while len(begun[trainer]) < count + beside:
                number, drawn[trainer] = (
                    trainer + load.trainers * drawn[trainer],
                    drawn[trainer] + 1,
                )
                begun[trainer][number], its = step, load.lengths()
                left[number], length_of[number] = len(its), sum(its)
                rank = (
                    min(ranks, key=lambda r: r.in_flight)
                    if way.to_the_idlest
                    else ranks[number % load.ranks]
                )
                for length in its:
                    heapq.heappush(rank.waiting, (number, length))
        for rank in ranks:
            rank.admit()
        found = [chosen(trainer, step) for trainer in range(load.trainers)]
        events = [(rank.next_end(), i) for i, rank in enumerate(ranks)]
        heapq.heapify(events)
        collected = given
        while None in found:
            collected, i = heapq.heappop(events)
            number = ranks[i].end_one()
            heapq.heappush(events, (ranks[i].next_end(), i))
            left[number] -= 1
            trainer = number % load.trainers
            if not left[number] and found[trainer] is None:
                found[trainer] = chosen(trainer, step)
        for trainer, numbers in enumerate(found):
            for number in numbers:
                ahead.append((step, step - begun[trainer].pop(number)))
                lengths.append((step, length_of.pop(number)))
                del left[number]
        waited.append(collected - now)
        now = max(collected, given) + machine.train
        trained.append(now)
    ahead = [x for step, x in ahead if step >= skipped]
    return _result(
        ranks, trained, waited, ahead, [x for step, x in lengths if step >= skipped], skipped
    )


def _result(ranks: list[Rank], trained, waited, ahead, lengths, skipped: int) -> Result:
    count = len(trained) - skipped
    whole = trained[-1] - trained[skipped - 1]
    sampled = sum(rank.sampled for rank in ranks)
    share = sampled / len(ranks) / max(trained[-1], *(rank.now for rank in ranks))
    together = sum(rank.sampled_together for rank in ranks) / sampled
    return Result(
        whole / count, share, together, sum(waited[skipped:]) / whole, fmean(ahead), fmean(lengths)
    )


# ---- measurement ----


def measure() -> Machine:
    """Measure vLLM with `tiny` in this process."""
    from common.config.online import OnlineArgs
    from common.model.hub import load_tokenizer, resolve_model
    from common.model.policy import load_policy
    from common.parallel import distributed
    from common.rollout.engine import Request, empty_completion, make_engine
    from common.rollout.weights import whole_weights

    device, _, _ = distributed.setup(seed=0)
    args, path = OnlineArgs(max_new_tokens=64), resolve_model("tiny")
    engine = make_engine(path, args, [], load_tokenizer(path), device)
    engine.wake()
    engine.load_weights(whole_weights(load_policy(path, args, device), engine.dtype))

    def turns(running: int, prompt: int, count: int) -> list[float]:
        rng, took = random.Random(0), []
        for i in range(running):
            prompt_ids = [rng.randrange(95) for _ in range(prompt)]
            engine.submit(Request(empty_completion(prompt_ids), count, i, 1.0))
        for _ in range(count):
            start = time.perf_counter()
            engine.advance()
            took.append(time.perf_counter() - start)
        return took

    turns(8, 8, 8)
    points = [(n, median(turns(n, 8, 24)[4:])) for n in POINTS]
    prefill = median(turns(4, 1500, 1)[0] for _ in range(3)) / 6000
    engine.close()
    distributed.cleanup()
    return Machine(points, prefill)


def long_tailed(rng: random.Random, samples: int = 8) -> list[int]:
    prompt = rng.gauss(0, math.sqrt(0.5))
    return [
        max(1, min(16384, round(1500 * math.exp(prompt + rng.gauss(0, math.sqrt(0.5))))))
        for _ in range(samples)
    ]


WAYS = [
    Way("lockstep, S = 0", 0, lockstep=True),
    Way("lockstep, S = 1", 1, lockstep=True),
    Way("lockstep, S = 2", 2, lockstep=True),
    Way("stream, S = 1", 1),
    Way("... to the idlest", 1, to_the_idlest=True),
    Way("... drained", 1, partial=False),
    Way("... oversampled", 1, oversample=1.25),
    Way("stream, S = 2", 2),
    Way("... to the idlest", 2, to_the_idlest=True),
    Way("... drained", 2, partial=False),
    Way("... oversampled", 2, oversample=1.25),
    Way("lockstep, S = 4", 4, lockstep=True),
    Way("stream, S = 4", 4),
]


def simulate(way: Way, load: Load, machine: Machine, steps: int, skipped: int) -> Result:
    return (lockstep if way.lockstep else stream)(way, load, machine, steps, skipped)


def load_of(ranks: int) -> Load:
    """Return the work of `ranks` rollout ranks; every way has the same lengths."""
    rng = random.Random(0)
    return Load(ranks, ranks, 8 * ranks, lambda: long_tailed(rng))


def with_training(machine: Machine, train: float, hand_over: float) -> tuple[Machine, float]:
    """Return the machine with seconds of training and of a weight transfer, as multiples of those
    of a rank's share of a batch; and these seconds."""
    share = []
    for _ in range(20):  # seconds of a rank's own share of a batch, in lockstep
        rank, rng = Rank(machine), random.Random(len(share))
        rank.waiting = [(0, length) for _ in range(8) for length in long_tailed(rng)]
        rank.admit()
        while rank.running:
            rank.end_one()
        share.append(rank.now)
    mean = fmean(share)
    return replace(machine, train=train * mean, hand_over=hand_over * mean), mean


def table(ranks: int, machine: Machine, options: argparse.Namespace) -> None:
    machine, share = with_training(machine, options.train, options.hand_over)
    print(
        f"\n{ranks} rollout ranks; a share of a batch takes {share:.1f} s, "
        f"training {machine.train:.1f} s"
    )
    print(
        "| | steps/hour | against lockstep, "
        "S = 0 | the same S | sampling | running | trainers wait | ahead |"
    )
    print("|---|---|---|---|---|---|---|---|")
    results = [
        simulate(way, load_of(ranks), machine, options.steps, options.steps // 4) for way in WAYS
    ]
    of_lockstep = {
        way.staleness: result.step
        for way, result in zip(WAYS, results, strict=True)
        if way.lockstep
    }
    for way, result in zip(WAYS, results, strict=True):
        gains = [f"{of_lockstep[staleness] / result.step:.2f}x" for staleness in (0, way.staleness)]
        busy = (
            f"{result.sampling:.0%} | {result.running:.0f} | {result.waiting:.0%} | "
            f"{result.ahead:.1f}"
        )
        print(f"| {way.name} | {3600 / result.step:.1f} | {' | '.join(gains)} | {busy} |")


def check(folders: list[Path], machine: Machine) -> None:
    """Compare runs of bench/stream.py's workload a with rollout ranks to the simulation. The
    simulation gets their flags, mean length, and times of training and weight transfer."""
    import yaml

    from common.metrics.curves import read_metrics

    for folder in folders:
        args = yaml.safe_load((folder / "args.yaml").read_text())
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["step"] > 2]
        mean = {
            key: fmean(line.get(f"time/{key}", 0) for line in lines)
            for key in ("step", "rollout", "sync")
        }
        dots, rng = fmean(line["completions/mean_length"] for line in lines) - 4, random.Random(0)

        def drawn(dots=dots, rng=rng, args=args) -> list[int]:
            rate = math.log(1 - 1 / (dots + 1))
            most = args["max_new_tokens"]
            return [
                min(most, 4 + int(math.log(1 - rng.random()) / rate))
                for _ in range(args["samples_per_prompt"])
            ]

        its = replace(
            machine, train=mean["step"] - mean["rollout"] - mean["sync"], hand_over=mean["sync"]
        )
        load = Load(args["rollout_ranks"], 1, args["prompts_per_step"], drawn)
        way = Way(
            "",
            args["max_staleness"],
            lockstep="oversample" not in args,
            oversample=args.get("oversample", 1),
        )
        said = simulate(way, load, its, 200, 20).step
        print(
            f"{folder.name}: {mean['step']:.3f} s/step, "
            f"simulated {said:.3f} ({said / mean['step'] - 1:+.0%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        nargs="+",
        help="seconds of an engine step, as RUNNING:SECONDS; default: measured",
    )
    parser.add_argument("--prefill", type=float, help="with --seconds: seconds per prefix token")
    parser.add_argument(
        "--train",
        type=float,
        default=0.7,
        help="training step / a rank's share of a batch, in seconds",
    )
    parser.add_argument(
        "--hand_over", type=float, default=0.02, help="weight transfer / the same share"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="steps; the first quarter is not counted"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument(
        "--check", type=Path, nargs="+", help="compare to these runs of workload a; no table"
    )
    options = parser.parse_args()
    if (options.seconds is None) != (options.prefill is None):
        sys.exit("--seconds and --prefill belong together")
    if options.seconds:
        points = sorted(
            (int(n), float(took))
            for n, _, took in (point.partition(":") for point in options.seconds)
        )
        if len(points) < 2:
            sys.exit("--seconds needs two points or more")
        machine = Machine(points, options.prefill)
    else:
        machine = measure()
    points = ", ".join(f"{n}: {1000 * took:.2f}" for n, took in machine.points)
    print(
        f"milliseconds a turn by running completions: {points}; "
        f"a token of a prefix {1000 * machine.prefill:.4f}"
    )
    if options.check:
        return check(options.check, machine)
    for ranks in options.ranks:
        table(ranks, machine, options)
    print(f"\n{PUBLISHED}")


if __name__ == "__main__":
    main()
