"""Measure the math reward in worker processes: answers per second, and the cost of answers that
make sympy hang.

    python bench/rewards.py    # about 3 minutes

1. Throughput: `math` on random answers, in this process without deadlines, and in pools of 1, 2 and
   4 running processes. Answers are fractions, decimals, roots, polynomials and intervals, half of
   them right. A gold answer occurs 8 times in a row, as in a group of samples.
2. 10,000 answers of which 0.2% hang. Each of these costs a process its deadline and a new start.
   Also measured: the longest time between a deadline and the end of its process, and the number of
   processes that remain.
"""

import argparse
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.rewards.math_reward import math
from common.rewards.processes import Pool, Process

TARGET = "common.rewards.math_reward:math"
HANGING = [
    r"9^{9^{9^{9}}}",
    r"(10^8)!",
    r"\sum_{i=1}^{10^9} \frac{1}{i^2+1}",
    r"\log(10^{10^9})",
    r"(x+y+z)^{300}",
]


def random_calls(n: int, rng: random.Random) -> list[tuple[str, dict]]:
    calls = []
    while len(calls) < n:
        a, b, c = rng.randint(-99, 99), rng.randint(2, 99), rng.randint(2, 9)
        gold, same = rng.choice([
            (f"{a}", f"{a}.0"), (f"{a * 1000}", f"{a * 1000:,}"),
            (rf"\frac{{{a}}}{{{b}}}", f"{c * a}/{c * b}"), (f"{a / 8}", rf"\frac{{{a}}}{{8}}"),
            (rf"{b}\sqrt{{{c}}}", rf"\sqrt{{{b * b * c}}}"),
            (f"(x+{a})^2", f"x^2+{2 * a}x+{a * a}"), (f"[{a},{a + b})", f"[{a}, {a + b})"),
        ])  # fmt: skip
        row = dict(answer=gold, _source=f"bench:{len(calls)}")
        for _ in range(8):
            answer = (
                same
                if rng.random() < 0.5
                else rng.choice([f"{a + 1}", f"x+{b}", rf"\frac{{{a}}}{{{b + 1}}}"])
            )
            calls.append((f"Adding them up:\n so the answer is \\boxed{{{answer}}}.", row))
    return calls[:n]


def children(pid: int | str = "self") -> int:
    """Return the number of child processes."""
    return sum(len(f.read_text().split()) for f in Path(f"/proc/{pid}/task").glob("*/children"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--answers", type=int, default=10_000, help="answers of part 2; part 1 uses a fifth"
    )
    parser.add_argument("--hanging", type=float, default=0.002, help="fraction of them that hang")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds")
    args = parser.parse_args()
    rng = random.Random(0)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")

    calls = random_calls(args.answers // 5, rng)
    math.prepare()
    start = time.perf_counter()
    expected = [math(*call) for call in calls]
    alone = len(calls) / (time.perf_counter() - start)
    print(
        f"\n{len(calls)} answers, {sum(expected):.0f} right       answers/s\n"
        f"in this process, no deadline {alone:11.0f}"
    )
    for size in (1, 2, 4):
        pool = Pool(TARGET, size, args.deadline, shared=True)
        pool.map(calls[:200])  # starts them
        start = time.perf_counter()
        values = [result.value for result in pool.map(calls)]
        rate = len(calls) / (time.perf_counter() - start)
        print(f"pool of {size} {rate:29.0f}    {rate / alone:.2f}x")
        assert values == expected
        pool.close()

    calls = random_calls(args.answers, rng)
    hanging = set(rng.sample(range(len(calls)), round(args.hanging * len(calls))))
    for i in hanging:
        calls[i] = (f"so \\boxed{{{rng.choice(HANGING)}}}", dict(answer="18", _source=f"bench:{i}"))
    late: list[float] = []  # seconds between a deadline and the moment at which its process is gone
    pool, close = Pool(TARGET, 4, args.deadline, shared=True), Process.close

    def timed_close(process: Process) -> None:
        server = pool.server.process.pid
        running = children(server)
        close(process)
        while process.end and process.end.timed_out and children(server) == running:
            time.sleep(0.001)
        late.append(time.monotonic() - process.deadline)

    Process.close = timed_close
    before, start = children(), time.perf_counter()
    results = pool.map(calls)
    seconds, during = time.perf_counter() - start, children(pool.server.process.pid)
    pool.close()
    lost = {i for i, result in enumerate(results) if result.timed_out}
    errors = sum(bool(result.error) for result in results) - len(lost)
    print(
        f"\n{len(calls)} answers, {len(hanging)} of them hang, pool of 4, "
        f"deadline {args.deadline:g} s\n"
        f"{seconds:8.1f} s in all; the deadlines alone are "
        f"{len(hanging) * args.deadline / 4:.1f} s\n"
        f"{len(lost):8} timed out, of which {len(lost & hanging)} hang; {errors} other errors\n"
        f"{max(late, default=0.0):8.3f} s after its deadline the slowest to be killed was gone\n"
        f"{before:8} processes before, {during} at the end, {children()} after"
    )


if __name__ == "__main__":
    main()
