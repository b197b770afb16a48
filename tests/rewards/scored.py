"""Rewards, and completions for them."""

import torch
from helpers import tiny_tokenizer
from in_process import Args
from processes import PATIENCE

from common.metrics.meter import Meter
from common.packs.sample import Completion, Sample
from common.rewards.total import Rewards

ROW = dict(answer="18", _source="rows.jsonl:1")


def make(names, weights=(), max_errors=0.0, rows=(ROW,), seconds=PATIENCE, **flags):
    limits = dict(max_reward_errors=max_errors, reward_timeout=seconds, reward_workers=2)
    args = Args(reward=names, reward_weights=weights, **limits, **flags)
    return Rewards(args, list(rows), tokenizer=None, device=torch.device("cpu"))


def groups(*texts_of_groups) -> list[list[Sample]]:
    return [
        [Completion(ids=[1, 2], loss_mask=[False, True], text=t, row=ROW) for t in texts]
        for texts in texts_of_groups
    ]


# ---- thoughts ----

RIGHT = r"\boxed{18}"
WRONG = "perhaps ,\n```python\nprint(7)\n```\n#### 7 or \\boxed{7}\n7"


def rows_of(name: str) -> dict:
    instructions = dict(instruction_id_list=["punctuation:no_comma"], kwargs=[{}])
    tests = [dict(input="", output="18\n")]
    row = dict(answer="18", target=18, nums=[9, 9], tests=tests, _source="rows:1", reward=name)
    return row | instructions | dict(options=["7", "18"])


def require_no_answers_in_thoughts(name: str, right: str, found_anywhere: bool) -> None:
    """Check a reward that gives 1 to the text `right`."""
    row = rows_of(name)
    texts = [
        f"<think>{WRONG}</think>\n{right}",
        f"<think>{right}",
        f"<think>{right}</think>",
        right,
        WRONG,
    ]
    group = [Completion([1, 2], [False, True], text=text, row=row) for text in texts]
    for thoughts in ("cut", "keep"):
        args = Args(reward=(name,), thoughts=thoughts, reward_timeout=PATIENCE, reward_workers=2)
        rewards = Rewards(args, [row], tiny_tokenizer(), torch.device("cpu"))
        values = rewards.wait([group], Meter()).rewards_PG[0].tolist()
        assert values[3] == 1 and values[4] < 1, thoughts
        if thoughts == "cut":
            assert values[:3] == [1, 0, 0]
        else:
            assert values[1] == found_anywhere
