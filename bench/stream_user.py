"""The reward functions and the environment of bench/stream.py, as a user's own file."""

import random
import time


def before_dots(completion: str, row: dict) -> float:
    """1 if the answer stands before the dots, of which there may be any number."""
    return float(completion.partition(".")[0] == row["answer"])


def slow(completion: str, row: dict) -> float:
    """The same, 50 ms later."""
    time.sleep(0.05)
    return before_dots(completion, row)


class SlowSums:
    """Asks for the sums of a row one after the other; an answer takes 0 to 200 ms, the same each time for the same row.
    Columns: `questions`, `answers`. Reward: the fraction that is right."""

    def reset(self, example: dict) -> list[dict]:
        self.questions, self.answers, self.turn = example["questions"], example["answers"], 0
        self.seconds = random.Random(" ".join(self.questions))
        return [dict(role="user", content=self.questions[0])]

    def step(self, completion: str) -> tuple[list[dict], float, bool]:
        time.sleep(self.seconds.uniform(0, 0.2))
        reward = float(completion == self.answers[self.turn]) / len(self.answers)
        self.turn += 1
        done = self.turn == len(self.questions)
        return [] if done else [dict(role="user", content=self.questions[self.turn])], reward, done
