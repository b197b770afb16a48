"""Programs that run when a run ends, or when their owner goes."""

import gc
import os
import subprocess
import sys
import threading

import pytest
from helpers import PATIENCE, ROOT, alive, descendants, until

from common.metrics.meter import Meter
from extras.code.sandbox import program
from tests.rewards.test_begun_rewards import CODE
from tests.rewards.test_total import groups, make, user_file

pytestmark = pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))


@pytest.mark.slow
def test_run_ends_while_rewards_are_computed_and_programs_run(tmp_path):
    """No process is left, and the run does not wait for pending rewards."""
    began = tmp_path / "began"
    code = f"""
import os, sys
sys.path.insert(0, "tests")
from tests.rewards.test_begun_rewards import ROW, descendants, groups, make, until
programs = make(("code",), rows=[ROW | dict(tests=["assert f()"])])
batch = groups(*[["while True: pass"]] * 9)
for (sample,) in batch: sample.row = dict(_source="a:1", tests=["assert f()"])
for number, group in enumerate(batch): programs.begin(number, group)
until(lambda: descendants(os.getpid()))
rows = [ROW | dict(tests=["assert f()"])]
functions = make(({str(user_file(tmp_path, CODE)) + ":at_gate"!r}, "code"), rows=rows)
batch = groups(*[["late"]] * 9)
for (sample,) in batch: sample.row = dict(here={str(began)!r}, open="nowhere", tests=["assert f()"])
for number, group in enumerate(batch): functions.begin(number, group)
until(lambda: os.path.exists({str(began)!r}))
assert functions.scorers['at_gate'].pool.server.process.pid in descendants(os.getpid())
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
    code_row = dict(tests=["assert True or f()"], answer="18", _source="a:1")
    rewards = make((f"{user_file(tmp_path, CODE)}:each", "code"), rows=[code_row])
    batch = groups(["abc", "d"])
    for sample in batch[0]:
        sample.row = code_row
    assert rewards(batch, Meter())[1]["each"].tolist() == [[3, 1]]
    assert set(threading.enumerate()) - threads and set(descendants(os.getpid())) - processes
    del rewards
    gc.collect()
    until(
        lambda: (
            not set(threading.enumerate()) - threads
            and not set(descendants(os.getpid())) - processes
        )
    )
