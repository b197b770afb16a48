"""The built-in task has the same rows at every start; imitation and rewards can both improve on
it."""

from collections import Counter

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
