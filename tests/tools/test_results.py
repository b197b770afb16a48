"""The rows and the reward of docs/results.md."""

import json

import pytest

from bench.results import rows
from bench.results.bills_reward import right_object
from common.rewards.functions import gsm8k_flexible


@pytest.mark.parametrize("task, reward", [("words", gsm8k_flexible), ("bills", right_object)])
def test_answers_of_the_rows_are_right_and_no_question_comes_twice(task, reward, tmp_path):
    rows.main(task, tmp_path)
    made = [json.loads(x) for file in tmp_path.glob("*.jsonl") for x in file.open()]
    assert len({row["prompt"] for row in made}) == len(made) == sum(rows.COUNTS.values())
    assert {reward(row["completion"], row) for row in made} == {1.0}


@pytest.mark.parametrize(
    "completion, value",
    [('{"total": 12, "item": "pens"}', 1), ('{"item": "pens", "total": 13}', 0.2),
     ('{"item": "pens"}', 0), ('Here: {"item": "pens", "total": 12}', 0), ("12", 0)],
)  # fmt: skip
def test_object_needs_the_keys_and_their_values(completion, value):
    assert right_object(completion, dict(answer='{"item": "pens", "total": 12}')) == value
