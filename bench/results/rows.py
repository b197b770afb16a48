"""Write the rows of a task: word problems with numbers below 20, or bills that are wanted as JSON.

    python bench/results/rows.py words --output_dir runs/words
    python bench/results/rows.py bills --output_dir runs/bills

The files sft.jsonl, rl.jsonl and test.jsonl have no question in common."""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

COUNTS = dict(test=200, sft=128, rl=1000)
NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jon Kim Leo Mia Nils Olga Paul".split()
THINGS = "apples pens books shells coins cards eggs stamps cups nuts keys bricks".split()
CITIES = "Rome Oslo Lima Cairo Paris Delhi Quito Turin".split()
# a question about x, y, z and few, and the steps that answer it; r: the result of the last step
PROBLEMS = [
    ("{name} has {x} {things} and finds {y}. How many does {name} have now?", "x + y"),
    ("{name} had {x} {things} and lost {y}. How many are left?", "x - y"),
    ("{name} sells {x} {things} on Monday and {y} on Friday. How many in all?", "x + y"),
    ("{x} {things} are on a table. {name} takes {y}. How many stay there?", "x - y"),
    ("A bag has {x} {things}, a box {y} more than the bag. How many are in the box?", "x + y"),
    ("{name} owns {x} {things}, a friend {y} fewer. How many does the friend own?", "x - y"),
    ("Each of {few} friends brings {y} {things}. How many come together?", "few * y"),
    ("{name} has {x} {things}, finds {y} and loses {z}. How many are left?", "x + y", "r - z"),
    ("{name} packs {few} boxes of {y} {things} and keeps {z} more. How many in all?",
     "few * y", "r + z"),
]  # fmt: skip
BILL = (
    "{buyer} buys {count} {item} at {price} coins each in {city}. Reply with a JSON object with "
    "the keys {keys} and nothing else."
)


def words(rng: random.Random) -> dict | None:
    """Return a word problem with worked steps, or None if a step's result is negative."""
    text, *steps = rng.choice(PROBLEMS)
    given = {name: rng.randrange(2, 20) for name in "xyz"} | {"few": rng.randrange(2, 5)}
    worked, result = "", 0
    for step in steps:
        left, sign, right = step.split()
        a, b = ((given | {"r": result})[name] for name in (left, right))
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        worked += f"{a} {sign} {b} = {result}. "
        if result < 0:
            return None
    question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **given)
    return dict(prompt=question, completion=f"{worked}The answer is {result}.", answer=str(result))


def bills(rng: random.Random) -> dict:
    count, price = rng.randrange(2, 10), rng.randrange(2, 10)
    bill = dict(buyer=rng.choice(NAMES), item=rng.choice(THINGS), count=count, price=price,
                city=rng.choice(CITIES), total=count * price)  # fmt: skip
    keys = rng.sample(list(bill), 3)
    question = BILL.format(**bill, keys=", ".join(keys))
    answer = json.dumps({key: bill[key] for key in keys})
    return dict(prompt=question, completion=answer, answer=answer)


TASKS = dict(words=words, bills=bills)


def rows(task: str, seed: int = 0) -> Iterator[dict]:
    """Yield rows without end; no question comes twice."""
    rng, seen = random.Random(seed), set()
    while True:
        row = TASKS[task](rng)
        if row and row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row


def main(task: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = rows(task)
    for name, count in COUNTS.items():
        lines = [json.dumps(row) + "\n" for row in islice(source, count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    main(options.task, options.output_dir)
