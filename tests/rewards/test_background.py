"""Rewards of samples that are complete, while others are sampled or trained on."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from conftest import Args
from helpers import PATIENCE, ROOT, until

from common.metrics.meter import Meter
from common.rewards.background import Background
from common.rewards.scoring import Rewards
from tests.rewards.pools import StillClock
from tests.rewards.test_scoring import ROW, groups, make, user_file

CODE = """
import os
def each(completion, row):
    if completion == "raise": raise KeyError("oops")
    if completion == "late":
        while True: pass
    return {"bad": float("nan"), "none": None}.get(completion, (len(completion), dict(words=len(completion.split()))))

def rank(completions, row, ids):
    return [sorted(completions).index(text) for text in completions] if "raise" not in completions else [1]

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
    """The time of a pool whose calls hang that are about a text `late`."""

    def only_hanging(self) -> bool:
        at = [next(iter(worker.calls), None) for worker in self.pool.workers if worker.calls or worker.loading]
        hang = all(number is not None and self.pool.calls[number][0] == "late" for number in at)
        return bool(at) and hang and self.reached()


def numbers_of(rewards, batch) -> tuple:
    total, parts = rewards(batch, meter := Meter())
    each = [sample.numbers for group in batch for sample in group]
    return repr(total.tolist()), repr({name: part.tolist() for name, part in parts.items()}), each, meter.reduce()


def test_what_was_begun_gives_the_same(monkeypatch, tmp_path):
    """In whatever order, in pieces, by other threads, and in part not at all; beside groups of another size."""
    file = user_file(tmp_path, CODE)
    args = Args(reward=(f"{file}:each", "gsm8k", f"{file}:rank"), max_reward_errors=1, reward_timeout=5)
    rewards = Rewards(args, [ROW], None, torch.device("cpu"))
    LateClock(monkeypatch, rewards.pool, ())
    expected = numbers_of(rewards, groups(*TEXTS))
    batch, evaluation = groups(*TEXTS), groups(["a b c"], ["#### 18"])
    rewards.begin([batch[3]])
    for piece in ([batch[1], batch[0]], evaluation, [batch[4]], []):
        (thread := threading.Thread(target=rewards.begin, args=(piece,))).start()
        thread.join()
    assert numbers_of(rewards, batch) == expected
    assert expected[0] == "[[8.0, 4.0], [nan, 1.0], [nan, nan], [nan, 8.0], [1.0, nan]]"
    total, _ = rewards(evaluation, meter := Meter())
    assert total.tolist() == [[5], [8]] and meter.reduce()["reward/error_fraction"] == 0
    assert all(sample.scores is None for group in batch + evaluation for sample in group)


def test_nothing_waits_for_what_was_begun_until_it_is_needed(tmp_path):
    rows = [dict(here=str(tmp_path / f"here{i}"), open=str(tmp_path / f"open{i}"), _source="a:1") for i in range(2)]
    rewards = make((f"{user_file(tmp_path, CODE)}:at_gate",), rows=rows)
    first, second = groups(["1"], ["2"])
    first[0].row, second[0].row = rows
    rewards.begin([first])
    until((tmp_path / "here0").exists)
    rewards.begin([second])
    (tmp_path / "open0").touch()
    assert rewards([first], Meter())[0].tolist() == [[1]]
    until((tmp_path / "here1").exists)
    assert not second[0].scores.done()
    (tmp_path / "open1").touch()
    assert rewards([second], Meter())[0].tolist() == [[2]]


def test_of_what_waits_the_first_in_order_goes_first(tmp_path):
    """Whatever order they come in: a step needs the oldest of its prompts, and what a later one needs may wait."""
    names = ["gate", "last", "middle", "first"]
    rows = [dict(here=str(tmp_path / name), open=str(tmp_path / "open"), _source="a:1") for name in names]
    rewards = make((f"{user_file(tmp_path, CODE)}:in_turn",), rows=rows)
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
    assert began == [(tmp_path / name).stat().st_mtime_ns for name in ("gate", "first", "middle", "last")]


def test_what_hangs_takes_its_own_time_alone(monkeypatch, tmp_path):
    args = Args(reward=(f"{user_file(tmp_path, CODE)}:each",), max_reward_errors=0.5, reward_timeout=5)
    rewards = Rewards(args, [ROW], None, torch.device("cpu"))
    hangs, fine = groups(["late"], ["abc"])
    LateClock(monkeypatch, rewards.pool, (), lambda: fine[0].scores is not None)
    rewards.begin([hangs])
    until(lambda: any(worker.calls for worker in rewards.pool.workers))
    rewards.begin([fine])
    total, _ = rewards([hangs, fine], meter := Meter())
    assert total[0].isnan().all() and total[1].tolist() == [3] and meter.reduce()["reward/timeout_fraction"] == 0.5


def test_a_bug_reaches_the_caller_and_ends_nothing_else():
    rewards, (broken, fine) = make(("gsm8k",)), groups(["#### 18"], ["#### 18"])
    broken[0].row = {}
    for begin in (rewards.begin, lambda groups: None):
        begin([broken])
        with pytest.raises(KeyError, match="answer"):
            rewards([broken], Meter())
        broken[0].scores = None
    assert rewards([fine], Meter())[0].tolist() == [[1]]


# ---- threads ----


def test_the_interpreter_exits_while_threads_are_at_something():
    code = """
import threading
from common.rewards.background import Background
begun, threads = threading.Barrier(3), Background(2)
for _ in range(2): threads.submit(lambda: (begun.wait(), threading.Event().wait()))
for _ in range(9): threads.submit(threading.Event().wait)
begun.wait()
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")


def test_threads_end_with_their_object():
    before = set(threading.enumerate())
    background = Background(3)
    started = set(threading.enumerate()) - before
    assert [background.submit(pow, 2, i).result() for i in range(9)] == [2**i for i in range(9)] and len(started) == 3
    assert isinstance(background.submit(int, "x").exception(), ValueError)
    del background
    gc.collect()
    for thread in started:
        thread.join(PATIENCE)
    assert not started & set(threading.enumerate())
