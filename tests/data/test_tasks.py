"""Built-in tasks have the same rows at every start; imitation and rewards can both improve on
them."""

from collections import Counter
from statistics import mean

import pytest

from common.data.files import BUILT_IN
from common.data.tasks import TASKS, arithmetic_rows, chains_rows, splits_rows
from common.model.tiny import CHARACTERS
from common.rewards.functions import gsm8k_flexible
from extras.graders.puzzles import split


def test_arithmetic_rows_suit_imitation_and_rewards():
    train, test = arithmetic_rows("train"), arithmetic_rows("test")
    assert arithmetic_rows("train") == train
    assert len({row["prompt"] for row in test}) == len(test) == 500
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert set(Counter(row["prompt"] for row in train).values()) == {4}
    for row in train + test:
        assert (
            str(eval(row["prompt"].rstrip("=")))
            == row["answer"]
            == row["chosen"]
            != row["rejected"]
        )
    solved = sum(row["completion"] == row["answer"] for row in train) / len(train)
    assert 0.3 < solved < 0.7  # imitation can learn a part, and rewards the rest


def test_every_task_is_found_by_its_name():
    assert set(BUILT_IN) == set(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_deterministic(name):
    test = TASKS[name]("test")
    assert TASKS[name]("test") == test and len(test) >= (16 if name == "splits" else 200)


@pytest.mark.parametrize("name", ["arithmetic", "splits", "chains"])
def test_missing_split_is_refused(name):
    with pytest.raises(
        ValueError, match=f"the {name} task has no split 'validation', only train and test"
    ):
        TASKS[name]("validation")


@pytest.mark.parametrize(("rows", "reward"), [(splits_rows, split), (chains_rows, gsm8k_flexible)])
def test_demonstrations_are_partly_right_and_pairs_always(rows, reward):
    train, test = rows("train"), rows("test")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert len({row["prompt"] for row in test}) == len(test)
    for row in train + test:
        assert (reward(row["chosen"], row), reward(row["rejected"], row)) == (1, 0)
        assert set(row["prompt"] + row["completion"] + row["chosen"] + row["rejected"]) <= set(
            CHARACTERS
        )
    assert 0.3 < mean(reward(row["completion"], row) for row in train) < 0.7


def test_a_number_has_many_right_splits():
    right = {
        (row["prompt"], row["completion"])
        for row in splits_rows("train")
        if split(row["completion"], row)
    }
    assert all(
        int(prompt[:-1]) == sum(map(int, completion.split("+"))) for prompt, completion in right
    )
    assert min(Counter(prompt for prompt, _ in right).values()) >= 10


def test_chains_have_many_lengths_and_lose_only_carries():
    """Right demonstrations have more checks on average, but right and wrong ones have every number
    of them."""
    rows = chains_rows("train")
    checks: dict[float, list[int]] = {0: [], 1: []}  # by reward
    for row in rows:
        checks[gsm8k_flexible(row["completion"], row)].append(row["completion"].count("?"))
    assert {len(row["completion"]) for row in rows} == set(range(9, 39, 2)) - {
        11,
        35,
    }  # without EOS
    assert mean(checks[1]) > 1.5 * mean(checks[0])
    assert all(checks[worth].count(n) > 10 for worth in checks for n in range(5))
    for row in rows:
        assert str(eval(row["prompt"].rstrip("="))) == row["answer"]
        chain, *repeated = row["completion"].split("?")
        first, *steps = chain.replace("=", "+").split("+")
        terms, sums = steps[::2], [first, *steps[1::2]]
        assert "+".join([first, *terms]) + "=" == row["prompt"] and {*repeated} <= {
            sums[-1]
        }  # a check repeats the sum
        for before, term, after in zip(
            map(int, sums[:-1]), map(int, terms), map(int, sums[1:]), strict=True
        ):
            right = before + term
            assert after in (right, right - 10 * (before // 10 != right // 10))
