"""Compare adapters to full training: held-out curves of sft.py and dpo.py from the demo's SFT
model, on one rank.

    torchrun --nproc_per_node 2 sft.py --config configs/demo_sft.yaml    # the model they start from
    python bench/lora.py    # about a quarter of an hour; docs/lora_curves.png

sft.py trains on the right answers of the built-in task, dpo.py on its pairs. Runs stay in
runs/lora; a finished run is not repeated."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.data.tasks import arithmetic_rows
from common.metrics.curves import read_metrics

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "lora"
DATA = ("--dataset", OUT / "train.jsonl", "--eval_dataset", OUT / "test.jsonl", "--eval_size", 500)
STEPS = ("--max_steps", 200, "--batch_size", 64, "--warmup_steps", 10, "--eval_every", 20)
SFT = ("sft.py", "--model", "runs/demo/sft/hf", *DATA, *STEPS)
DPO = (
    "dpo.py",
    "--config",
    "configs/demo_dpo.yaml",
    "--sft_weight",
    0,
    "--max_steps",
    150,
    "--eval_every",
    15,
)
RUNS = {
    "sft_full": (*SFT, "--lr", 5e-4),
    "sft_lora": (*SFT, "--lr", 2e-3, "--lora_rank", 16),
    "dpo_full": DPO,
    "dpo_lora": (*DPO, "--lr", 8e-3, "--lora_rank", 16),
}
PANELS = {
    "sft": ("eval_loss", "eval_mean_token_accuracy"),
    "dpo": ("eval_loss", "eval_rewards/accuracies"),
}


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    OUT.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [
            dict(prompt=row["prompt"], completion=row["answer"]) for row in arithmetic_rows(split)
        ]
        (OUT / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, flags in RUNS.items():
        if not (OUT / name / "hf").is_dir():
            command = [sys.executable, *flags, "--output_dir", OUT / name]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run([str(part) for part in command], cwd=ROOT, check=True, env=environment)
    figure, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained")
    panels = [(script, metric) for script, metrics in PANELS.items() for metric in metrics]
    for axis, (script, metric) in zip(axes, panels, strict=True):
        for kind in ("full", "lora"):
            lines = [
                m for m in read_metrics(OUT / f"{script}_{kind}" / "metrics.jsonl") if metric in m
            ]
            axis.plot(
                [m["step"] for m in lines],
                [m[metric] for m in lines],
                "o-",
                label=kind,
                markersize=3,
            )
            print(f"{script}_{kind}", metric, [round(m[metric], 4) for m in lines])
        axis.set_title(f"{script}.py: {metric}", fontsize=9)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(ROOT / "docs" / "lora_curves.png", dpi=80)


if __name__ == "__main__":
    main()
