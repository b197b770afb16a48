"""Train the demo's SFT model in three ways: distill.py with a teacher, sft.py on the teacher's
greedy answers, grpo.py alone.

    torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml     # the student
    torchrun --nproc_per_node 2 grpo.py --config configs/demo_grpo.yaml   # the teacher
    python bench/distill.py

Two ranks, three seeds, one run after the other. The program prints the greedy exact match on 500
held-out questions over the steps, and the seconds of the steps without evaluations. It draws
docs/distill_seeds.png over these seconds. The teacher's answers are sampled first, and this time is
not counted. Runs stay in runs/distill_seeds; a finished run is not repeated."""

import json
import sys
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from seeds import launch

from common.data.tasks import TASKS
from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs/distill_seeds"
STUDENT, TEACHER, SEEDS = "runs/demo/sft/hf", "runs/demo/grpo/hf", 3
SFT = (
    "--model", STUDENT, "--max_steps", "100", "--batch_size", "256", "--lr", "4e-4",
    "--lr_schedule", "linear", "--eval_every", "0", "--save_every", "25", "--keep_last", "4",
)  # fmt: skip
GREEDY = (
    "--dataset",
    "arithmetic",
    "--reward",
    "exact_match",
    "--max_new_tokens",
    "5",
    "--samples_per_prompt",
    "0",
)


def answers() -> Path:
    """Sample the teacher's greedy answers to all training questions, for sft.py."""
    folder, file = FOLDER / "answers", FOLDER / "answers.jsonl"
    launch(folder, "eval.py", "--model", TEACHER, "--dataset_split", "train", *GREEDY)
    lines = [json.loads(line) for line in (folder / "completions.jsonl").open()]
    rows = [
        dict(prompt=row["prompt"], completion=line["completions"][0]["text"])
        for row, line in zip(TASKS["arithmetic"]("train"), lines, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def curve(name: str, seed: int) -> list[tuple[int, float, float]]:
    """Return (steps, seconds of the steps, greedy exact match) of one run."""
    folder = FOLDER / f"{name}_{seed}"
    if name == "sft":
        launch(
            folder, "sft.py", *SFT, "--dataset", str(FOLDER / "answers.jsonl"), "--seed", str(seed)
        )
        measured = folder.with_name(f"sft_{seed}_eval")
        launch(
            measured,
            "eval.py",
            "--model",
            str(folder / "checkpoints"),
            "--max_prompts",
            "500",
            *GREEDY,
        )
        scores = {line["step"]: line["solved"] for line in read_metrics(measured / "metrics.jsonl")}
    else:
        steps = () if name == "distill" else ("--max_steps", "60", "--eval_every", "15")
        launch(
            folder,
            f"{name}.py",
            "--config",
            f"configs/demo_{name}.yaml",
            *steps,
            "--seed",
            str(seed),
        )
        scores = {
            x["step"]: x["eval/solved"]
            for x in read_metrics(folder / "metrics.jsonl")
            if "eval/solved" in x
        }
    steps = [
        line["time/step"] for line in read_metrics(folder / "metrics.jsonl") if line["step"] > 0
    ]
    seconds = [0.0, *accumulate(steps)]
    return [(step, seconds[step], score) for step, score in sorted(scores.items())]


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not all((ROOT / folder).is_dir() for folder in (STUDENT, TEACHER)):
        sys.exit(__doc__)
    answers()
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    names = dict(
        distill="distill.py, reverse_kl on its own samples",
        sft="sft.py on the teacher's greedy answers",
        grpo="grpo.py",
    )
    for colour, (name, label) in enumerate(names.items()):
        for seed in range(SEEDS):
            points = curve(name, seed)
            print(
                f"{name} seed {seed}: "
                + ", ".join(f"{n}: {score:.3f} ({s:.0f} s)" for n, s, score in points)
            )
            seconds, scores = [s for _, s, _ in points], [score for *_, score in points]
            axis.plot(
                seconds,
                scores,
                "o-",
                color=f"C{colour}",
                markersize=3,
                label=None if seed else label,
            )
    axis.set_xlabel("seconds of steps")
    axis.set_ylabel("greedy exact match")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
    figure.savefig(ROOT / "docs/distill_seeds.png", dpi=110)


if __name__ == "__main__":
    main()
