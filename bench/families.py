"""Do other families learn the demo's task? sft.py and grpo.py from random weights, and a picture.

    python bench/families.py    # 1 rank; --draw: only the picture of the runs there are

Qwen3.5 (gated delta nets, images and text), Gemma 3 (images and text) and Pythia (GPT-NeoX) with
1M to 2M weights in the language model, the data of `make demo`, its steps of sft.py and 80 of
grpo.py, one seed. Writes runs/families/ and docs/families.png."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoConfig
from transformers.utils import logging

from bench.models import ALTERNATE, DELTA, QWEN_VISION, model_class, with_images
from common.model.tiny import CONTEXT, build_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "families"
SIZES = dict(
    vocab_size=384, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
)  # fmt: skip
ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
FAMILIES = dict(
    qwen3_5=with_images(
        "qwen3_5", QWEN_VISION | dict(deepstack_visual_indexes=[], out_hidden_size=128),
        model_type="qwen3_5_text", **SIZES | DELTA,
    ),
    gemma3=with_images(
        "siglip_vision_model", dict(image_size=28), model_type="gemma3_text", layer_types=ALTERNATE,
        sliding_window=16, **SIZES,
    ) | dict(mm_tokens_per_image=4),
    gpt_neox=SIZES | dict(num_key_value_heads=4, rope_parameters=ROPE),
)  # fmt: skip
CURVES = dict(sft="eval/solved", grpo="eval/solved")
STEPS = dict(sft=[], grpo=["--max_steps", "80", "--eval_every", "20"])


def make(family: str, folder: Path) -> None:
    """Write a checkpoint of random weights in the hub's form, once."""
    if folder.is_dir():
        return
    tokenizer = build_tokenizer()
    fields = FAMILIES[family]
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    if "text_config" in fields:
        fields = fields | dict(text_config=fields["text_config"] | ends)
    config = AutoConfig.for_model(family, **fields | ends)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    model_class(config).from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(family: str) -> None:
    """Run the two halves of the demo."""
    make(family, RUNS / family / "start")
    model = RUNS / family / "start"
    for script in CURVES:
        output = RUNS / family / script
        line = [sys.executable, f"{script}.py", "--config", f"configs/demo_{script}.yaml"]
        line += ["--model", str(model), "--output_dir", str(output), *STEPS[script]]
        subprocess.run(line, cwd=ROOT, check=True)
        model = output / "hf"


def draw(file: Path) -> None:
    """Draw the solved held-out rows of all runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for ax, (script, name) in zip(axes, CURVES.items(), strict=True):
        for family in FAMILIES:
            metrics = RUNS / family / script / "metrics.jsonl"
            if not metrics.is_file():
                continue
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            points = [(line["step"], line[name]) for line in lines if name in line]
            ax.plot(*zip(*points, strict=True), marker="o", label=family)
            print(family, script, " ".join(f"{step}:{value:.3f}" for step, value in points))
        ax.set(xlabel=f"step of {script}.py", title=f"{script}.py")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("held-out rows solved")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only the picture")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    flags = parser.parse_args()
    if not flags.draw:
        for family in flags.only:
            train(family)
    draw(ROOT / "docs" / "families.png")


if __name__ == "__main__":
    main()
