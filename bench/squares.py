"""Draw held-out pictures of the task `squares` with their answers and those of a model. Print how
many of all are right.

    python bench/squares.py --model runs/seeds/squares_sft.py_0/hf --picture docs/squares.png
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib
import torch

from common.data.tasks import squares_rows
from extras.images.reader import reader


@torch.no_grad()
def answers(path: str, rows: list[dict]) -> list[str]:
    """Return the most likely first token behind each prompt."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    images = reader(path, None)
    found = []
    for row in rows:
        picture = row["images"][0]
        text = images.text(images.layout(*picture.size), tokenizer) + row["prompt"]
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        pixels = images.process(picture)["pixel_values"][None]
        logits = model(input_ids=ids, pixel_values=pixels).logits
        found.append(tokenizer.decode(logits[0, -1].argmax()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a model trained on squares")
    parser.add_argument("--picture", required=True)
    parser.add_argument("--number", type=int, default=10, help="pictures")
    options = parser.parse_args()
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = squares_rows("test")
    found = answers(options.model, rows)
    right = sum(answer == row["answer"] for answer, row in zip(found, rows, strict=True))
    print(f"{right / len(rows):.3f} of {len(rows)} held-out answers are right")
    number = options.number
    figure, axes = plt.subplots(1, number, figsize=(1.1 * number, 1.4), layout="constrained")
    for axis, row, answer in zip(axes, rows[:number], found[:number], strict=True):
        axis.imshow(row["images"][0], interpolation="nearest")
        axis.set_title(f"{row['answer']}, said {answer}", fontsize=8)
        axis.axis("off")
    figure.savefig(options.picture, dpi=100)


if __name__ == "__main__":
    main()
