"""The environment `calculator`, its task and the task of `--tools python`."""

import asyncio
from contextlib import closing
from itertools import zip_longest

import pytest
from processes import PATIENCE

from common.rollout.environments import BUILT_IN, episode_server, load_environment
from common.workers.pool import Process
from extras.tools.calculator import Calculator
from extras.tools.tasks import calculator_rows, products_rows


def play_demonstration(row: dict) -> float:
    """Play the demonstration of a row; the environment must answer as in the row. Return the sum of
    rewards."""
    environment, total = Calculator(), 0.0
    prompt, *messages = row["messages"]
    assert environment.reset(row) == row["prompt"] == [prompt] and len(messages) % 2
    for turn, answer in zip_longest(messages[::2], messages[1::2]):
        said, reward, done = environment.step(turn["content"])
        assert (said, done) == (([answer], False) if answer else ([], True))
        total += reward
    return total


def test_task_fits_its_environment():
    for split in ("train", "test"):
        scores = [play_demonstration(row) for row in calculator_rows(split)[:300]]
        assert 0.1 <= sum(scores) / len(scores) <= 0.2
    assert not calculator_rows("train")[:200] == calculator_rows("test")[:200]


@pytest.mark.parametrize("rows", [calculator_rows, products_rows])
def test_tasks_are_deterministic(rows):
    assert rows("test") == rows("test") and len(rows("test")) == 500


@pytest.mark.parametrize(("text", "told", "reward"), [
    ("<calc>3*4</calc>", "3*4=12", 0),
    ("so <calc> (3+5)/16</calc>", "(3+5)/16=1/2", 0),
    ("it is 12", None, 1),
    ("13 - no, 12.0", None, 1),
    ("12 or 13", None, 0),
    ("", None, 0),
    ("-12", None, 0),
    ("9" * 10_000, None, 0),
    *((bad, "error", 0) for bad in (
        "<calc>3**4</calc>", "<calc>", "<calc>1/0</calc>", "<calc>__import__('os')</calc>",
    )),
])  # fmt: skip
def test_calculator_evaluates_expressions(text, told, reward):
    environment = Calculator()
    environment.reset(dict(prompt="?", answer="12"))
    said, found, done = environment.step(text)
    assert found == reward and done == (told is None)
    assert done or said[0]["content"].partition(":")[0] == told


def test_calculator_is_built_in_and_plays_in_a_process():
    assert load_environment("calculator") is Calculator
    row = calculator_rows("test")[0]
    calls = [("reset", row), ("step", "<calc>2*3</calc>"), ("step", row["answer"])]
    with closing(episode_server(BUILT_IN["calculator"])) as server, asyncio.Runner() as loop:
        process = Process(server)
        values = [loop.run(process.call(*call, seconds=PATIENCE)).value for call in calls]
        process.close()
    said = [dict(role="tool", content="2*3=6")]
    assert values == [row["prompt"], (said, 0.0, False), ([], 1.0, True)]
