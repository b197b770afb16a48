"""Compare the times that `--dry_run` predicts on this CPU with those of runs: the phases of
`make demo`, as a Markdown table.

    python bench/plan.py                            # sft, dpo and grpo on 1 and 2 ranks, minutes
    python bench/plan.py --scripts sft --ranks 1    # a part
    python bench/plan.py --cpu_time                 # on a busy machine

Each run has `--steps` steps with the sizes of its recipe in configs/, without evaluations and
from the built-in model; further flags are passed on. A measured time is the median over the steps
without the first two. A predicted one is the middle of the range, for completions of the measured
length.

Nothing else should run on the machine. With `--cpu_time`, all clocks count the time of a rank on
its core, without waits for other ranks and programs."""

import sys
import time

if sys.argv[1:2] == ["cpu_time"]:  # a rank, before modules bind the clock
    time.perf_counter = time.process_time

import argparse
import importlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

METRICS = {
    "rollout": "time/rollout",
    "log-probs": "time/logprobs",
    "update": "time/train",
    "sync": "time/sync",
    "step": "time/step",
}
MAXIMUM = 5  # --max_new_tokens
OFF = "--eval_every 0 --trace_every 0"
FLAGS = {  # sizes of the recipes in configs/demo_*.yaml
    "sft": "--model tiny --dataset arithmetic --batch_size 128",
    "dpo": "--model tiny-sft --dataset arithmetic --batch_size 128 --lr 1e-6",
    "grpo": "--model tiny-sft --dataset arithmetic --prompts_per_step 32 --samples_per_prompt 16"
    " --minibatches 2 --max_new_tokens 5 --lr 1e-6",
}


def launch(ranks: int, *command: str) -> None:
    """Run a command under torchrun with a core for each rank."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    environment = os.environ | dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    command = (*torchrun, f"--nproc_per_node={ranks}", *command)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


def run(script: str, flags: list[str]) -> None:
    """Run a script in this process, a rank of a launch."""
    from common.config.parse import parse
    from common.parallel import distributed

    sys.argv = [f"{script}.py", *flags]
    module = importlib.import_module(script)
    module.main(parse(module.Args))
    distributed.end_process()


def predict(file: str, share: str, script: str, flags: list[str]) -> None:
    """Write the times of a dry run of `script` to `file`, for completions of this `share` of their
    maximum length. This process is a rank of a launch."""
    from common.train import launch_plan, time_plan
    from common.train.time_plan import SPREAD

    time_plan.LENGTHS = (float(share), float(share))
    describe = launch_plan.describe

    def also_written(of_run, steps: int, fits: bool):
        phases = of_run.phases(1) | dict(step=of_run.step(1))
        if os.environ["RANK"] == "0":
            middle = {name: seconds / SPREAD[1] for name, seconds in phases.items()}
            Path(file).write_text(json.dumps(middle))
        return describe(of_run, steps, fits)

    launch_plan.describe = also_written
    run(script, [*flags, "--dry_run", "true"])


def compare(script: str, ranks: int, clock: str, steps: int, more: list[str]) -> list[str]:
    """Return rows of the table: the phases of a script."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS[script].split(), *OFF.split(), *more]
        flags += ["--max_steps", str(steps), "--output_dir", f"{folder}/run"]
        prediction = f"{folder}/prediction.json"
        launch(ranks, __file__, clock, "run", script, *flags)
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        measured = [line for line in map(json.loads, lines) if "time/step" in line][2:]
        lengths = [line.get("completions/mean_length", MAXIMUM) for line in measured]
        share = str(median(lengths) / MAXIMUM)
        launch(ranks, __file__, clock, "predict", prediction, share, script, *flags)
        predicted = json.loads(Path(prediction).read_text())
    rows = []
    for phase, metric in METRICS.items():
        times = [line[metric] for line in measured if metric in line]
        if times and predicted.get(phase):
            ours = predicted[phase]
            theirs = median(times)
            difference = f"{ours / theirs - 1:+.0%}"
            size = f"{1e3 * ours:.1f} | {1e3 * theirs:.1f}"
            rows.append(f"| {script} | {ranks} | {phase} | {size} | {difference} |")
    return rows


def main() -> None:
    if sys.argv[2:3] == ["run"]:
        return run(sys.argv[3], sys.argv[4:])
    if sys.argv[2:3] == ["predict"]:
        return predict(*sys.argv[3:6], sys.argv[6:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scripts", nargs="+", choices=[*FLAGS], default=[*FLAGS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--cpu_time", action="store_true", help="time of ranks on their cores")
    flags, more = parser.parse_known_args()
    print("| script | ranks | phase | predicted, ms | measured, ms | difference |")
    print("|---|---|---|--:|--:|--:|")
    clock = "cpu_time" if flags.cpu_time else "wall_time"
    for script in flags.scripts:
        for ranks in flags.ranks:
            rows = compare(script, ranks, clock, flags.steps, more)
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    main()
