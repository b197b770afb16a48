"""Compare streamed rollouts to steps that wait for their whole batch.

    git worktree add /tmp/before efa4756      # the last commit with batches in lockstep
    python bench/stream.py --before /tmp/before
    python bench/stream.py --workload a --seeds 1 --steps 6    # a small trial, of the stream alone
    python bench/stream.py --workload lengths    # does --oversample prefer some lengths?

grpo.py runs on two ranks with five workloads:

    a  realistic lengths: an answer and a geometric number of dots, 40 on average, cut at 256 tokens
    b  an environment that takes 0 to 200 ms for an answer, by the row, and two turns
    c  the completions of a, and a reward that takes 50 ms each (4 processes a rank)
    d  the same with 2 processes: rewards take longer than sampling
    e  the completions of a, and a reward model of 7M parameters with random weights and weight 0

The models come from sft.py, first on `arithmetic`, then on rows made here from its sums. The number
of dots is random, so the policy has learned its distribution. The two sides of a seed run after
each other, so that the machine is in the same state. Their flags are the same, except those that
only the stream has. Batches in lockstep play the episodes of a rank one after the other, in the
rank's process.

Seconds are `time/step`: the mean over a run's steps after the first two, and the median over seeds.
They exclude evaluations and start-up. Scores are for the greedy completions of 200 held-out prompts
after the last step (64 in b). Runs stay in runs/stream; a finished run is not repeated."""

import argparse
import json
import math
import random
import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from seeds import launch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from common.data.tasks import arithmetic_rows
from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs/stream"
JUDGE = RUNS / "judge"
USER = ROOT / "bench/stream_user.py"
MEAN_DOTS, MOST_DOTS = 40, 250
SFT_STEPS = dict(dots=150, sums=400)
SKIPPED = 2  # steps without timing

ONE_AND_ONE = ("--rollout_ranks", 1, "--max_staleness", 1)
# Flags of both sides, and of the stream alone.
SETTINGS = {
    "1 + 1, S = 1": (ONE_AND_ONE, ()),
    "1 + 1, S = 2": (("--rollout_ranks", 1, "--max_staleness", 2), ()),
    "2, oversample 1.25": ((), ("--oversample", 1.25)),
    "2": ((), ()),
}
DOTS = (
    "--model", RUNS / "dots/hf", "--dataset", RUNS / "dots_train.jsonl",
    "--eval_dataset", RUNS / "dots_test.jsonl", "--max_new_tokens", 256, "--eval_size", 200,
)  # fmt: skip
SUMS = (
    "--model", RUNS / "sums/hf", "--dataset", RUNS / "sums_train.jsonl",
    "--eval_dataset", RUNS / "sums_test.jsonl", "--environment", f"{USER}:SlowSums",
    "--reward", "environment", "--max_turns", 2, "--max_new_tokens", 60, "--eval_size", 64,
)  # fmt: skip
FEW, MANY = (
    ("--prompts_per_step", prompts, "--samples_per_prompt", samples)
    for prompts, samples in ((8, 2), (16, 4))
)
# Flags, steps, settings.
WORKLOADS = {
    "a": (
        (*DOTS, *FEW, "--reward", f"{USER}:before_dots"), 16,
        ("1 + 1, S = 1", "1 + 1, S = 2", "2, oversample 1.25"),
    ),
    "b": ((*SUMS, *FEW), 8, ("1 + 1, S = 1", "2")),
    "c": (
        (*DOTS, *MANY, "--reward", f"{USER}:slow", "--reward_workers", 4), 12,
        ("1 + 1, S = 1", "2"),
    ),
    "d": (
        (*DOTS, *MANY, "--reward", f"{USER}:slow", "--reward_workers", 2), 12,
        ("1 + 1, S = 1", "2"),
    ),
    "e": (
        (
            *DOTS, *FEW, "--reward", f"{USER}:before_dots", f"model:{JUDGE}",
            "--reward_weights", 1, 0,
        ),
        16, ("1 + 1, S = 1",),
    ),
}  # fmt: skip
COMMON = ("--lr", 3e-5, "--log_every", 1000, "--save_every", 1000)


# ---- the models ----


def dots_row(row: dict, rng: random.Random) -> dict:
    count = min(MOST_DOTS, int(math.log(1 - rng.random()) / math.log(1 - 1 / (MEAN_DOTS + 1))))
    return dict(
        prompt=row["prompt"], completion=row["completion"] + count * ".", answer=row["answer"]
    )


def sums_row(rows: list[dict]) -> dict:
    turns = [
        dict(role=role, content=row[column])
        for row in rows
        for role, column in (("user", "prompt"), ("assistant", "completion"))
    ]
    asked, answers = [row["prompt"] for row in rows], [row["answer"] for row in rows]
    return dict(prompt=asked[0], questions=asked, answers=answers, messages=turns)


def make_models(needed: set[str]) -> None:
    """Train the models `dots` and `sums`, and write their rows."""
    RUNS.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for split in ("train", "test"):
        rows = arithmetic_rows(split)
        pairs = zip(rows[::2], rows[1::2], strict=True)
        made = dict(
            dots=[dots_row(row, rng) for row in rows], sums=[sums_row(list(pair)) for pair in pairs]
        )
        for name, lines in made.items():
            file = RUNS / f"{name}_{split}.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(
        f"sft.py: {launch(RUNS / 'sft', 'sft.py', '--config', 'configs/demo_sft.yaml'):.0f} s",
        flush=True,
    )
    for name in needed:
        flags = (
            "--model", RUNS / "sft/hf", "--dataset", RUNS / f"{name}_train.jsonl",
            "--max_steps", SFT_STEPS[name], "--eval_dataset", RUNS / f"{name}_test.jsonl",
            "--batch_size", 64, "--lr", 1e-3, "--lr_schedule", "cosine", "--warmup_steps", 20,
            "--eval_every", 1000, "--save_every", 1000,
        )  # fmt: skip
        print(
            f"sft.py, {name}: {launch(RUNS / name, 'sft.py', *map(str, flags)):.0f} s", flush=True
        )


def make_judge() -> None:
    """Write a reward model with the policy's vocabulary and seven times its size."""
    config = AutoConfig.from_pretrained(RUNS / "dots/hf", num_labels=1)
    config.hidden_size, config.intermediate_size = (
        2 * config.hidden_size,
        2 * config.intermediate_size,
    )
    config.num_hidden_layers, config.layer_types = (
        2 * config.num_hidden_layers,
        2 * config.layer_types,
    )
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(JUDGE)
    AutoTokenizer.from_pretrained(RUNS / "dots/hf").save_pretrained(JUDGE)


# ---- runs ----


def run(
    folder: Path, steps: int, seed: int, flags: tuple, root: Path = ROOT, script: str = "grpo.py"
) -> list[dict]:
    """Run the code in `root` once and return the metrics."""
    more = ("--max_steps", steps, "--seed", seed)
    launch(folder, script, *map(str, (*COMMON, *flags, *more)), root=root)
    return read_metrics(folder / "metrics.jsonl")


def seconds(lines: list[dict]) -> float:
    return fmean(line["time/step"] for line in lines if line["step"] > SKIPPED)


def idle(lines: list[dict]) -> str:
    """Return the idle fractions of a run with rollout ranks."""
    lines = [line for line in lines if line["step"] > SKIPPED]
    if "time/generate" in lines[0]:  # batches in lockstep
        whole = sum(line["time/step"] for line in lines)
        training = sum(line["time/rollout"] for line in lines) / whole
        rollout = 1 - sum(line["time/generate"] for line in lines) / whole
    else:  # a step without messages has no metrics of the rollout ranks
        training = fmean(line["idle/training_ranks"] for line in lines)
        rollout = fmean(
            line["idle/rollout_ranks"] for line in lines if "idle/rollout_ranks" in line
        )
    return f"training rank {training:.0%}, rollout rank {rollout:.0%}"


def compare(workload: str, seeds: int, steps: int | None, before: Path | None) -> list[str]:
    """Return the rows of the table."""
    flags, usual, settings = WORKLOADS[workload]
    steps, rows = steps or usual, []
    flags = (*flags, "--eval_every", steps)
    for setting in settings:
        both, ours = SETTINGS[setting]
        sides = ({"before": ((*flags, *both), before)} if before else {}) | {
            "after": ((*flags, *both, *ours), ROOT)
        }
        lines: dict[str, list[list[dict]]] = {side: [] for side in sides}
        for seed in range(seeds):
            for side, (its_flags, root) in sides.items():
                short = setting.replace(" ", "").replace(",", "_")
                name = f"{workload}_{short}_{steps}_seed{seed}_{side}"
                lines[side].append(run(RUNS / name, steps, seed, its_flags, root))
                took, first, last = (
                    seconds(lines[side][-1]),
                    *(lines[side][-1][i]["eval/solved"] for i in (0, -1)),
                )
                print(f"{name}: {took:.3f} s/step, greedy {first:.3f} -> {last:.3f}", flush=True)
                if "rollout_ranks" in " ".join(map(str, its_flags)):
                    print(f"  idle: {idle(lines[side][-1])}", flush=True)
        took = {side: median(map(seconds, of_side)) for side, of_side in lines.items()}
        scores = {
            side: " ".join(f"{x[-1]['eval/solved']:.3f}" for x in of_side)
            for side, of_side in lines.items()
        }
        each = [
            seconds(old) / seconds(new)
            for old, new in zip(lines.get("before", ()), lines["after"], strict=False)
        ]
        ratio = (
            f"{took['before'] / took['after']:.2f}x ({min(each):.2f} to {max(each):.2f})"
            if before
            else "-"
        )
        cells = (f"{took['before']:.3f}" if before else "-", f"{took['after']:.3f}", ratio)
        rows.append(
            f"| {workload} | {setting} | {' | '.join(cells)} | {scores.get('before', '-')} | "
            f"{scores['after']} |"
        )
    return rows


def lengths(seeds: int, steps: int | None) -> None:
    """Measure the mean length of trained completions of a policy that does not change."""
    steps = steps or 30
    flags = (*DOTS, *MANY, "--reward", f"{USER}:before_dots", "--lr", 1e-12, "--eval_every", 0)
    over = (*flags, *SETTINGS["2, oversample 1.25"][1])
    variants = {
        "all drawn prompts": (flags, "grpo.py"),
        "--oversample 1.25": (over, "grpo.py"),
        "--oversample 1.25, dropping the others": (over, "bench/stream_discard.py"),
    }
    for number, (name, (its_flags, script)) in enumerate(variants.items()):
        means = []
        for seed in range(seeds):
            lines = run(
                RUNS / f"lengths_{number}_{steps}_seed{seed}", steps, seed, its_flags, script=script
            )
            means.append(
                fmean(line["completions/mean_length"] for line in lines if line["step"] > 0)
            )
        print(f"{name}: mean length {' '.join(f'{mean:.2f}' for mean in means)} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, help="checkout of the last commit without the stream"
    )
    parser.add_argument(
        "--workload", nargs="+", choices=[*WORKLOADS, "lengths"], default=list(WORKLOADS)
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, help="default: 16 (a, e), 8 (b), 12 (c, d), 30 (lengths)"
    )
    options = parser.parse_args()
    if options.before and not (options.before / "grpo.py").is_file():
        sys.exit(f"--before {options.before}: no checkout")
    make_models({"sums" if workload == "b" else "dots" for workload in options.workload})
    if "e" in options.workload:
        make_judge()
    table = []
    for workload in options.workload:
        if workload == "lengths":
            lengths(options.seeds, options.steps)
        else:
            table += compare(
                workload, options.seeds, options.steps, options.before and options.before.resolve()
            )
    if table:
        print("| | ranks | s/step before | after | ratio (by seed) | greedy score before | after |")
        print("|---|---|---|---|---|---|---|", *table, sep="\n")


if __name__ == "__main__":
    main()
