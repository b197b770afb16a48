"""Run the pipeline of docs/async_rlhf.md on the built-in task: SFT, a reward model, online DPO with
samples of various ages, and eval.py over the checkpoints of each run.

    python bench/async_rlhf.py

The built-in task has what the paper needs a large model for: the true reward, exact_match, stands
for the gold reward model. The policy is trained on a reward model (configs/demo_rm.yaml), the true
reward has weight 0. Each run has one training rank and one rollout rank. S is `--max_staleness`;
S = 0 is the synchronous run. eval.py samples greedy completions of the 500 held-out prompts from
each checkpoint. It measures the true reward, the win rate against the demonstrations of the data,
the reward model's score, and the perplexity under the SFT model. Runs stay in runs/async_rlhf; a
finished run is not repeated. The program prints the table of the page and draws
docs/async_rlhf.png."""

import json
import math
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from seeds import launch

from common.data.tasks import arithmetic_rows
from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs/async_rlhf"
STEPS, SEEDS, STALENESS = 60, 2, (0, 1, 4, 16)
REWARDS = ("--reward", "exact_match", f"model:{RUNS / 'rm/hf'}", "--reward_weights")


def start_models() -> None:
    """Train the SFT model, and the reward model from it."""
    launch(RUNS / "sft", "sft.py", "--config", "configs/demo_sft.yaml")
    reward_model = ("--config", "configs/demo_rm.yaml", "--model", str(RUNS / "sft/hf"))
    launch(RUNS / "rm", "rm.py", *reward_model, "--max_steps", "120")


def train(staleness: int, seed: int) -> Path:
    """Run online_dpo.py and return its folder."""
    folder = RUNS / f"staleness_{staleness}_seed_{seed}"
    every = str(STEPS // 6)
    launch(
        folder, "online_dpo.py", "--config", "configs/demo_online_dpo.yaml",
        "--model", str(RUNS / "sft/hf"), *REWARDS, "0", "1", "--max_steps", str(STEPS),
        "--eval_every", "0", "--save_every", every, "--keep_last", "10", "--trace_every", "0",
        "--rollout_ranks", "1", "--max_staleness", str(staleness), "--seed", str(seed),
    )  # fmt: skip
    return folder


def evaluate(model: Path, results: Path) -> None:
    """Run eval.py on a model, or on all checkpoints in a folder."""
    references = RUNS / "references.jsonl"
    rows = arithmetic_rows("test")
    references.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(
        results, "eval.py", "--model", str(model), "--dataset", "arithmetic",
        "--prompt_format", "plain", *REWARDS, "1", "0", "--samples_per_prompt", "0",
        "--max_new_tokens", "5", "--against", str(references),
        "--perplexity_model", str(RUNS / "sft/hf"),
    )  # fmt: skip


def start_line() -> dict:
    """Return the results of the SFT model, in the form of a checkpoint's."""
    evaluate(RUNS / "sft/hf", RUNS / "sft_eval")
    results = json.loads((RUNS / "sft_eval/results.json").read_text())
    overall = results["overall"]
    values = dict(reward=overall["reward"], win_rate=results["win_rate"])
    values |= {
        "perplexity": results["perplexity"],
        "rewards/model/mean": overall["rewards"]["model"],
    }
    return dict(step=0) | {name: value["mean"] for name, value in values.items()}


def shown(line: dict) -> str:
    """Return the results of a model for the console."""
    return (
        f"true reward {line['reward']:.3f}, win rate {line['win_rate']:.3f}, "
        f"reward model {line['rewards/model/mean']:.2f}, "
        f"log-perplexity {math.log(line['perplexity']):.3f}"
    )


def picture(runs: dict[int, list[list[dict]]], file: Path) -> None:
    """Draw the true reward over the steps, then it and the reward model's score over the paper's
    measure of the KL."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kl = "log-perplexity under the SFT model, nats"
    true = "true reward of greedy answers"
    panels = [("step", true, "reward"), (kl, true, "reward")]
    panels.append((kl, "reward model's score of greedy answers", "rewards/model/mean"))
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), layout="constrained")
    for axis, (label, title, name) in zip(axes, panels, strict=True):
        for color, (staleness, seeds) in enumerate(runs.items()):
            for seed, lines in enumerate(seeds):
                x = [line["step"] for line in lines]
                if label == kl:
                    x = [math.log(line["perplexity"]) for line in lines]
                y = [line[name] for line in lines]
                legend = f"S = {staleness}" if seed == 0 else None
                axis.plot(x, y, "o-", color=f"C{color}", label=legend, markersize=3, linewidth=1)
        axis.set_xlabel(label, fontsize=9)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main() -> None:
    start_models()
    start = start_line()
    print(f"SFT model: {shown(start)}", flush=True)
    runs: dict[int, list[list[dict]]] = {}
    for seed in range(SEEDS):
        for staleness in STALENESS:
            folder = train(staleness, seed)
            results = folder.with_name(f"{folder.name}_eval")
            evaluate(folder / "checkpoints", results)
            lines = read_metrics(results / "metrics.jsonl")
            runs.setdefault(staleness, []).append([start, *lines])
            steps = read_metrics(folder / "metrics.jsonl")
            age = fmean(line.get("sampling/staleness/mean", 0) for line in steps)
            print(f"S = {staleness}, seed {seed}: mean age {age:.1f}, {shown(lines[-1])}")
            print("    true reward " + ", ".join(f"{x['reward']:.3f}" for x in lines), flush=True)
    picture(runs, ROOT / "docs/async_rlhf.png")


if __name__ == "__main__":
    main()
