"""Write the rows of a task: word problems with numbers below 20, or bills that are wanted as JSON.

    python bench/results/rows.py words runs/words
    python bench/results/rows.py bills runs/bills

The files sft.jsonl, rl.jsonl and test.jsonl have no question in common."""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

COUNTS = dict(test=200, sft=200, rl=1000)
NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jon Kim Leo Mia Nils Olga Paul".split()
THINGS = "apples pens books shells coins cards eggs stamps cups nuts keys bricks".split()
# a question about the numbers x, y, z, and the steps that answer it; r: the result of the last step
PROBLEMS = [
    ("{name} has {x} {things}, finds {y} and loses {z}. How many are left?", "x + y", "r - z"),
    ("{x} {things} are on a table. {name} takes {y}, then puts {z} there. How many are there now?",
     "x - y", "r + z"),
    ("{name} fills {x} bags with {y} {things} each and keeps {z} more in a box. How many in all?",
     "x * y", "r + z"),
    ("{name} packs {x} boxes of {y} {things} and gives away {z}. How many remain?",
     "x * y", "r - z"),
    ("One day {name} sells {x} {things}, the next day {y} more than that. How many in two days?",
     "x + y", "x + r"),
    ("{name} owns {x} {things}, a friend {y} fewer, a sister {z}. How many do the three own?",
     "x - y", "x + r", "r + z"),
    ("Each of {x} friends brings {y} {things}, and {name} brings {z}. How many come together?",
     "x * y", "r + z"),
    ("{name} had {x} {things}, used {y} on Monday and {z} on Friday. How many does {name} have?",
     "x - y", "r - z"),
]  # fmt: skip
BILL = (
    "{buyer} buys {count} {item} at {price} coins each and pays with {paid} coins. Reply with a "
    "JSON object with the keys {keys} and nothing else."
)


def words(rng: random.Random) -> dict | None:
    """Return a word problem with worked steps, or None if a step's result is negative."""
    text, *steps = rng.choice(PROBLEMS)
    given = {name: rng.randrange(2, 20) for name in "xyz"}
    if "x * y" in steps:
        given["x"] = rng.randrange(2, 5)
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
    count, price, change = rng.randrange(2, 10), rng.randrange(2, 10), rng.randrange(1, 20)
    total = count * price
    bill = dict(buyer=rng.choice(NAMES), item=rng.choice(THINGS), count=count, price=price,
                total=total, change=change)  # fmt: skip
    keys = rng.sample(list(bill), 3)
    question = BILL.format(**bill, paid=total + change, keys=", ".join(keys))
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
    main(sys.argv[1], Path(sys.argv[2]))
