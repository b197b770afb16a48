"""Generating and training at the same time: one rank of each kind, in turns (S = 0) and together (S = 1, 2).

    torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml    # the model it starts from
    python bench/asynchrony.py

online_dpo.py on the built-in task with the true reward, so many completions per prompt that generating takes about as
long as training; three seeds; the settings of one seed follow each other, so that the machine is the same for them.
Also the same two ranks each doing both in turns. The seconds are those of the training steps, by the trainer's clock,
without start-up and evaluation. Runs stay in runs/asynchrony; a finished one is not repeated. Draws
docs/asynchronous.png.
"""

import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from seeds import launch

from common.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
STEPS, SEEDS = 80, 3
LOAD = (
    "--model", "runs/demo/sft/hf", "--prompts_per_step", 128, "--samples_per_prompt", 3, "--max_new_tokens", 5,
    "--beta", 0.5, "--lr", 1e-4, "--lr_schedule", "linear", "--max_steps", STEPS, "--eval_every", STEPS,
    "--eval_size", 500, "--save_every", STEPS, "--log_every", STEPS,
)  # fmt: skip
SETTINGS = {
    "in turns on both": (),
    "S = 0": ("--rollout_ranks", 1, "--max_staleness", 0),
    "S = 1": ("--rollout_ranks", 1, "--max_staleness", 1),
    "S = 2": ("--rollout_ranks", 1, "--max_staleness", 2),
}


def measured(name: str, seed: int) -> list[dict]:
    """The metrics of one run."""
    folder = ROOT / "runs/asynchrony" / f"{name.replace(' ', '_')}_seed{seed}"
    launch(folder, "online_dpo.py", *map(str, (*LOAD, *SETTINGS[name], "--seed", seed)))
    return read_metrics(folder / "metrics.jsonl")


def busy(line: dict) -> float:
    """Seconds of one step in which the trainer worked on its own."""
    return sum(line[f"time/{part}"] for part in ("reward", "logprobs", "train"))


def timeline(runs: dict[str, list[dict]], picture: Path, first: int, count: int) -> None:
    """Who did what when, for `count` steps of each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(runs), 1, figsize=(10, 1.7 * len(runs)), sharex=True, layout="constrained")
    for axis, (name, lines) in zip(axes, runs.items(), strict=True):
        lines = lines[first : first + count]
        start = lines[0]["clock/weights_given"] - lines[0]["time/sync"]
        for i, line in enumerate(lines):
            collected = line["clock/collected"] - start
            began, ended = line["clock/generation_began"] - start, line["clock/generation_ended"] - start
            given = line["clock/weights_given"] - start
            label = dict(ha="center", va="center", fontsize=7, clip_on=True)
            axis.barh(1, ended - began, left=began, color=f"C{i % 5}", alpha=0.6, edgecolor="black", linewidth=0.5)
            axis.text((began + ended) / 2, 1, f"batch {line['step']}", **label)
            axis.barh(0, busy(line), left=collected, color=f"C{i % 5}", edgecolor="black", linewidth=0.5)
            axis.text(collected + busy(line) / 2, 0, f"step {line['step']}", **label)
            for row in (0, 1):
                axis.barh(row, line["time/sync"], left=given - line["time/sync"], color="black")
        axis.set_yticks([0, 1], ["trains", "generates"])
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_xlim(left=0)
    axes[-1].set_xlabel("seconds (black: weights go over)")
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main() -> None:
    if not (ROOT / "runs/demo/sft/hf").is_dir():
        sys.exit("train the model it starts from: torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml")
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}
    scores: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for seed in range(SEEDS):
        for name in SETTINGS:
            lines = measured(name, seed)
            steps = [line for line in lines if line["step"] > 0]
            seconds[name].append(sum(line["time/step"] for line in steps))
            scores[name].append(steps[-1]["eval/pass_at_1"])
            parts = f"step {median(line['time/step'] for line in steps):.3f} s"
            if "time/generate" in steps[0]:
                generate = median(line["time/generate"] for line in steps)
                parts += f" (generating {generate:.3f}, training {median(map(busy, steps)):.3f})"
            stale = fmean(line.get("sampling/staleness/mean", 0) for line in steps)
            print(f"{name:17s} seed {seed}: {seconds[name][-1]:6.1f} s, {parts}, staleness {stale:.2f}, "
                  f"greedy {lines[0]['eval/pass_at_1']:.3f} -> {scores[name][-1]:.3f}", flush=True)  # fmt: skip
    for name in SETTINGS:
        ratios = [in_turns / own for in_turns, own in zip(seconds["S = 0"], seconds[name], strict=True)]
        print(f"{name:17s}: {min(ratios):.2f} to {max(ratios):.2f} times as fast as S = 0; greedy exact match "
              + " ".join(f"{score:.3f}" for score in scores[name]))  # fmt: skip
    pictured = {"S = 0": "in turns (--max_staleness 0)", "S = 1": "one step off-policy (--max_staleness 1)"}
    runs = {title: [x for x in measured(name, 0) if x["step"] > 0] for name, title in pictured.items()}
    timeline(runs, ROOT / "docs" / "asynchronous.png", first=40, count=5)


if __name__ == "__main__":
    main()
