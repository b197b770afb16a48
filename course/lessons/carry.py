"""The reward exact_match for the task `arithmetic`, with its mean over the two kinds of questions
as metrics."""

import re


def score(completion: str, row: dict) -> tuple[float, dict[str, float]]:
    """Return 1 for the right answer, else 0; also under `carry` if the units carry or borrow, else
    under `plain`."""
    ((number, sign, change),) = re.findall(r"^(\d+)([+-])(\d+)=$", row["prompt"])
    units = int(number[-1]) + int(sign + change)
    right = float(completion.strip() == row["answer"])
    return right, {"plain" if 0 <= units <= 9 else "carry": right}


score.columns = ("prompt", "answer")
