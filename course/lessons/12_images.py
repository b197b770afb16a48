"""Data of lesson 12, and the way of one picture into the model.

    python course/lessons/12_images.py runs/course/12/data
    python course/lessons/12_images.py runs/course/12/data tiny-images    # ids, patches, shapes
    python course/lessons/12_images.py runs/course/12/data runs/course/12/right/hf

right.jsonl has the training rows of the task squares; swapped.jsonl has the same rows with pictures
of other rows; test.jsonl and test_swapped.jsonl are the same for held-out rows. The first command
prints the entropy of the answers too. With a model, the script shows the first held-out picture to
it."""

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from extras.images.pictures import squares_rows


def rows_with_files(split: str, folder: Path) -> list[dict]:
    """Write the pictures of a split. Return its rows with their paths below `folder`."""
    rows = []
    for number, row in enumerate(squares_rows(split)):
        file = f"pictures/{split}_{number}.png"
        row["images"][0].save(folder / file)
        columns = {name: row[name] for name in ("prompt", "completion", "answer")}
        rows.append(dict(images=[file], **columns))
    return rows


def swapped(rows: list[dict], rng: random.Random) -> list[dict]:
    """Return the rows with shuffled pictures: all pictures, prompts and answers are still there."""
    pictures = [row["images"] for row in rows]
    rng.shuffle(pictures)
    return [row | dict(images=images) for row, images in zip(rows, pictures, strict=True)]


def write(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def entropy(answers: list[str]) -> float:
    """Return the entropy of the distribution of the answers, in nats."""
    shares = [count / len(answers) for count in Counter(answers).values()]
    return -sum(share * math.log(share) for share in shares)


def make(folder: Path) -> None:
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    train, test = (rows_with_files(split, folder) for split in ("train", "test"))
    write(folder / "right.jsonl", train)
    write(folder / "swapped.jsonl", swapped(train, random.Random(0)))
    write(folder / "test.jsonl", test)
    write(folder / "test_swapped.jsonl", swapped(test, random.Random(0)))
    print_entropies(train)


def print_entropies(rows: list[dict]) -> None:
    """Print the entropy of the demonstrator's answers, and their mean entropy for each number of
    squares. A completion has two tokens, of which the end is certain."""
    of_count = {str(n): [] for n in range(1, 10)}
    for row in rows:
        of_count[row["answer"]].append(row["completion"])
    blind = entropy([row["completion"] for row in rows])
    sees = sum(len(of) * entropy(of) for of in of_count.values()) / len(rows)
    print(f"blind: {blind:.3f} nats per answer, {blind / 2:.3f} per token")
    print(f"sees:  {sees:.3f} nats per answer, {sees / 2:.3f} per token")


def show(folder: Path, path: str) -> None:
    """Print the ids, the shapes and the likeliest answers for the first held-out row."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from common.model.tiny import TINY_IMAGES
    from extras.images.reader import reader

    path = str(TINY_IMAGES) if path == "tiny-images" else path
    row = json.loads((folder / "test.jsonl").read_text().splitlines()[0])
    picture = Image.open(folder / row["images"][0])
    read = reader(path, None)
    pixels = read.process(picture)
    layout = read.layout(*picture.size)
    tokenizer = AutoTokenizer.from_pretrained(path)
    token = tokenizer.convert_ids_to_tokens(read.image_id)
    text = read.text(layout, token) + row["prompt"]
    ids_T = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    is_image_T = ids_T == read.image_id
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        pixel_values = read.arguments([pixels])["pixel_values"]
        seen = model.model.vision_model(pixel_values[0]).last_hidden_state
        features = read.features(model.model, [pixels]).embeds
        embeds_TD = model.get_input_embeddings()(ids_T)
        embeds_TD = embeds_TD.masked_scatter(is_image_T[:, None], features)
        logits = model(inputs_embeds=embeds_TD[None]).logits[0, -1]
    print(*ids_T.tolist())
    for name, value in (
        ("pixels", pixel_values[0]),
        ("patches", seen),
        ("features", features),
        ("embeds_TD", embeds_TD),
    ):
        print(f"{name:10}{[*value.shape]}")
    print(f"{is_image_T.sum()} placeholders of {len(ids_T)} tokens; answer {row['answer']}")
    digits = tokenizer.convert_tokens_to_ids([*"123456789"])
    print("p(1..9)  ", *(f"{p:.2f}" for p in logits.softmax(-1)[digits].tolist()))


if __name__ == "__main__":
    if sys.argv[2:]:
        show(Path(sys.argv[1]), sys.argv[2])
    else:
        make(Path(sys.argv[1]))
