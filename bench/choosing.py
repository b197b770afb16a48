"""Measure a step of every training script on the built-in model and task: the table of
docs/choosing.md.

    OMP_NUM_THREADS=1 python bench/choosing.py

Every step has 256 sequences: 256 rows, 128 pairs, or 256 completions. One rank, one thread, the
default flags otherwise, without evaluations and traces. Times are CPU seconds of the process, which
other jobs change little. The scripts take turns. The time of a run is the median over its steps
from the fourth on. Its ratio to sft.py is formed within each round; the table has the median and
the range of the rounds."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
ROWS, PAIRS = (
    ("--batch_size", "256", "--eval_generate", "0"),
    ("--batch_size", "128", "--eval_generate", "0"),
)
SCRIPTS = {
    "sft": ROWS, "dpo": PAIRS, "kto": ROWS, "rm": PAIRS[:2], "grpo": (), "dapo": (),
    "reinforce": (), "rloo": (), "ppo": (), "online_dpo": (), "bok": (),
    "distill": ("--teacher", "tiny-sft"),
}  # fmt: skip
# Runs a script with a clock of CPU seconds in place of the wall clock.
START = """import runpy, sys, time
from common.metrics import meter
meter._now = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")"""


def run(script: str, steps: int) -> tuple[float, float, float]:
    """Return the seconds of a step, the fraction of sampling in it, and the peak of host memory in
    GB."""
    flags = ["--max_steps", str(steps), "--eval_every", "0", "--trace_every", "0", *SCRIPTS[script]]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", START, f"{script}.py", *flags, "--output_dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        found = [line for line in lines if "time/step" in line][3:]
    sampling = median(
        (line.get("time/rollout", 0) + line.get("time/sync", 0)) / line["time/step"]
        for line in found
    )
    result = median(line["time/step"] for line in found), sampling, found[-1]["memory/host_peak_gb"]
    print(script, *(f"{number:.3f}" for number in result), file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    rounds = [
        {script: run(script, options.steps) for script in SCRIPTS} for _ in range(options.rounds)
    ]
    print(
        "| script | CPU s/step | to sft.py | sampling | host GB |\n| --- | --- | --- | --- | --- |"
    )
    for script in SCRIPTS:
        seconds, sampling, peak = map(median, zip(*(one[script] for one in rounds), strict=True))
        ratios = [one[script][0] / one["sft"][0] for one in rounds]
        spread = f"{median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})"
        print(f"| `{script}.py` | {seconds:.2f} | {spread} | {sampling:.0%} | {peak:.2f} |")


if __name__ == "__main__":
    main()
