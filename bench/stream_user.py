"""Reward functions and an environment for bench/stream.py, as in a user's file."""

import random
import time


def before_dots(completion: str, row: dict) -> float:
    """Return 1 if the text before the dots is the answer; any number of dots is allowed."""
    return float(completion.partition(".")[0] == row["answer"])


def slow(completion: str, row: dict) -> float:
    """Return the same after 50 ms."""
    time.sleep(0.05)
    return before_dots(completion, row)


class SlowSums:
    """Environment that poses the sums of a row one after the other. An answer takes 0 to 200 ms,
    always the same for a row. Columns: `questions`, `answers`. Reward: the fraction of right
    answers."""

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
