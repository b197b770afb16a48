"""Compare self_distill.py with grpo.py on one task, and with sft.py in what is forgotten on another
one.

    python bench/self_distill.py    # three seeds, after the first two commands of lesson 11
    python bench/self_distill.py --seeds 1 --model PATH --dataset FILE    # three rows of GSM8K

Each run has one rank. The seconds are CPU seconds of steps, so that other jobs on the machine do
not change them. Runs stay in runs/self_distill; a finished run is not repeated."""

import argparse
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs/self_distill"
DATA = "runs/course/11/data"
# The meter's clock is that of this process.
RUN = """
import runpy, sys, time
from common.metrics import meter
meter._now = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ONLINE = (
    "--model", "runs/course/11/base/hf", "--prompt_format", "plain", "--reward", "gsm8k_flexible",
    "--max_steps", "40", "--prompts_per_step", "8", "--samples_per_prompt", "8",
    "--max_new_tokens", "14", "--lr", "4e-4", "--lr_schedule", "linear", "--eval_every", "10",
    "--save_every", "40", "--trace_every", "0", "--engine", "transformers",
)  # fmt: skip
ALL = ("--dataset", f"{DATA}/questions.jsonl", "--eval_dataset", f"{DATA}/held_out.jsonl",
       "--eval_size", "250")  # fmt: skip
PLUS = ("--dataset", f"{DATA}/plus.jsonl", "--eval_dataset", f"{DATA}/held_out_plus.jsonl",
        f"{DATA}/held_out_minus.jsonl")  # fmt: skip
SFT = (
    "--model", "runs/course/11/base/hf", "--prompt_format", "plain", "--columns",
    "completion=chosen", "chosen=completion", "--max_steps", "40", "--batch_size", "64", "--lr",
    "4e-4", "--lr_schedule", "linear", "--warmup_steps", "0", "--eval_every", "10",
    "--eval_generate", "499", "--eval_new_tokens", "14", "--save_every", "40", "--trace_every", "0",
)  # fmt: skip
HINT = ("--hint_template", "{hint};{prompt}", "--hint")
ARMS = {
    "grpo": ("grpo.py", *ONLINE, *ALL),
    "column": ("self_distill.py", *ONLINE, *ALL, *HINT, "answer"),
    "sibling": ("self_distill.py", *ONLINE, *ALL, *HINT, "sibling"),
    "sibling + policy": (
        "self_distill.py", *ONLINE, *ALL, *HINT, "sibling", "--policy_coef", "1",
    ),
    "plus: sft": ("sft.py", *SFT, *PLUS),
    "plus: column": ("self_distill.py", *ONLINE, *PLUS, *HINT, "answer"),
    "plus: grpo": ("grpo.py", *ONLINE, *PLUS),
}  # fmt: skip
REAL = (
    "self_distill.py", "--reward", "gsm8k", "--hint", "answer", "--max_steps", "6",
    "--prompts_per_step", "2", "--samples_per_prompt", "1", "--max_new_tokens", "32", "--lr",
    "2e-5", "--eval_every", "0", "--eval_size", "1", "--save_every", "100", "--trace_every", "0",
    "--engine", "transformers", "--pack_tokens", "1024",
)  # fmt: skip


def launch(name: str, seed: int, command: tuple[str, ...]) -> list[dict]:
    """Run an arm once, and return its metrics."""
    folder = FOLDER / f"{name.replace(': ', '_').replace(' + ', '_')}_{seed}"
    done = folder / "hf"
    if not done.is_dir():
        words = [*command, "--seed", str(seed), "--output_dir", str(folder), "--resume", "never"]
        environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        subprocess.run(
            [sys.executable, "-c", RUN, *words], cwd=ROOT, env=environment, check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return read_metrics(folder / "metrics.jsonl")


def report(name: str, seed: int, lines: list[dict]) -> None:
    """Print held-out scores with the CPU seconds of the steps before, and the means of the last
    five steps."""
    steps = [line for line in lines if line["step"] > 0]
    seconds = [0.0, *accumulate(line["time/step"] for line in steps)]
    scores = []
    for line in lines:
        found = [x for key, x in line.items() if key.startswith("eval/solved")]
        found = found[1:] or found  # of each held-out set, if there are several
        if found:
            values = " ".join(f"{x:.3f}" for x in found)
            scores.append(f"{line['step']}: {values} ({seconds[line['step']]:.1f} s)")
    means = {}
    for key in ("reward", "completions/mean_length", "reverse_kl", "hints/used", "entropy"):
        values = [line[key] for line in steps[-5:] if key in line]
        if values:
            means[key] = round(fmean(values), 3)
    print(f"{name}, seed {seed}: {'; '.join(scores)}; {means}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--model", help="a real model")
    parser.add_argument("--dataset", help="its data, with question and answer")
    options = parser.parse_args()
    if options.model:
        for seed in range(options.seeds):
            lines = launch(
                "real", seed, (*REAL, "--model", options.model, "--dataset", options.dataset)
            )
            for line in lines:
                found = {key: round(line[key], 4) for key in ("loss", "reverse_kl", "agreement")}
                print(line["step"], found | {"length": line["completions/mean_length"]})
        return
    for seed in range(options.seeds):
        for name in options.only:
            report(name, seed, launch(name, seed, ARMS[name]))


if __name__ == "__main__":
    main()
