"""Rewards that begin before their result is required: time limits, errors, and the end of the
thread."""

import gc
import os
import threading

import pytest
import torch
from helpers import write
from in_process import Args
from processes import alive, descendants, run, until

from common.metrics.meter import Meter
from common.rewards.total import Rewards
from tests.rewards.scored import ROW, groups, make

CODE = """
import os
def each(completion, row):
    if completion == "raise": raise KeyError("oops")
    if completion == "late":
        while True: pass
    fine = len(completion), dict(words=len(completion.split()))
    return {"bad": float("nan"), "none": None}.get(completion, fine)

def rank(completions, row, ids):
    if "raise" in completions: return [1]
    return [sorted(completions).index(text) for text in completions]

def at_gate(completion, row):
    open(row["here"], "w").close()
    while not os.path.exists(row["open"]): pass
    return float(completion)
"""
TEXTS = [["#### 18", "a b"], ["late", "c"], ["raise", "none"], ["bad", "#### 18"], ["a", "late"]]


def begin(rewards, number: int, group: list) -> None:
    group[0].number = number
    rewards.begin(group)


def scored(rewards, batch) -> tuple:
    scored = rewards.wait(batch, meter := Meter())
    tables = [{name: x_PG.tolist() for name, x_PG in of_name.items()} for of_name in scored[1:]]
    return repr(scored.rewards_PG.tolist()), repr(tables), meter.reduce()


def test_begun_rewards_equal_synchronous_rewards(tmp_path):
    """Rewards are collected in any order, in parts, by other threads, partly never, and beside
    groups of another size."""
    file = write(tmp_path / "mine.py", CODE)
    args = Args(
        reward=(f"{file}:each", "gsm8k", f"{file}:rank"), max_reward_errors=1, reward_timeout=1
    )
    rewards = Rewards(args, [ROW], None, torch.device("cpu"))
    expected = scored(rewards, groups(*TEXTS))
    batch, evaluation = groups(*TEXTS), groups(["a b c"], ["#### 18"])
    pieces = [{3: batch[3]}, {1: batch[1], 0: batch[0]}, {-1: evaluation[0], -2: evaluation[1]}]
    for piece in (*pieces, {4: batch[4]}, {}, {5: groups(["never"])[0]}):
        for number, group in piece.items():
            (thread := threading.Thread(target=begin, args=(rewards, number, group))).start()
            thread.join()
    assert scored(rewards, batch) == expected
    assert expected[0] == "[[8.0, 4.0], [nan, 1.0], [nan, nan], [nan, 8.0], [1.0, nan]]"
    total, _, _ = rewards.wait(evaluation, meter := Meter())
    assert total.tolist() == [[5], [8]] and meter.reduce()["reward/error_fraction"] == 0
    assert list(rewards.begun) == [5]


def test_collecting_waits_only_for_the_given_groups(tmp_path):
    rows = [
        dict(here=str(tmp_path / f"here{i}"), open=str(tmp_path / f"open{i}"), _source="a:1")
        for i in range(2)
    ]
    rewards = make((f"{write(tmp_path / 'mine.py', CODE)}:at_gate",), rows=rows)
    first, second = groups(["1"], ["2"])
    first[0].row, second[0].row = rows
    begin(rewards, 0, first)
    begin(rewards, 1, second)
    (tmp_path / "open0").touch()
    assert rewards.wait([first], Meter())[0].tolist() == [[1]]
    until((tmp_path / "here1").exists)
    assert not rewards.begun[1].done()
    (tmp_path / "open1").touch()
    assert rewards.wait([second], Meter())[0].tolist() == [[2]]


def test_exception_reaches_the_caller_and_spares_other_groups():
    rewards, (broken, fine) = make(("gsm8k",)), groups(["#### 18"], ["#### 18"])
    broken[0].row = {}
    for starts in (True, False):
        if starts:
            begin(rewards, 0, broken)
        with pytest.raises(KeyError, match="answer"):
            rewards.wait([broken], Meter())
    assert rewards.wait([fine], Meter())[0].tolist() == [[1]]


# ---- the thread ----

RUN = """
import os, sys
from common.parallel import distributed
from tests.rewards.test_begun_rewards import begin, descendants, groups, make, until
function, began = sys.argv[1:]
distributed.setup(0)
rewards, batch = make((function,)), groups(*[["late"]] * 9)
for number, group in enumerate(batch):
    group[0].row = dict(here=began, open="nowhere")
    begin(rewards, number, group)
until(lambda: os.path.exists(began))
print(*descendants(os.getpid()), flush=True)
raise distributed.RunError("over")
"""


@pytest.mark.slow
def test_run_ends_while_rewards_are_computed(tmp_path):
    """No process is left, and the run does not wait for pending rewards."""
    function = f"{write(tmp_path / 'mine.py', CODE)}:at_gate"
    done = run(1, RUN, function, tmp_path / "began", code=1)
    assert done.stderr == "error: over\n"
    until(lambda: not any(alive(int(pid)) for pid in done.stdout.split()))


def test_threads_and_processes_end_with_their_owner(tmp_path):
    threads, processes = set(threading.enumerate()), set(descendants(os.getpid()))
    rewards = make((f"{write(tmp_path / 'mine.py', CODE)}:each", "math"))
    assert rewards.wait(groups(["abc", "d"]), Meter())[1]["each"].tolist() == [[3, 1]]
    assert set(threading.enumerate()) - threads and set(descendants(os.getpid())) - processes
    del rewards
    gc.collect()
    until(lambda: not set(threading.enumerate()) - threads)
    until(lambda: not any(map(alive, set(descendants(os.getpid())) - processes)))
