"""The pool: whose answers come in what order, who is killed and when, and a parent that dies."""

import os
import pickle
import select
import signal
import subprocess
import sys
import threading

import pytest
from helpers import PATIENCE, PIPE, ROOT, alive, descendants, kill, until

from common.rewards import pool as module
from common.rewards.pool import LOAD, Pool
from tests.rewards.pools import DO, WAIT, StillClock, errors, watched

pytestmark = pytest.mark.slow  # processes


def meet(pool: Pool, folder, size: int) -> None:
    """All of the pool's processes work at the same time."""
    folder.mkdir()
    assert len({r.value for r in pool.map(DO, [("meet", str(folder), size)] * size)}) == size


# ---- values ----


def test_values_come_in_order_from_all_processes(tmp_path):
    with watched(3) as (pool, counts):
        results = pool.map(DO, [("value", i) for i in range(500)])
        assert [r.value for r in results] == list(range(500)) and not any(errors(results))
        meet(pool, tmp_path / "here", 3)
        assert pool.map(DO, []) == [] and [r.value for r in pool.map("math:sqrt", [(9,), (4,)])] == [3, 2]
    assert max(counts) == 3


def test_sizes_must_be_positive():
    for arguments in ((0, 1), (1, 0), (1, float("nan")), (1, 1, 0), (1, 1, 1, -1)):
        with pytest.raises(ValueError, match="positive"):
            Pool(*arguments)


@pytest.mark.parametrize(
    "how, text",
    [(("leave", 3), "exit 3"), (("leave", 0), "exit 0"), (("segfault",), "SIGSEGV"), (("kill",), "SIGKILL"),
     (("close_all",), "lost its connection")],
)  # fmt: skip
def test_a_process_that_dies_loses_its_call_alone(how, text, tmp_path):
    with watched(2) as (pool, counts):
        calls = [("value", i) for i in range(60)]
        calls[20] = calls[21] = calls[59] = how
        results = pool.map(DO, calls)
        assert {i for i, r in enumerate(results) if r.error} == {20, 21, 59}
        assert all(text in results[i].error and not results[i].timed_out for i in (20, 21, 59))
        assert all(r.value == i for i, r in enumerate(results) if not r.error)
        meet(pool, tmp_path / "here", 2)
    assert max(counts) == 2


# ---- deadlines ----


def test_what_hangs_is_killed_alone(monkeypatch, tmp_path):
    calls, hanging = [("value", i) for i in range(80)], {10: "spin", 11: "power", 40: "deaf", 79: "spin"}
    for i, how in hanging.items():
        calls[i] = (how,)
    with watched(2, 0.6) as (pool, counts):
        StillClock(monkeypatch, pool, hanging)
        results = pool.map(DO, calls)
        assert {i for i, r in enumerate(results) if r.timed_out} == hanging.keys()
        assert all(r.error == "no answer within 0.6 s" for r in results if r.timed_out)
        assert all(r.value == i for i, r in enumerate(results) if not r.timed_out)
        meet(pool, tmp_path / "here", 2)
    assert max(counts) == 2


def test_the_time_is_real():
    with watched(1, 0.2) as (pool, _):
        assert errors(pool.map(DO, [("spin",)])) == ["no answer within 0.2 s"]


def test_each_call_has_a_clock_of_its_own(monkeypatch):
    """What was sent ahead waits longer than the deadline, and loses nothing by it."""
    with Pool(1, 10.0) as pool:
        clock, take = StillClock(monkeypatch, pool, ()), pool._take

        def slowly(*arguments):
            take(*arguments)
            clock.ahead += 9

        monkeypatch.setattr(pool, "_take", slowly)
        results = pool.map(DO, [("pid",)] * 8)
        assert not any(errors(results)) and len({r.value for r in results}) == 1
        assert clock.ahead == 9 * (1 + 8)  # the load, and the calls


def test_a_slow_parent_costs_no_call(monkeypatch):
    """An answer that lies there when the parent comes back is an answer."""
    with Pool(1, 10.0) as pool:
        clock, feed = StillClock(monkeypatch, pool, ()), pool._feed

        def slowly():
            feed()
            for worker in pool.workers:
                if worker.calls:
                    select.select([worker.socket], [], [], PATIENCE)
                    clock.ahead += 100

        monkeypatch.setattr(pool, "_feed", slowly)
        assert errors(pool.map(DO, [("value", 1)] * 3)) == [None] * 3 and clock.ahead >= 200


def test_children_of_what_hangs_end_too(monkeypatch, tmp_path):
    file = tmp_path / "pid"
    with Pool(1, 10.0) as pool:
        StillClock(monkeypatch, pool, {0}, reached=lambda: file.is_file() and file.read_text().endswith(" "))
        assert pool.map(DO, [("spawn", str(file))])[0].timed_out
        until(lambda: not alive(int(file.read_text())))


def test_large_rows_do_not_block_the_parent(monkeypatch):
    """A process that hangs reads nothing: writing to it must not wait."""
    rows = [dict(text="x" * 4_000_000) for _ in range(6)]
    calls = [("spin",), *(("size", row) for row in rows), ("value", rows[0])]
    with Pool(1, 10.0) as pool:
        StillClock(monkeypatch, pool, {0})
        results = pool.map(DO, calls)
        assert [r.timed_out for r in results] == [True] + [False] * 7
        assert [r.value for r in results[1:7]] == [4_000_000] * 6 and results[7].value == rows[0]


# ---- loading ----


def test_start_and_imports_are_off_the_clock(monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text("ready = []\ndef f(x): return x, ready\nf.prepare = lambda: ready.append(1)")
    with Pool(2, 10.0, start_timeout=60) as pool:
        clock, take = StillClock(monkeypatch, pool, ()), pool._take

        def slowly(worker, number, payload):
            clock.ahead += 50 * (number == LOAD)
            take(worker, number, payload)

        monkeypatch.setattr(pool, "_take", slowly)
        results = pool.map(f"{tmp_path}/slow.py:f", [(1,), (2,)])
        assert results == [((1, [1]), None, False), ((2, [1]), None, False)] and clock.ahead >= 50


@pytest.mark.parametrize(
    "code, text",
    [("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
     ("def f(:", "SyntaxError"), ("raise SystemExit('stop')", "SystemExit: stop"), ("x = 1", "AttributeError"),
     ("while True: pass", "not loaded within 0.3 s"), ("import os; os._exit(4)", "exit 4"),
     ("def f(): pass\ndef prepare(): raise OSError('no')\nf.prepare = prepare", "OSError: no")],
)  # fmt: skip
def test_a_file_that_cannot_be_loaded_is_an_error_of_every_call(monkeypatch, tmp_path, code, text):
    (tmp_path / "bad.py").write_text(code)
    target, loads, send = f"{tmp_path}/bad.py:f", [], module._Worker.send

    def watch(worker, number, payload):
        loads.append(number == LOAD and pickle.loads(payload) == target)
        send(worker, number, payload)

    monkeypatch.setattr(module._Worker, "send", watch)
    with watched(2, start_timeout=0.3 if "while" in code else PATIENCE) as (pool, counts):
        for error in errors(pool.map(target, [()] * 100)):
            assert f"{target} cannot be loaded: " in error and text in error
        assert sum(loads) <= 3  # not 100 times; and not once, if somebody else may have killed the process
        pool.start_timeout = PATIENCE
        assert pool.map(DO, [("value", 1)] * 9)[8].value == 1
    assert max(counts) <= 2


def test_a_load_that_fails_late_is_no_matter_to_another_function(tmp_path):
    """The second process is still loading when the first has answered all."""
    first, on = tmp_path / "first", tmp_path / "on"
    (tmp_path / "once.py").write_text(f"""
import os, time
try:
    os.close(os.open({str(first)!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    while not os.path.exists({str(on)!r}): time.sleep(0.01)
    raise
def f(): return 3
""")
    with Pool(2, PATIENCE, start_timeout=PATIENCE) as pool:
        assert [r.value for r in pool.map(f"{tmp_path}/once.py:f", [()] * 30)] == [3] * 30
        assert [worker.loading is None for worker in pool.workers] == [True, False]
        on.touch()
        meet(pool, tmp_path / "here", 2)


# ---- async ----


def test_a_blocked_event_loop_is_killed(monkeypatch, tmp_path):
    """What ran beside it is late too; what was answered before, or is sent afterwards, is not."""
    began = tmp_path / "began"
    calls = [(0.0,)] * 70 + [(0.0, "block", str(began))] + [(0.0,)] * 130
    with watched(2) as (pool, counts):
        StillClock(monkeypatch, pool, {70}, reached=began.is_file)
        results = pool.map(WAIT, calls)
        late = [i for i, r in enumerate(results) if r.timed_out]
        assert 70 in late and len(late) <= 64 and set(late) <= set(range(71 - 64, 71 + 64))
        assert all(r.value is not None for i, r in enumerate(results) if i not in late)
    assert max(counts) == 1


# ---- from outside ----


def test_processes_killed_from_outside(tmp_path):
    with watched(2) as (pool, _):
        pool.map(DO, [("value", 1)])
        meet(pool, tmp_path / "here", 2)
        for worker in pool.workers:  # at rest: nothing is lost
            os.kill(worker.process.pid, signal.SIGKILL)
        until(lambda: not any(alive(worker.process.pid) for worker in pool.workers))
        assert errors(pool.map(DO, [("value", 1)] * 20)) == [None] * 20

        def shoot():
            until(lambda: (tmp_path / "began").is_file())
            [pid] = [worker.process.pid for worker in pool.workers if 7 in worker.calls]
            os.kill(pid, signal.SIGKILL)

        (thread := threading.Thread(target=shoot)).start()
        calls = [("value", 1)] * 20
        calls[7] = ("deaf", str(tmp_path / "began"))
        results = pool.map(DO, calls)
        thread.join()
        assert [i for i, r in enumerate(results) if r.error] == [7]
        assert "SIGKILL" in results[7].error and not results[7].timed_out


def test_an_interrupted_map_leaves_no_answers_for_the_next():
    def interrupt(*_):
        raise KeyboardInterrupt

    with watched(2) as (pool, _):
        pool.map(DO, [("value", 0)] * 4)
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                pool.map(DO, [("value", 100 + i) for i in range(20)] + [("alarm",)] + [("value", 200)] * 20)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert [r.value for r in pool.map(DO, [("value", i) for i in range(20)])] == list(range(20))


def test_processes_end_with_a_parent_that_is_killed(tmp_path):
    """In the middle of C code that keeps the GIL, of a wait, at rest; also if a fork of the parent lives on."""
    files = [tmp_path / name for name in ("power", "deaf")]
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.rewards.pool import Pool
pool = Pool(3, 9999.0)
pool.start()
if os.fork() == 0: time.sleep(9999)
pool.map({DO!r}, [("value", 1), ("power", {str(files[0])!r}), ("deaf", {str(files[1])!r})])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE) as parent:
        until(lambda: all(file.is_file() for file in files))
        children = descendants(parent.pid)
        workers = [p for p in children if "rewards/worker.py" in open(f"/proc/{p}/cmdline").read()]
        [other] = set(children) - set(workers)
        parent.kill()
        try:
            until(lambda: not any(map(alive, workers)))
        finally:
            kill(other, *workers)
    assert len(workers) == 3
