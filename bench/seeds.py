"""Run online RL on the built-in task with several seeds: the numbers and curves in the pages of the
online scripts.

    torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml    # the model they start from
    python bench/seeds.py presets       # dapo.py; every --preset of grpo and reinforce
    python bench/seeds.py rloo          # configs/demo_rloo.yaml
    python bench/seeds.py ppo           # configs/demo_ppo.yaml
    python bench/seeds.py lora          # configs/demo_grpo.yaml with adapters
    python bench/seeds.py calculator    # configs/calculator_sft.yaml, then calculator_grpo.yaml
    python bench/seeds.py squares       # configs/squares_sft.yaml, then squares_grpo.yaml
    python bench/seeds.py tool_python   # configs/tool_python_sft.yaml, then tool_python_grpo.yaml;
                                        # the seeds have one start
    torchrun --nproc_per_node 2 rm.py --config configs/demo_rm.yaml      # a reward model
    python bench/seeds.py reward_model    # online_dpo.py, bok.py, ppo.py; two with little or no KL

Two ranks, one run after the other. For each run the program prints the training reward in the first
and in the last 5 steps, the greedy exact match at each evaluation, and the wall-clock seconds from
launch to exit. It draws the reward of all seeds, one panel per variant. For reward_model it draws
the reward model's score of the greedy answers and the true score. Runs stay in runs/seeds; a
finished run is not repeated."""

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import grpo
import reinforce
from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
PRESET_FLAGS = (
    "--config", "configs/demo_grpo.yaml", "--max_steps", "60", "--prompts_per_step", "16",
    "--max_new_tokens", "8", "--eval_every", "0", "--save_every", "60",
)  # fmt: skip


def launch(folder: Path, script: str, *flags: str, root: Path = ROOT) -> float:
    """Run a script of the code in `root`, unless it has run. Return its seconds, which its folder
    keeps."""
    kept = folder / "seconds"
    if not kept.is_file():
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node=2",
            "--standalone",
            script,
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        start = time.time()
        subprocess.run(
            [*torchrun, *flags, "--output_dir", str(folder), "--resume", "never"],
            cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        kept.write_text(f"{time.time() - start:.1f}")
    return float(kept.read_text())


def imitate(task: str, seed: int, *flags: str) -> tuple[Path, float]:
    """Run configs/<task>_sft.yaml. Return its folder and its seconds."""
    folder = ROOT / "runs/seeds" / f"{task}_sft.py_{seed}"
    config = f"configs/{task}_sft.yaml"
    return folder, launch(folder, "sft.py", "--config", config, "--seed", str(seed), *flags)


def draw_both_scores(runs: dict[str, list[Path]], picture: Path) -> None:
    """Draw the reward model's score of the greedy answers, and the fraction that is right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(runs), figsize=(3.1 * len(runs), 3), squeeze=False, layout="constrained"
    )
    for axis, (name, folders) in zip(axes.flat, runs.items(), strict=True):
        other = axis.twinx()
        for seed, folder in enumerate(folders):
            lines = [
                line for line in read_metrics(folder / "metrics.jsonl") if "eval/solved" in line
            ]
            steps = [line["step"] for line in lines]
            axis.plot(
                steps,
                [line["eval/solved"] for line in lines],
                "o-",
                color="C0",
                label="exact match",
            )
            scores = [line["eval/rewards/model/mean"] for line in lines]
            other.plot(steps, scores, "s--", color="C1", label="reward model")
            if seed == 0:
                axis.legend(fontsize=7, loc="upper left")
                other.legend(fontsize=7, loc="lower right")
        axis.set_ylim(0, 1)
        other.set_ylim(-5, 15)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


def draw(runs: dict[str, list[Path]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(runs))
    rows = math.ceil(len(runs) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(7, 3.2 * columns), (2.4 if len(runs) > 1 else 3.2) * rows),
        squeeze=False, sharey=True, layout="constrained",
    )  # fmt: skip
    for axis, (name, folders) in zip(axes.flat, runs.items(), strict=False):
        for seed, folder in enumerate(folders):
            lines = read_metrics(folder / "metrics.jsonl")
            rewards = [(line["step"], line["reward"]) for line in lines if "reward" in line]
            scores = [
                (line["step"], line["eval/solved"]) for line in lines if "eval/solved" in line
            ]
            axis.plot(
                *zip(*rewards, strict=True), color=f"C{seed}", label=f"seed {seed}", linewidth=1
            )
            if scores:
                axis.plot(
                    *zip(*scores, strict=True),
                    "o--",
                    color=f"C{seed}",
                    label=f"seed {seed}, greedy, held out",
                )
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    axes.flat[0].set_ylabel("mean reward of the samples", fontsize=9)
    axes.flat[0].legend(fontsize=7)
    for axis in axes.flat[len(runs) :]:
        axis.remove()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        choices=[
            "presets", "rloo", "ppo", "lora", "reward_model", "calculator", "squares",
            "tool_python",
        ],
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="default: docs/<what>_seeds.png")
    options = parser.parse_args()
    variants = {
        "presets": {
            name: (
                f"{script.__name__}.py", *PRESET_FLAGS,
                "--minibatches", str(flags.get("minibatches", 2)), "--preset", name,
            )
            for script in (grpo, reinforce)
            for name, flags in script.Args.PRESETS.items()
        } | {"dapo": ("dapo.py", *PRESET_FLAGS, "--minibatches", "2")},
        "rloo": {"rloo.py": ("rloo.py", "--config", "configs/demo_rloo.yaml")},
        "ppo": {"ppo.py": ("ppo.py", "--config", "configs/demo_ppo.yaml")},
        "lora": {
            "rank 16": (
                "grpo.py", "--config", "configs/demo_grpo.yaml", "--lora_rank", "16",
                "--lr", "0.001",
            )
        },
        "calculator": {"grpo.py": ("grpo.py", "--config", "configs/calculator_grpo.yaml")},
        "squares": {"grpo.py": ("grpo.py", "--config", "configs/squares_grpo.yaml")},
        "tool_python": {"grpo.py": ("grpo.py", "--config", "configs/tool_python_grpo.yaml")},
        "reward_model": {
            "online_dpo.py": ("online_dpo.py", "--config", "configs/demo_online_dpo.yaml"),
            "bok.py": ("bok.py", "--config", "configs/demo_bok.yaml"),
            "ppo.py": ("ppo.py", "--config", "configs/demo_ppo_rm.yaml"),
            "online_dpo.py, beta 0.1": (
                "online_dpo.py", "--config", "configs/demo_online_dpo.yaml", "--beta", "0.1",
                "--lr", "2e-4",
            ),
            "bok.py, beta 0": ("bok.py", "--config", "configs/demo_bok.yaml", "--beta", "0"),
        },
    }[options.what]  # fmt: skip
    against_a_model = options.what == "reward_model"
    runs: dict[str, list[Path]] = {}
    print(
        "| variant | seed | reward, first 5 steps | last 5 steps | greedy exact match | seconds |"
    )
    print("|---|---|---|---|---|---|")
    for name, command in variants.items():
        for seed in range(options.seeds):
            folder = ROOT / "runs/seeds" / f"{options.what}_{name.replace(' ', '_')}_{seed}"
            seconds = 0.0
            if options.what in ("calculator", "squares"):
                start, seconds = imitate(options.what, seed)
                command = (*command, "--model", str(start / "hf"))
            if options.what == "tool_python":  # one start for all seeds
                copying, _ = imitate("calculator", 0)
                start, seconds = imitate("tool_python", 0, "--model", str(copying / "hf"))
                command = (*command, "--model", str(start / "hf"))
            seconds += launch(folder, *command, "--seed", str(seed))
            lines = read_metrics(folder / "metrics.jsonl")
            rewards = [line["reward"] for line in lines if "reward" in line]
            scores = ", ".join(
                f"{line['eval/solved']:.3f}" for line in lines if "eval/solved" in line
            )
            if against_a_model:
                told = (f"{x['eval/rewards/model/mean']:.2f}" for x in lines if "eval/solved" in x)
                scores += f" (reward model: {', '.join(told)})"
            first, last = fmean(rewards[:5]), fmean(rewards[-5:])
            print(
                f"| {name} | {seed} | {first:.3f} | {last:.3f} | {scores} | {seconds:.0f} |",
                flush=True,
            )
            runs.setdefault(name, []).append(folder)
    (draw_both_scores if against_a_model else draw)(
        runs, options.picture or ROOT / "docs" / f"{options.what}_seeds.png"
    )


if __name__ == "__main__":
    main()
