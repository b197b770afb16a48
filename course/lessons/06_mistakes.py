"""The answers of a run to questions without a carry, from its samples.jsonl.

    python course/lessons/06_mistakes.py runs/course/06/samples

A needless carry is an answer that is 10 too large (a sum) or 10 too small (a difference)."""

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from carry import score

answers: dict[int, Counter] = {}  # by step
for line in (Path(sys.argv[1]) / "samples.jsonl").read_text().splitlines():
    sample = json.loads(line)
    question = sample["prompt"].rstrip("=")
    number, change = int(question[:3]), int(question[3:])
    row = dict(prompt=sample["prompt"], answer=str(number + change))
    needless = str(number + change + (10 if change > 0 else -10))
    if "plain" in score(sample["completion"], row)[1]:
        kinds = {row["answer"]: "right", needless: "needless carry"}
        answers.setdefault(sample["step"], Counter())[
            kinds.get(sample["completion"].strip(), "other")
        ] += 1

print("step  right  needless carry  other")
for step, counts in sorted(answers.items()):
    right, needless, other = (
        counts[kind] / counts.total() for kind in ("right", "needless carry", "other")
    )
    print(f"{step:4}  {right:5.3f}  {needless:14.3f}  {other:5.3f}")
