"""The built-in task has the same rows at every start; imitation and rewards can both improve on
it."""

from collections import Counter

import pytest

from common.config.extra import has_extra
from common.text.files import TASKS, BadRows, open_split
from common.text.tasks import arithmetic_rows


def test_arithmetic_rows_suit_imitation_and_rewards():
    train, test = arithmetic_rows("train"), arithmetic_rows("test")
    assert arithmetic_rows("train") == train
    assert len({row["prompt"] for row in test}) == len(test) == 500
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert set(Counter(row["prompt"] for row in train).values()) == {4}
    for row in train + test:
        answer = str(eval(row["prompt"].rstrip("=")))
        assert answer == row["answer"] == row["chosen"] != row["rejected"]
    solved = sum(row["completion"] == row["answer"] for row in train) / len(train)
    assert 0.3 < solved < 0.7  # imitation can learn a part, and rewards the rest


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_the_same_rows_at_every_start(name):
    package, folder, _ = TASKS[name].split(".", 2)
    if package == "extras" and not has_extra(folder):
        pytest.skip(f"without extras/{folder}")

    def places_and_texts() -> list[tuple[str, str]]:
        (shard,) = open_split("--dataset", name, "test")
        return [(row["_source"], str(row["prompt"])) for row in shard.rows(BadRows("error"))]

    first = places_and_texts()
    assert places_and_texts() == first and len({place for place, _ in first}) == len(first) >= 200
    assert open_split("--dataset", name, "validation") is None
