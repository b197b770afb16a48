"""Data of lesson 11: questions to a judge, with their answers yes or no.

    python course/lessons/11_judge.py runs/course/11/data
    python course/lessons/11_judge.py runs/course/11/data runs/course/11/judge/hf  # after training

A question is a prompt of the task arithmetic with an answer, `133+9=142`. Half of the answers are
right. The wrong ones are malformed: a digit too many or too few, or a sign in place of a digit.
train.jsonl has them; test.jsonl has those of held-out prompts. digits.jsonl has held-out prompts
too, but its wrong answers are those of a forgetful demonstrator, as in lesson 4: three digits. The
second command prints how often a judge is right about both.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common.text.tasks import arithmetic_rows


def malformed(answer: str, rng: random.Random) -> str:
    """Return an answer with a digit too many or too few, or with a sign in place of a digit."""
    start = answer[: rng.randrange(3)]
    end = answer[len(start) + 1 :]
    middle = rng.choice((rng.choice("0123456789") + answer[len(start)], "", rng.choice("+-=")))
    return start + middle + end


def question(prompt: str, answer: str, verdict: str) -> dict:
    turns = [(prompt + answer, "user"), (verdict, "assistant")]
    return dict(messages=[dict(role=role, content=text) for text, role in turns])


def write(file: Path, split: str, rng: random.Random, wrong_column: str | None = None) -> None:
    rows = []
    for row in arithmetic_rows(split):
        wrong = row[wrong_column] if wrong_column else malformed(row["answer"], rng)
        rows.append(question(row["prompt"], row["answer"], "yes"))
        rows.append(question(row["prompt"], wrong, "no"))
    rng.shuffle(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.jsonl", "train", rng)
    write(folder / "test.jsonl", "test", rng)
    write(folder / "digits.jsonl", "test", rng, wrong_column="rejected")


def accuracy(file: Path, judge: str) -> float:
    """Return how often the judge's more likely answer is the one of the file. The first characters
    of yes and no decide."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    yes, no = tokenizer.convert_tokens_to_ids(["y", "n"])
    right = []
    for line in file.read_text().splitlines():
        asked, answered = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -1]
        right.append((logits[yes] > logits[no]) == (answered["content"] == "yes"))
    return sum(map(float, right)) / len(right)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    for judge in sys.argv[2:]:
        for name in ("test", "digits"):
            print(f"{name}: {accuracy(Path(sys.argv[1], f'{name}.jsonl'), judge):.3f}")
