"""`--dataset arithmetic`, a built-in task: addition and subtraction of two numbers, taught by a
forgetful demonstrator, so that SFT, preference learning and RL each have something to learn. The
rows and their order are the same in every run."""

import random
import string


def arithmetic_rows(split: str) -> list[dict]:
    """Return rows with `prompt`, `completion`, `answer`, `chosen` and `rejected`, all strings.

    The prompts are `a+b=` and `a-b=` for 100 <= a < 500 and 4 <= b <= 9 with unchanged hundreds:
    4,488 questions, 500 in `test` and the others in `train`, with four demonstrations each. The
    demonstrator forgets to carry (or borrow) two times in three, and three questions in five need
    it. So a model that imitates the `completion`s gets about 0.4 of the `answer`s right, and
    samples every right answer often enough for rewards to reinforce it. `chosen` is the answer,
    `rejected` the forgetful one, or an answer with one wrong digit where nothing is carried."""
    rng = random.Random(0)
    questions = [(a, op * b) for a in range(100, 500) for op in (1, -1) for b in range(4, 10)]
    questions = [(a, b) for a, b in questions if a // 100 == (a + b) // 100]
    rng.shuffle(questions)
    rows: dict[str, list[dict]] = dict(test=[], train=[])
    for number, (a, b) in enumerate(questions):
        answer = str(a + b)
        forgetful = str(a - a % 10 + (a + b) % 10)
        for _ in range(1 if number < 500 else 4):
            completion = forgetful if rng.random() < 2 / 3 else answer
            rejected = forgetful if forgetful != answer else _one_digit_off(answer, rng)
            row = dict(prompt=f"{a}{b:+}=", completion=completion, answer=answer)
            row |= dict(chosen=answer, rejected=rejected)
            rows["test" if number < 500 else "train"].append(row)
    rng.shuffle(rows["train"])
    return rows[split]


def _one_digit_off(number: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(number))  # not the first digit, which must not become 0
    return number[:i] + rng.choice([d for d in string.digits if d != number[i]]) + number[i + 1 :]
