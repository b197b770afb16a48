"""Pools of processes: order of the answers, deadlines, deaths, and a killed parent."""

import asyncio
import re
import subprocess
import sys

import pytest
from helpers import PATIENCE, PIPE, ROOT, alive, descendants, kill, until

from common.rewards.processes import Pool
from common.rewards.result import Result
from tests.rewards.pools import DO, WAIT, Mapper, errors, opened, watched

pytestmark = pytest.mark.slow  # processes


def meet(pool: Mapper, folder, size: int) -> None:
    """All processes of the pool run at the same time."""
    folder.mkdir()
    assert len({r.value for r in pool.map([("meet", str(folder), size)] * size)}) == size


# ---- values ----


def test_values_come_in_order_from_all_processes(tmp_path):
    with watched(DO, 3) as (pool, counts):
        results = pool.map([("value", i) for i in range(500)])
        assert [r.value for r in results] == list(range(500)) and not any(errors(results))
        meet(pool, tmp_path / "here", 3)
        assert pool.map([]) == []
    assert max(counts) == 3
    with opened("math:sqrt", 1) as pool:
        assert [r.value for r in pool.map([(9,), (4,)])] == [3, 2]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how", [("leave", 3), ("leave", 0), ("segfault",), ("kill",),
    ("close_all",)])  # fmt: skip
def test_dying_process_loses_only_its_call(how, shared, tmp_path):
    with watched(DO, 2, shared=shared) as (pool, _):
        calls = [("value", i) for i in range(60)]
        calls[20] = calls[21] = calls[59] = how
        results = pool.map(calls)
        assert {i: r.error for i, r in enumerate(results) if r.error} == dict.fromkeys(
            (20, 21, 59), "the process died"
        )
        assert all(r.value == i for i, r in enumerate(results) if not r.error)
        meet(pool, tmp_path / "here", 2)


# ---- deadlines ----


def test_only_hanging_calls_are_killed(tmp_path):
    calls = [("value", i) for i in range(80)]
    hanging = {10: "spin", 11: "power", 40: "deaf", 79: "spin"}
    for i, how in hanging.items():
        calls[i] = (how,)
    with watched(DO, 2) as (pool, _):
        results = pool.map(calls, [0.6 if i in hanging else None for i in range(80)])
        assert {i for i, r in enumerate(results) if r.timed_out} == hanging.keys()
        assert all(r.error == "no answer within 0.6 s" for r in results if r.timed_out)
        assert all(r.value == i for i, r in enumerate(results) if not r.timed_out)
        meet(pool, tmp_path / "here", 2)


def test_deadline_uses_real_time():
    with watched(DO, 1, 0.2) as (pool, _):
        assert errors(pool.map([("spin",)])) == ["no answer within 0.2 s"]


@pytest.mark.parametrize("shared", [False, True])
def test_deadline_excludes_start_and_imports(shared, tmp_path):
    """Also after a call that was killed."""
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(3)\ndef f(hangs):\n    while hangs: pass"
    )
    with opened(f"{tmp_path}/slow.py:f", 1, 1.0, shared=shared) as pool:
        assert [r.timed_out for r in pool.map([(0,), (1,), (0,)])] == [False, True, False]


def test_large_rows_do_not_block_the_parent():
    """A hanging process reads nothing, so writing to it must not block."""
    rows = [dict(text="x" * 4_000_000) for _ in range(6)]
    calls = [("spin",), *(("size", row) for row in rows), ("value", rows[0])]
    with opened(DO, 1) as pool:
        results = pool.map(calls, [0.5, *[None] * 7])
        assert [r.timed_out for r in results] == [True] + [False] * 7
        assert [r.value for r in results[1:7]] == [4_000_000] * 6 and results[7].value == rows[0]


@pytest.mark.parametrize("shared", [False, True])
def test_children_of_calls_end_with_them_and_of_the_file_with_the_pool(shared, tmp_path):
    start = "subprocess.Popen(['sleep', '9999'], start_new_session=True)"
    (tmp_path / "start.py").write_text(
        f"import subprocess\nchild = {start}\ndef f():\n    return child.pid, {start}.pid"
    )
    with opened(f"{tmp_path}/start.py:f", 1, shared=shared) as pool:
        of_file, of_calls = zip(*(result.value for result in pool.map([()] * 3)), strict=True)
        assert len({*of_file}) == 1 and alive(of_file[0])
        assert len({*of_calls}) == 3 and not any(map(alive, of_calls))
    assert not alive(of_file[0])


@pytest.mark.parametrize("shared", [False, True])
def test_file_is_loaded_in_each_process_or_once_for_all(shared, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os\nready = []\ndef f(x): return x, ready\n"
        "f.prepare = lambda: ready.append(os.getpid())"
    )
    with opened(f"{tmp_path}/slow.py:f", 2, shared=shared) as mapper:
        ready = {tuple(result.value[1]) for result in mapper.map([(i,) for i in range(50)])}
        assert all(len(pids) == 1 for pids in ready)
        assert (ready == {(mapper.pool.server.process.pid,)}) == shared


# ---- async ----


def test_async_calls_that_wait_go_to_a_process_together():
    """Each process keeps its event loop, with the clients that are tied to it."""
    with watched(WAIT, 2) as (pool, counts):
        results = [r.value for r in pool.map([(0.0, "meet", 64)] * 64)]
        assert max(r[1] for r in results) == 64 and len({r[3] for r in results}) == 1
        for _ in range(3):
            results = [r.value for r in pool.map([(0.0,)] * 100)]
            assert {r[2] for r in results} == {1} and len({r[3] for r in results}) <= 2
    assert max(counts) <= 2


def test_async_calls_fail_separately():
    with opened(WAIT, 2, 2.0) as pool:
        calls = [(0.0,), (9999.0,), (0.0, "own"), (0.0, "exit"), (0.0,)]
        results = pool.map(calls)
        late = "no answer within 2 s"
        assert [error and re.sub(r" \(line \d+\)$", "", error) for error in errors(results)] == [
            None, late, "TimeoutError: from a server", "SystemExit: mine", None
        ]  # fmt: skip
        assert [r.timed_out for r in results] == [False, True, False, False, False]
        pid = results[0].value[3]  # cancelled, not killed
        assert pool.map([(0.0,)])[0].value[3] == pid


@pytest.mark.parametrize("how", ["block", "stubborn", "kill"])
def test_async_calls_of_a_process_share_its_end(how, tmp_path):
    """Calls that were answered before or sent afterwards succeed; one that refuses to be cancelled
    costs no other."""
    with watched(WAIT, 1, 2.0) as (pool, _):
        assert errors(pool.map([(0.0,)] * 3)) == [None] * 3
        results = pool.map([(0.0,)] * 20 + [(0.0, how)] + [(0.0,)] * 100)
        end = "the process died" if how == "kill" else "no answer within 2 s"
        lost = [None] * 20 + [end] + [None] * 43 if how == "stubborn" else [end] * 64
        assert [r.error for r in results] == lost + [None] * 57
        assert errors(pool.map([(0.0,)] * 3)) == [None] * 3


def test_a_bad_async_call_costs_no_other_one_its_answer(tmp_path):
    """They run together: one returns what cannot be pickled, one cleans up for ever."""
    (tmp_path / "mixed.py").write_text("""
import asyncio
async def f(what):
    try:
        if what == "late": await asyncio.sleep(9999)
    finally:
        if what == "late": await asyncio.sleep(9999)
    return (lambda: 0) if what == "function" else what
""")
    with opened(f"{tmp_path}/mixed.py:f", 1, 2.0, is_async=True) as pool:
        calls = [("late",), (1,), ("function",), (2,)]
        for _ in range(2):
            late, one, function, two = pool.map(calls)
            assert late.timed_out and (one, two) == (Result(1), Result(2))
            assert "pickle" in function.error


def test_async_calls_have_the_longest_of_their_limits(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(x)\n    return x"
    )
    with opened(f"{tmp_path}/slow.py:f", 1, is_async=True) as pool:
        results = pool.map([(0.0,), (1.5,)], [1.0, PATIENCE])
    assert [result.value for result in results] == [0.0, 1.5]


def test_calls_end_if_no_process_can_start(monkeypatch):
    def fails(self):
        raise OSError("too many open files")

    with opened(WAIT, 1) as pool:
        monkeypatch.setattr("common.rewards.processes.ForkServer._start", fails)
        results = pool.map([(0.0,)] * 3)
    assert all("too many open files" in result.error for result in results)


# ---- external events ----


def test_externally_killed_processes_are_replaced(tmp_path):
    with watched(DO, 2) as (mapper, _):
        meet(mapper, tmp_path / "here", 2)
        server = mapper.pool.server
        for killed in (lambda: descendants(server.process.pid), lambda: [server.process.pid]):
            pids = killed()
            kill(*pids)  # idle: no call is lost
            until(lambda pids=pids: not any(map(alive, pids)))
            mapper.loop.run(asyncio.sleep(0.1))
            assert errors(mapper.map([("value", 1)] * 20)) == [None] * 20


def test_cancelled_calls_leave_no_answers_for_the_next():
    with watched(DO, 2) as (pool, _):
        pool.map([("value", 0)] * 4)
        calls = [("value", 100 + i) for i in range(20)] + [("spin",)] + [("value", 200)] * 20

        async def cancelled() -> None:
            await asyncio.wait_for(asyncio.gather(*(pool.pool.call(*call) for call in calls)), 1.0)

        with pytest.raises(TimeoutError):
            pool.loop.run(cancelled())
        assert [r.value for r in pool.map([("value", i) for i in range(20)])] == list(range(20))


def test_processes_end_after_their_parent_is_killed(tmp_path):
    """Processes are in C code that holds the GIL, in a wait, or idle, and have children; a fork of
    the parent may survive."""
    files = [tmp_path / name for name in ("power", "deaf", "spawn_and_hang")]
    code = f"""
import asyncio, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.rewards.processes import Pool
pool, loop = Pool({DO!r}, 4, 9999.0), asyncio.Runner()
async def call(calls): await asyncio.gather(*(pool.call(*call) for call in calls))
loop.run(call([("value", i) for i in range(100)]))
if os.fork() == 0: time.sleep(9999)
loop.run(call([(file.rpartition("/")[2], file) for file in {list(map(str, files))!r}]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE) as parent:
        until(lambda: all(file.is_file() for file in files) and files[2].read_text().endswith(" "))
        children = descendants(parent.pid)
        [other] = [
            pid for pid in children if code.encode() in open(f"/proc/{pid}/cmdline", "rb").read()
        ]
        parent.kill()
        try:
            until(lambda: not any(alive(pid) for pid in children if pid != other))
        finally:
            kill(*children)
    assert len(children) >= 6  # the other, the server, its forks, and a child of one


def test_at_least_one_process():
    with pytest.raises(ValueError):
        Pool(DO, -1, PATIENCE)
