"""Train a reward model, sample with eval.py, and measure best-of-n for n = 1, 2, 4, ... from the
one file of samples.

    python course/lessons/best_of_n.py --max_steps 40 --dataset chains \\
        --output_dir runs/course/03/chains

It prints and runs the two commands, and writes metrics.jsonl, where the step is n. For the chosen
completion, `eval/proxy` is the reward model's score, `eval/truth` the true reward, `eval/length`
the number of tokens. `eval/kl` = log n - (n - 1) / n is the KL divergence of the choice from a
sample, in nats. `eval/score_per_token` is the slope of the score over the length among completions
of one prompt with the same true reward: the length bias of the model."""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

TASKS = {  # data, model of the demonstrations, true reward, tokens of a completion
    "arithmetic": ("arithmetic", "tiny-sft", "exact_match", 5),
    "splits": ("runs/course/data/splits", "runs/course/base_splits/hf",
               "course/lessons/counts.py:split", 8),
    "chains": ("runs/course/data/chains", "runs/course/base_chains/hf", "gsm8k_flexible", 44),
}  # fmt: skip
RM = (
    "rm.py --model {model} --dataset {data} --prompt_format plain --max_steps {max_steps} "
    "--batch_size 64 --lr 1e-3"
    " --warmup_steps 10 --eval_every 0"
)
EVAL = (
    "eval.py --model {model} --dataset {data} --prompt_format plain --max_new_tokens {tokens} "
    "--reward {reward}"
    " model:{output_dir}/rm/hf --samples_per_prompt {samples} --eval_size "
    "{prompts}"
)


def best_of(n: int, score_S: np.ndarray, value_S: np.ndarray) -> float:
    """Return the mean value of the completion with the highest score among n, over all choices of n
    of the S samples: the i-th of S in the order of the scores is the best of C(i - 1, n - 1) of
    C(S, n) choices."""
    order, total = np.argsort(score_S, kind="stable"), math.comb(len(score_S), n)
    return sum(math.comb(i, n - 1) / total * value_S[j] for i, j in enumerate(order))


def score_per_token(groups: list[dict[str, np.ndarray]]) -> float:
    """Return the least-squares slope of the proxy over the length, within completions of one prompt
    and truth."""
    over = under = 0.0
    for group in groups:
        for truth in (0, 1):
            proxy, length = (group[name][group["truth"] == truth] for name in ("proxy", "length"))
            if len(proxy):
                over += ((proxy - proxy.mean()) * (length - length.mean())).sum()
                under += np.square(length - length.mean()).sum()
    return over / under if under else math.nan


def run(command: str) -> None:
    print(f"python {command}", flush=True)
    subprocess.run(
        [sys.executable, *shlex.split(command)],
        check=True,
        env={"OMP_NUM_THREADS": "1"} | os.environ,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=TASKS, default="arithmetic")
    parser.add_argument(
        "--max_steps", type=int, default=100, help="training steps of the reward model"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="runs/course/03/best_of_n")
    args = parser.parse_args()
    data, model, reward, tokens = TASKS[args.dataset]
    fields = vars(args) | dict(data=data, model=model, reward=reward, tokens=tokens)
    out = Path(args.output_dir)
    run(f"{RM.format(**fields)} --seed {args.seed} --output_dir {out}/rm")
    run(f"{EVAL.format(**fields)} --seed {args.seed} --output_dir {out}/eval")

    groups = []
    for line in (out / "eval" / "completions.jsonl").read_text(encoding="utf-8").splitlines():
        found = [c for c in json.loads(line)["completions"] if not c["greedy"]]
        values = [(c["rewards"]["model"], c["score"], len(c["ids"])) for c in found]
        groups.append(
            dict(zip(("proxy", "truth", "length"), np.array(values, dtype=float).T, strict=True))
        )
    (out / "args.yaml").write_text(yaml.safe_dump(vars(args)))
    lines, slope = [], score_per_token(groups)
    for n in (1 << i for i in range(args.samples.bit_length())):
        means = {
            name: np.mean([best_of(n, g["proxy"], g[name]) for g in groups]) for name in groups[0]
        }
        values = (
            means
            | dict(kl=math.log(n) - (n - 1) / n)
            | ({} if math.isnan(slope) else dict(score_per_token=slope))
        )
        lines.append(
            dict(step=n) | {f"eval/{name}": float(value) for name, value in values.items()}
        )
        print(
            "n {step:>3}".format(**lines[-1]),
            *(f"{name} {value:.4g}" for name, value in values.items()),
            sep="  ",
        )
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
