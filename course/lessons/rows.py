"""The rows of lessons 3 and 9: `splits`, where a question has many right answers, and `chains`,
whose answers have many lengths.

    python course/lessons/rows.py     # writes runs/course/data/{splits,chains}/{train,test}.jsonl

`make course-base` runs it before it trains on them."""

import json
import random
from pathlib import Path

FOLDER = Path("runs/course/data")


def splits() -> dict[str, list[dict]]:
    """Return rows of `test` and `train` with `prompt`, `completion`, `chosen` and `rejected`, all
    strings, and `target`, a number.

    The prompts are `n=` for 20 <= n < 99, without those that end in 9: 16 questions in `test`, and
    56 in `train` with 200 demonstrations each. Every `a+b` with the sum n is right, for a, b >= 1
    (the reward `split` of counts.py). The demonstrator draws any a below n. Two times in three it
    forgets to borrow when it computes b = n - a. `chosen` is right, and `rejected` lacks a
    borrow."""
    rng = random.Random(0)
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    questions = [n for n in range(20, 99) if n % 10 != 9]  # 29 - a needs no borrow for any a
    rng.shuffle(questions)
    for number, n in enumerate(questions):
        name = "test" if number < 16 else "train"
        borrows = [a for a in range(1, n) if _without_borrow(n, a) != n - a]
        for _ in range(1 if name == "test" else 200):
            a = rng.randrange(1, n)
            right = rng.randrange(1, n)
            wrong = rng.choice(borrows)
            b = _without_borrow(n, a) if rng.random() < 2 / 3 else n - a
            row = dict(
                prompt=f"{n}=",
                completion=f"{a}+{b}",
                target=n,
                chosen=f"{right}+{n - right}",
                rejected=f"{wrong}+{_without_borrow(n, wrong)}",
            )
            rows[name].append(row)
    rng.shuffle(rows["train"])
    return rows


def _without_borrow(n: int, a: int) -> int:
    """Return n - a for 0 <= a <= n < 100, digit by digit, without the borrow."""
    return (n // 10 - a // 10) * 10 + (n - a) % 10


def chains() -> dict[str, list[dict]]:
    """Return rows of `test` and `train` with `prompt`, `completion`, `answer`, `chosen` and
    `rejected`, all strings.

    The prompts are sums of a three-digit number and one to three digits, `247+9+8=`, with unchanged
    hundreds and at least one carry: 500 questions in `test`, 4,000 in `train` with three
    demonstrations each. A demonstration adds one digit at a time, `247+9=256+8=264`, and may check
    the last sum up to four times, `247+9=256+8=264?264`: 9 to 37 characters. The demonstrator
    forgets one carry in three. It checks more often if the sum is right, but a check only repeats
    the sum, so that length and being right go together and neither causes the other. The last
    number is the answer (the reward `gsm8k_flexible`). `chosen` and `rejected` are a right and a
    wrong demonstration."""
    rng = random.Random(0)
    questions: dict[tuple[int, ...], None] = {}  # an ordered set
    while len(questions) < 4_500:
        terms = (rng.randint(100, 399), *(rng.randint(4, 9) for _ in range(rng.randint(1, 3))))
        if terms[0] // 10 < sum(terms) // 10 and terms[0] // 100 == sum(terms) // 100:
            questions[terms] = None
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    for number, terms in enumerate(questions):
        name = "test" if number < 500 else "train"
        for _ in range(1 if name == "test" else 3):
            drawn = {False: "", True: ""}  # the last wrong and right demonstration
            while not all(drawn.values()):
                completion, right = _chain(terms, rng)
                drawn[right] = completion
            completion, _ = _chain(terms, rng)
            row = dict(
                prompt="+".join(map(str, terms)) + "=",
                completion=completion,
                answer=str(sum(terms)),
                chosen=drawn[True],
                rejected=drawn[False],
            )
            rows[name].append(row)
    rng.shuffle(rows["train"])
    return rows


def _chain(terms: tuple[int, ...], rng: random.Random) -> tuple[str, bool]:
    """Return a demonstration of `chains`, and whether it is right."""
    said = terms[0]
    chain = str(said)
    for term in terms[1:]:
        carries = said % 10 + term > 9
        said += term - 10 * (carries and rng.random() < 1 / 3)
        chain += f"+{term}={said}"
    right = said == sum(terms)
    checks = 0
    while checks < 4 and rng.random() < (0.45 if right else 0.25):
        chain += f"?{said}"
        checks += 1
    return chain, right


def main() -> None:
    for name, rows_by_split in dict(splits=splits(), chains=chains()).items():
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        for split, rows in rows_by_split.items():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (FOLDER / name / f"{split}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
