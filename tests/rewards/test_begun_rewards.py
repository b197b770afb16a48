"""Rewards that begin before their result is required: order, time limits, errors, and the end of
the thread."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers import PATIENCE, ROOT, alive, descendants, until
from in_process import Args

from common.metrics.meter import Meter
from common.rewards.old_processes import Pool
from common.rewards.total import Rewards
from tests.rewards.pools import StillClock
from tests.rewards.test_total import ROW, groups, make, user_file

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

def in_turn(completion, row):
    if not os.path.exists(row["here"]): open(row["here"], "w").close()
    while completion == "gate" and not os.path.exists(row["open"]): pass
    return 1.0

def at_gate(completion, row):
    open(row["here"], "w").close()
    while not os.path.exists(row["open"]): pass
    return float(completion)
"""
TEXTS = [["#### 18", "a b"], ["late", "c"], ["raise", "none"], ["bad", "#### 18"], ["a", "late"]]


class LateClock(StillClock):
    """Clock of pools in which calls with the text `late` hang."""

    def __init__(self, monkeypatch, pools, reached=lambda: True):
        super().__init__(monkeypatch, pools, (), reached)
        map = Pool.map

        def noted(pool, calls, seconds=None):
            self.hanging = {number for number, call in enumerate(calls) if call[0] == "late"}
            return map(pool, calls, seconds)

        monkeypatch.setattr(Pool, "map", noted)


def scored(rewards, batch) -> tuple:
    scored = rewards(batch, meter := Meter())
    tables = [{name: x_PG.tolist() for name, x_PG in of_name.items()} for of_name in scored[1:]]
    return repr(scored.rewards_PG.tolist()), repr(tables), meter.reduce()


def test_begun_rewards_equal_synchronous_rewards(monkeypatch, tmp_path):
    """Rewards are collected in any order, in parts, by other threads, partly never, and beside
    groups of another size."""
    file = user_file(tmp_path, CODE)
    args = Args(
        reward=(f"{file}:each", "gsm8k", f"{file}:rank"), max_reward_errors=1, reward_timeout=5
    )
    rewards = Rewards(args, [ROW], None, torch.device("cpu"))
    LateClock(monkeypatch, rewards.pools)
    expected = scored(rewards, groups(*TEXTS))
    batch, evaluation = groups(*TEXTS), groups(["a b c"], ["#### 18"])
    rewards.begin([batch[3]])
    for piece in ([batch[1], batch[0]], evaluation, [batch[4]], []):
        (thread := threading.Thread(target=rewards.begin, args=(piece,))).start()
        thread.join()
    assert scored(rewards, batch) == expected
    assert expected[0] == "[[8.0, 4.0], [nan, 1.0], [nan, nan], [nan, 8.0], [1.0, nan]]"
    total, _, _ = rewards(evaluation, meter := Meter())
    assert total.tolist() == [[5], [8]] and meter.reduce()["reward/error_fraction"] == 0
    assert not rewards.begun


def test_collecting_waits_only_for_the_given_groups(tmp_path):
    rows = [
        dict(here=str(tmp_path / f"here{i}"), open=str(tmp_path / f"open{i}"), _source="a:1")
        for i in range(2)
    ]
    rewards = make((f"{user_file(tmp_path, CODE)}:at_gate",), rows=rows)
    first, second = groups(["1"], ["2"])
    first[0].row, second[0].row = rows
    rewards.begin([first])
    until((tmp_path / "here0").exists)
    rewards.begin([second])
    (tmp_path / "open0").touch()
    assert rewards([first], Meter())[0].tolist() == [[1]]
    until((tmp_path / "here1").exists)
    assert not rewards.begun[id(second[0])].functions_done.done()
    (tmp_path / "open1").touch()
    assert rewards([second], Meter())[0].tolist() == [[2]]


def test_groups_with_smaller_order_are_scored_first(tmp_path):
    """A step needs its oldest prompts; prompts of later steps may wait."""
    names = ["gate", "last", "middle", "first"]
    rows = [
        dict(here=str(tmp_path / name), open=str(tmp_path / "open"), _source="a:1")
        for name in names
    ]
    rewards = make((f"{user_file(tmp_path, CODE)}:in_turn",), rows=rows)
    rewards.pools[0].size = 1  # two processes would run two groups at the same time
    batch = [group for name in names for group in groups([name] * 4)]
    for group, row in zip(batch, rows, strict=True):
        for sample in group:
            sample.row = row
    rewards.begin(batch[:1])
    until((tmp_path / "gate").exists)
    for order, group in zip((3, 2, 1), batch[1:], strict=True):
        rewards.begin([group], order)
    (tmp_path / "open").touch()
    rewards(batch, Meter())
    began = sorted((tmp_path / name).stat().st_mtime_ns for name in names)
    assert began == [
        (tmp_path / name).stat().st_mtime_ns for name in ("gate", "first", "middle", "last")
    ]


def test_hanging_group_delays_only_itself(monkeypatch, tmp_path):
    args = Args(
        reward=(f"{user_file(tmp_path, CODE)}:each",), max_reward_errors=0.5, reward_timeout=5
    )
    rewards = Rewards(args, [ROW], None, torch.device("cpu"))
    hangs, fine = groups(["late"], ["abc"])
    LateClock(monkeypatch, rewards.pools, (both_begun := threading.Event()).is_set)
    rewards.begin([hangs])
    until(lambda: any(process.asked for process in rewards.pools[0].processes))
    rewards.begin([fine])
    both_begun.set()
    total, _, _ = rewards([hangs, fine], meter := Meter())
    assert (
        total[0].isnan().all()
        and total[1].tolist() == [3]
        and meter.reduce()["reward/timeout_fraction"] == 0.5
    )


def test_exception_reaches_the_caller_and_spares_other_groups():
    rewards, (broken, fine) = make(("gsm8k",)), groups(["#### 18"], ["#### 18"])
    broken[0].row = {}
    for begin in (rewards.begin, lambda groups: None):
        begin([broken])
        with pytest.raises(KeyError, match="answer"):
            rewards([broken], Meter())
    assert rewards([fine], Meter())[0].tolist() == [[1]]


# ---- the thread ----


@pytest.mark.slow
def test_run_ends_while_rewards_are_computed(tmp_path):
    """No process is left, and the run does not wait for pending rewards."""
    began = tmp_path / "began"
    code = f"""
import os, sys
sys.path.insert(0, "tests")
from tests.rewards.test_begun_rewards import descendants, groups, make, until
functions = make(({str(user_file(tmp_path, CODE)) + ":at_gate"!r},))
batch = groups(*[["late"]] * 9)
for (sample,) in batch: sample.row = dict(here={str(began)!r}, open="nowhere")
functions.begin(batch)
until(lambda: os.path.exists({str(began)!r}))
assert functions.pools[0].server.process.pid in descendants(os.getpid())
print(*descendants(os.getpid()), flush=True)
raise SystemExit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (3, "")
    until(lambda: not any(alive(int(pid)) for pid in done.stdout.split()))


def test_threads_and_processes_end_with_their_owner(tmp_path):
    threads, processes = set(threading.enumerate()), set(descendants(os.getpid()))
    rewards = make((f"{user_file(tmp_path, CODE)}:each", "math"))
    assert rewards(groups(["abc", "d"]), Meter())[1]["each"].tolist() == [[3, 1]]
    assert set(threading.enumerate()) - threads and set(descendants(os.getpid())) - processes
    del rewards
    gc.collect()
    until(
        lambda: (
            not set(threading.enumerate()) - threads
            and not set(descendants(os.getpid())) - processes
        )
    )
