"""Measure the samples and the seconds until 0.9 of the learnable prompts are solved, for each way
to choose the prompts of a step (docs/grpo.md).

    OMP_NUM_THREADS=1 python bench/draw.py

The prompts are questions of the built-in task: learnable ones, which need a carry and which the
starting model solves sometimes; as many easy ones, which need no carry; and one less of impossible
ones, whose expected answer is no number. `grpo.py` draws prompts uniformly or by
difficulty; `dapo.py` draws them until a step has enough groups of unequal rewards. Every four
steps, one greedy completion of each learnable prompt measures progress. A run ends at 0.9.

Samples count all completions, also those that dapo.py does not train on. Seconds are CPU seconds of
the steps, without evaluations, which other jobs change little. Intervals are 95% bootstraps over
seeds. Runs stay in the folder; a finished run is not repeated."""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.choosing import START  # noqa: E402
from common.data.tasks import arithmetic_rows  # noqa: E402
from common.metrics.curves import read_metrics  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SAMPLES = 16, 8
FLAGS = (
    "--engine", "transformers", "--prompts_per_step", PROMPTS, "--samples_per_prompt", SAMPLES,
    "--lr", 2e-4, "--lr_schedule", "constant", "--warmup_steps", 0, "--eval_every", 4,
    "--eval_size", 256, "--save_every", 10**6, "--log_every", 10**6, "--trace_every", 0,
    "--resume", "never",
)  # fmt: skip
VARIANTS = {
    "grpo.py": ("grpo.py",),
    "grpo.py --draw difficulty": ("grpo.py", "--draw", "difficulty"),
    "dapo.py": ("dapo.py", "--overlong_buffer", 0),
    "dapo.py --draw difficulty": ("dapo.py", "--overlong_buffer", 0, "--draw", "difficulty"),
}
GOAL = 0.9


def needs_carry(row: dict) -> bool:
    """Return whether the tens of the first number and of the answer differ."""
    return row["prompt"][1] != row["answer"][1]


def write_data(folder: Path, size: int) -> None:
    """Write the training rows, with their `kind`, and the learnable ones alone."""
    rows = {row["prompt"]: row for row in arithmetic_rows("train")}.values()
    easy = [row for row in rows if not needs_carry(row)]
    carry = [row for row in rows if needs_carry(row)]
    kinds = dict(easy=easy[:size], learnable=carry[:size])
    rest = (easy[size:] + carry[size:])[:: len(rows) // size]
    kinds["impossible"] = [row | dict(answer="none") for row in rest]
    train = [row | dict(kind=kind) for kind, kind_rows in kinds.items() for row in kind_rows]
    random.Random(0).shuffle(train)
    for name, some in (("train", train), ("learnable", kinds["learnable"])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)


def run(folder: Path, data: Path, steps: int, seed: int, script: str, *flags: object) -> list[dict]:
    """Return the metrics of a run, which stays in `folder`."""
    if not (folder / "hf").is_dir():
        command = [sys.executable, "-c", START, script, *FLAGS, *flags, "--seed", seed]
        command += ["--dataset", data / "train.jsonl", "--eval_dataset", data / "learnable.jsonl"]
        command += ["--max_steps", steps, "--output_dir", folder]
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            time.sleep(2)
            if (folder / "metrics.jsonl").is_file() and cost(
                read_metrics(folder / "metrics.jsonl")
            ):
                process.terminate()  # it ends after its step
                process.wait()
        assert process.returncode == 0
    return read_metrics(folder / "metrics.jsonl")


def curve(lines: list[dict]) -> Iterator[tuple[float, float, float]]:
    """Yield samples, seconds and the fraction of held-out prompts solved, at each evaluation."""
    samples = seconds = 0.0
    for line in lines:
        if line["step"]:
            samples += line.get("dynamic_sampling/draws", 1.0) * PROMPTS * SAMPLES
            seconds += line["time/step"]
        if "eval/solved" in line:
            yield samples, seconds, line["eval/solved"]


def cost(lines: list[dict]) -> tuple[float, float] | None:
    """Return samples and seconds at which the curve first reaches the goal; None if never."""
    for (n, t, low), (next_n, next_t, high) in pairwise(curve(lines)):
        if high >= GOAL:
            part = (GOAL - low) / (high - low) if low < GOAL else 0.0
            return n + part * (next_n - n), t + part * (next_t - t)
    return None


def interval(values: list[float], format_: str) -> str:
    """Return the mean and its bootstrap interval as text."""
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(10_000))
    numbers = (format(x, format_) for x in (fmean(values), means[250], means[9750]))
    return "{} ({} to {})".format(*numbers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/draw")
    parser.add_argument("--prompts", type=int, default=64, help="of each kind")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_data(options.folder, options.prompts)
    runs: dict[str, list] = {name: [] for name in options.variants}
    for seed, name in product(range(options.seeds), options.variants):
        folder = options.folder / f"{name.replace(' ', '_')}_{seed}"
        lines = run(folder, options.folder, options.steps, seed, *VARIANTS[name])
        print(name, seed, lines[-1]["step"], cost(lines), file=sys.stderr, flush=True)
        runs[name].append(lines)
    print("| | samples to 0.9 | CPU seconds to 0.9 | groups with unequal rewards |")
    print("| --- | --- | --- | --- |")
    for name, runs_of_name in runs.items():
        costs = [found for lines in runs_of_name if (found := cost(lines)) is not None]
        if len(costs) < len(runs_of_name):
            print(f"| `{name}` | not reached in {options.steps} steps | | |", flush=True)
            continue
        samples, seconds = map(list, zip(*costs, strict=True))
        unequal = [
            1 - fmean(line["frac_reward_zero_std"] for line in lines if "reward" in line)
            for lines in runs_of_name
        ]
        columns = interval(samples, ",.0f"), interval(seconds, ".1f"), interval(unequal, ".0%")
        print(f"| `{name}` |", " | ".join(columns), "|", flush=True)


if __name__ == "__main__":
    main()
