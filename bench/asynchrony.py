"""Compare generation and training in turns (S = 0) to both at once (S = 1, 2), with one rank for
each.

    torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml    # the model it starts from
    python bench/asynchrony.py

online_dpo.py runs on the built-in task with the true reward. It samples so many completions per
prompt that generation takes about as long as training. There are three seeds. The settings of one
seed run after each other, so that the machine is in the same state. A last setting has the same two
ranks without rollout ranks. The seconds are those of the training steps by the trainer's clock,
without start-up and evaluation. Runs stay in runs/asynchrony; a finished run is not repeated. The
program draws docs/asynchronous.png."""

import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timeline
from seeds import launch

from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
STEPS, SEEDS = 80, 3
LOAD = (
    "--model", "runs/demo/sft/hf", "--prompts_per_step", 128, "--samples_per_prompt", 3,
    "--max_new_tokens", 5, "--beta", 0.5, "--lr", 1e-4, "--lr_schedule", "linear",
    "--max_steps", STEPS, "--eval_every", STEPS, "--eval_size", 500, "--save_every", STEPS,
    "--log_every", STEPS, "--trace_every", 0,
)  # fmt: skip
SETTINGS = {
    "alternating on both": (),
    "S = 0": ("--rollout_ranks", 1, "--max_staleness", 0),
    "S = 1": ("--rollout_ranks", 1, "--max_staleness", 1),
    "S = 2": ("--rollout_ranks", 1, "--max_staleness", 2),
}


def folder(name: str, seed: int) -> Path:
    return ROOT / "runs/asynchrony" / f"{name.replace(' ', '_')}_seed{seed}"


def measured(name: str, seed: int) -> list[dict]:
    """Return the metrics of one run."""
    launch(folder(name, seed), "online_dpo.py", *map(str, (*LOAD, *SETTINGS[name], "--seed", seed)))
    return read_metrics(folder(name, seed) / "metrics.jsonl")


def picture(runs: dict[str, Path], file: Path, seconds: float) -> None:
    """Draw the activity of every rank after 60% of each run, when no curves are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(runs), 1, figsize=(10, 1.4 * len(runs)), sharex=True, layout="constrained"
    )
    for axis, (title, run) in zip(axes, runs.items(), strict=True):
        ranks = timeline.read(run)
        start, end = timeline.duration(ranks)
        timeline.draw(axis, ranks, start + 0.6 * (end - start), seconds)
        axis.set_title(title, fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds")
    timeline.legend(figure)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    if not (ROOT / "runs/demo/sft/hf").is_dir():
        sys.exit(
            "train the model it starts from: "
            "torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml"
        )
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    scores: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for seed in range(SEEDS):
        for name in SETTINGS:
            lines = measured(name, seed)
            steps = [line for line in lines if line["step"] > 0]
            seconds[name].append(sum(line["time/step"] for line in steps))
            scores[name].append(steps[-1]["eval/solved"])
            parts = f"step {median(line['time/step'] for line in steps):.3f} s"
            for kind in ("rollout_ranks", "training_ranks"):
                if f"idle/{kind}" in steps[-1]:
                    idle = fmean(line.get(f"idle/{kind}", 0) for line in steps)
                    parts += f", {kind.replace('_', ' ')} idle {100 * idle:.0f}%"
            stale = fmean(line.get("sampling/staleness/mean", 0) for line in steps)
            print(
                f"{name:19s} seed {seed}: {seconds[name][-1]:6.1f} s, {parts}, "
                f"staleness {stale:.2f}, "
                f"greedy {lines[0]['eval/solved']:.3f} -> {scores[name][-1]:.3f}",
                flush=True,
            )
    for name in SETTINGS:
        ratios = [
            alternating / own
            for alternating, own in zip(seconds["S = 0"], seconds[name], strict=True)
        ]
        print(
            f"{name:19s}: {min(ratios):.2f} to {max(ratios):.2f} times as fast as S = 0; "
            "greedy exact match " + " ".join(f"{score:.3f}" for score in scores[name])
        )
    runs = {name: folder(name, 0) for name in ("S = 0", "S = 1")}
    picture(runs, ROOT / "docs" / "asynchronous.png", seconds=2.0)


if __name__ == "__main__":
    main()
