"""The program of `make demo`: a model of 1M parameters learns arithmetic by SFT and then by GRPO,
in minutes on a CPU.

It runs sft.py and grpo.py under torchrun on two ranks, with the two recipes in configs/. Then it
shows greedy answers after each and draws both curves. It writes to runs/demo; earlier runs there
move aside, to sft.old-1 and grpo.old-1."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from common.metrics.curves import can_draw, draw_curves, read_metrics
from common.parallel.process import print_any_text, visible
from common.text.tasks import arithmetic_rows

ROOT = Path(__file__).resolve().parent
OUT = Path("runs/demo")


def train(script: str, *flags: str) -> None:
    """Launch one torchrun with two ranks, or with one per GPU if there are fewer GPUs."""
    ranks = min(2, torch.cuda.device_count() or 2)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--standalone",
        script,
    ]
    print("\n$ torchrun", *launch[3:], *flags, flush=True)
    quiet = os.environ | {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if subprocess.run([*launch, *flags], cwd=ROOT, env=quiet).returncode:
        sys.exit(f"{script} failed; its message is above")


def answers(path: Path, rows: list[dict]) -> list[str]:
    """Decode greedily with plain transformers, to show that the exported folder needs none of our
    code."""
    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    completions = []
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, max_new_tokens=5, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        completions.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return completions


def main() -> None:
    print_any_text()
    start = time.time()
    train("sft.py", "--config", "configs/demo_sft.yaml", "--resume", "never")
    train("grpo.py", "--config", "configs/demo_grpo.yaml", "--resume", "never")

    scores = [
        line["eval/solved"]
        for line in read_metrics(ROOT / OUT / "grpo/metrics.jsonl")
        if "eval/solved" in line
    ]
    rows = arithmetic_rows("test")[:5]
    columns = answers(ROOT / OUT / "sft/hf", rows), answers(ROOT / OUT / "grpo/hf", rows)
    table = Table(
        "question",
        "answer",
        "after SFT",
        "after GRPO",
        title="five held-out questions",
        title_justify="left",
    )
    for row, after_sft, after_grpo in zip(rows, *columns, strict=True):
        table.add_row(
            row["prompt"], row["answer"], Text(visible(after_sft)), Text(visible(after_grpo))
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"greedy exact match on 500 held-out questions: {scores[0]:.3f} after SFT, "
        f"{scores[-1]:.3f} after GRPO"
    )
    picture = OUT / "curves.png"
    draw_curves(
        [ROOT / OUT / "sft/metrics.jsonl", ROOT / OUT / "grpo/metrics.jsonl"],
        ["loss", "eval_loss", "eval_mean_token_accuracy", "eval/solved", "reward", "entropy"],
        ROOT / picture,
        labels=["sft.py", "grpo.py"],
    )
    curves = f"curves: {picture}; " if can_draw(ROOT / picture) else ""
    console.print(
        f"{curves}models: {OUT}/sft/hf, {OUT}/grpo/hf ({time.time() - start:.0f} seconds)"
    )


if __name__ == "__main__":
    main()
