"""The picture, the table and the answers of docs/results.md, from all seeds of run.sh.

    python bench/results/report.py runs/words runs/bills --picture docs/results.png

The answers are those to the first questions of test.jsonl."""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.metrics.curves import read_metrics

ANSWERS = 2
HEAD, TAIL = 28, 24  # characters shown of a long answer


def solved(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())["overall"]["solved"]


def seeds_of(task: Path) -> list[int]:
    """Return the seeds whose last evaluation is there."""
    return sorted(int(x.parent.name[-1]) for x in task.glob("after_grpo_*/results.json"))


def cell(folder: Path) -> str:
    """Return percent solved, with the 95% interval."""
    value = solved(folder)
    return f"{value['mean']:.1%} ({100 * value['low']:.1f} to {100 * value['high']:.1f})"


def sampled(run: Path) -> str:
    """Return the mean reward of the samples in the first and in the last five steps."""
    rewards = [x["reward"] for x in read_metrics(run / "metrics.jsonl") if "reward" in x]
    return f"{fmean(rewards[:5]):.2f} to {fmean(rewards[-5:]):.2f}"


def answers(folder: Path) -> list[str]:
    """Return the first answers of a model, in bold if they are right."""
    found = []
    for line in (folder / "completions.jsonl").read_text().splitlines()[:ANSWERS]:
        completion = json.loads(line)["completions"][0]
        short = text = " ".join(completion["text"].split())
        if len(text) > HEAD + TAIL:
            short = f"{text[:HEAD].rstrip()} ... {text[-TAIL:].lstrip()}"
        found.append(f"**{short}**" if completion["score"] >= 1 else short)
    return found


def draw(tasks: list[Path], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(tasks), figsize=(9, 3), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes.flat, tasks, strict=True):
        for seed in seeds_of(task):
            lines = [x for x in read_metrics(task / f"grpo_{seed}/metrics.jsonl") if "reward" in x]
            steps = [line["step"] for line in lines]
            rewards = [line["reward"] for line in lines]
            smooth = [fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
            axis.plot(steps, rewards, color=f"C{seed}", alpha=0.2)
            axis.plot(steps, smooth, color=f"C{seed}", label=f"seed {seed}, mean of 5 steps")
            for step, name in ((0, "after_sft"), (steps[-1] + 1, "after_grpo")):
                value = solved(task / f"{name}_{seed}")
                bar = [[value["mean"] - value["low"]], [value["high"] - value["mean"]]]
                place = step + seed - 1
                axis.errorbar(place, value["mean"], bar, fmt="o", color=f"C{seed}", capsize=2)
        axis.axhline(solved(task / "before")["mean"], color="grey", ls=":", label="chat model")
        axis.set(title=task.name, xlabel="step of grpo.py", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("reward; dots: solved, held out")
    axes.flat[0].legend(fontsize=7, loc="lower right")
    figure.savefig(picture, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    for task in options.tasks:
        cells = [cell(task / "before")]
        for name in ("after_sft", "after_grpo"):
            cells.append(", ".join(cell(task / f"{name}_{seed}") for seed in seeds_of(task)))
        cells.append(", ".join(sampled(task / f"grpo_{seed}") for seed in seeds_of(task)))
        print("|", " | ".join([task.name, *cells]), "|")
    for task in options.tasks:
        rows = [json.loads(line) for line in (task / "test.jsonl").read_text().splitlines()]
        texts = answers(task / "before"), answers(task / "after_grpo_0")
        for row, before, after in zip(rows, *texts, strict=False):
            print("|", " | ".join([row["prompt"], before, after]), "|")
    draw(options.tasks, options.picture)


if __name__ == "__main__":
    main()
