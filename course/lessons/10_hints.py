"""Data of lesson 10: the task arithmetic, for a model that reads hints.

    python course/lessons/10_hints.py runs/course/10/data

sft.jsonl has each question twice: alone with the answer of the demonstrator, and behind a hint and
`;`, with the hint as its completion. A hint is the right answer, with up to two checks: `132?132`.
questions.jsonl and held_out.jsonl have two hints for each question: `short` without a check, `long`
with two. plus.jsonl, held_out_plus.jsonl and held_out_minus.jsonl are the sums and differences.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common.text.tasks import arithmetic_rows


def checked(answer: str, checks: int) -> str:
    return answer + f"?{answer}" * checks


def questions(split: str) -> list[dict]:
    """Return the rows of the task with both hints."""
    rows = arithmetic_rows(split)
    return [row | dict(short=row["answer"], long=checked(row["answer"], 2)) for row in rows]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    train = questions("train")
    held_out = questions("test")
    taught = []
    for row in train:
        hint = checked(row["answer"], rng.randrange(3))
        taught.append(dict(prompt=row["prompt"], completion=row["completion"]))
        taught.append(dict(prompt=f"{hint};{row['prompt']}", completion=hint))
    rng.shuffle(taught)
    write(folder / "sft.jsonl", taught)
    write(folder / "questions.jsonl", train)
    write(folder / "held_out.jsonl", held_out)
    write(folder / "plus.jsonl", [row for row in train if "+" in row["prompt"]])
    write(folder / "held_out_plus.jsonl", [row for row in held_out if "+" in row["prompt"]])
    write(folder / "held_out_minus.jsonl", [row for row in held_out if "-" in row["prompt"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
