"""Pools of processes: order of the answers, deadlines, deaths, failing loads, and a killed
parent."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest
from helpers import PATIENCE, PIPE, ROOT, alive, descendants, kill, until

from common.rewards import old_processes as module
from common.rewards.old_processes import Pool, Process
from common.rewards.old_worker import LOADED
from tests.rewards.pools import DO, WAIT, StillClock, errors, opened, watched

pytestmark = pytest.mark.slow  # processes


def meet(pool: Pool, folder, size: int) -> None:
    """All processes of the pool run at the same time."""
    folder.mkdir()
    assert len({r.value for r in pool.map([("meet", str(folder), size)] * size)}) == size


# ---- values ----


def test_map_returns_values_in_order_from_all_processes(tmp_path):
    with watched(DO, 3) as (pool, counts):
        results = pool.map([("value", i) for i in range(500)])
        assert [r.value for r in results] == list(range(500)) and not any(errors(results))
        meet(pool, tmp_path / "here", 3)
        assert pool.map([]) == []
    assert max(counts) == 3
    with opened("math:sqrt", 1) as pool:
        assert [r.value for r in pool.map([(9,), (4,)])] == [3, 2]


def test_answer_to_no_question_ends_the_process():
    with opened(DO, 1) as pool:
        culprit, *others = pool.map([("scribble",), ("value", 1), ("value", 2)])
        assert culprit.error == "it wrote to a file that it had not opened"
        assert [result.value for result in others] == [1, 2]


def test_nonpositive_sizes_are_refused():
    for size, seconds, named in (
        (0, 1, {}),
        (1, 0, {}),
        (1, float("nan"), {}),
        (1, 1, dict(memory_gib=0)),
        (1, 1, dict(start_seconds=-1)),
    ):
        with pytest.raises(AssertionError, match="positive"):
            Pool(DO, size, seconds, **named)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("how, text", [
    (("leave", 3), "exit 3"), (("leave", 0), "exit 0"), (("segfault",), "SIGSEGV"),
    (("kill",), "SIGKILL"), (("close_all",), "it closed a file that it had not opened"),
])  # fmt: skip
def test_dying_process_loses_only_its_call(how, text, shared, tmp_path):
    with watched(DO, 2, shared=shared) as (pool, counts):
        calls = [("value", i) for i in range(60)]
        calls[20] = calls[21] = calls[59] = how
        results = pool.map(calls)
        assert {i for i, r in enumerate(results) if r.error} == {20, 21, 59}
        assert all(text in results[i].error and not results[i].timed_out for i in (20, 21, 59))
        assert all(r.value == i for i, r in enumerate(results) if not r.error)
        meet(pool, tmp_path / "here", 2)
    assert max(counts) == 2


# ---- deadlines ----


def test_only_hanging_calls_are_killed(monkeypatch, tmp_path):
    calls, hanging = (
        [("value", i) for i in range(80)],
        {10: "spin", 11: "power", 40: "deaf", 79: "spin"},
    )
    for i, how in hanging.items():
        calls[i] = (how,)
    with watched(DO, 2, 0.6) as (pool, counts):
        StillClock(monkeypatch, [pool], hanging)
        results = pool.map(calls)
        assert {i for i, r in enumerate(results) if r.timed_out} == hanging.keys()
        assert all(r.error == "no answer within 0.6 s" for r in results if r.timed_out)
        assert all(r.value == i for i, r in enumerate(results) if not r.timed_out)
        meet(pool, tmp_path / "here", 2)
    assert max(counts) <= 4  # a killed process may not have exited yet


def test_deadline_uses_real_time():
    with watched(DO, 1, 0.2) as (pool, _):
        assert errors(pool.map([("spin",)])) == ["no answer within 0.2 s"]


def test_call_may_have_a_separate_time_limit(monkeypatch):
    with opened(DO, 1, 10.0) as pool:
        StillClock(monkeypatch, [pool], {0, 2})
        results = pool.map([("spin",), ("value", 1), ("spin",)], [20.0, 1.0, 30.0])
        assert errors(results) == ["no answer within 20 s", None, "no answer within 30 s"]


def test_deadline_of_a_call_starts_with_the_call(monkeypatch):
    """A call that was queued early waits longer than the deadline and still succeeds."""
    with opened(DO, 1, 10.0) as pool:
        clock, messages = StillClock(monkeypatch, [pool], ()), Process._messages

        def slowly(process):
            for message in messages(process):
                yield message
                clock.ahead += 9

        monkeypatch.setattr(Process, "_messages", slowly)
        results = pool.map([("pid",)] * 8)
        assert not any(errors(results)) and len({r.value for r in results}) == 1
        assert clock.ahead == 9 * (1 + 8)  # the load, and the calls


def test_slow_parent_loses_no_call(monkeypatch):
    """An answer that arrived before the parent polls is valid."""
    with opened(DO, 1, 10.0) as pool:
        clock, send = StillClock(monkeypatch, [pool], ()), pool._send

        def slowly(*arguments):
            send(*arguments)
            for process in pool.processes:
                if process.asked:
                    select.select([process.socket], [], [], PATIENCE)
                    clock.ahead += 100

        monkeypatch.setattr(pool, "_send", slowly)
        assert errors(pool.map([("value", 1)] * 3)) == [None] * 3 and clock.ahead >= 200


def test_children_of_a_hanging_call_are_killed(monkeypatch, tmp_path):
    file = tmp_path / "pid"
    with opened(DO, 1, 10.0) as pool:
        StillClock(
            monkeypatch,
            [pool],
            {0},
            reached=lambda: file.is_file() and file.read_text().endswith(" "),
        )
        assert pool.map([("spawn_and_hang", str(file))])[0].timed_out
        until(lambda: not any(map(alive, map(int, file.read_text().split()))))


@pytest.mark.parametrize(
    "target, call", [(DO, ("spawn",)), (WAIT, (0.0, "spawn"))], ids=["sync", "async"]
)
def test_children_of_a_call_end_with_it(target, call):
    with opened(target, 1) as pool:
        for result in pool.map([call] * 2):
            assert len(result.value) == 3 and not any(map(alive, result.value))


@pytest.mark.parametrize("shared", [False, True])
def test_children_of_the_file_end_with_the_pool(shared, tmp_path):
    start = "subprocess.Popen(['sleep', '9999'], start_new_session=True)"
    (tmp_path / "start.py").write_text(
        f"import subprocess\nchild = {start}\ndef f():\n    {start}\n    return child.pid"
    )
    with opened(f"{tmp_path}/start.py:f", 1, shared=shared) as pool:
        [pid] = {result.value for result in pool.map([()] * 3)}
        assert alive(pid)
    assert not alive(pid)


def test_large_rows_do_not_block_the_parent(monkeypatch):
    """A hanging process reads nothing, so writing to it must not block."""
    rows = [dict(text="x" * 4_000_000) for _ in range(6)]
    calls = [("spin",), *(("size", row) for row in rows), ("value", rows[0])]
    with opened(DO, 1, 10.0) as pool:
        StillClock(monkeypatch, [pool], {0})
        results = pool.map(calls)
        assert [r.timed_out for r in results] == [True] + [False] * 7
        assert [r.value for r in results[1:7]] == [4_000_000] * 6 and results[7].value == rows[0]


# ---- loading ----

COUNTED = (
    "import os\nready = []\ndef f(x): return x, ready\n"
    "f.prepare = lambda: ready.append(os.getpid())"
)


def test_deadline_excludes_start_and_imports(monkeypatch, tmp_path):
    (tmp_path / "slow.py").write_text(COUNTED)
    with opened(f"{tmp_path}/slow.py:f", 1, 10.0, start_seconds=60) as pool:
        clock, messages = StillClock(monkeypatch, [pool], ()), Process._messages

        def slowly(process):
            for number, payload in messages(process):
                clock.ahead += 50 * (number == LOADED)
                yield number, payload

        monkeypatch.setattr(Process, "_messages", slowly)
        results = pool.map([(1,), (2,)])
        assert (
            [r.value[0] for r in results] == [1, 2]
            and not any(errors(results))
            and clock.ahead == 50
        )


@pytest.mark.parametrize("shared", [False, True])
def test_file_is_loaded_in_each_process_or_once_for_all(shared, tmp_path):
    (tmp_path / "slow.py").write_text(COUNTED)
    with opened(f"{tmp_path}/slow.py:f", 2, shared=shared) as pool:
        ready = {tuple(result.value[1]) for result in pool.map([(i,) for i in range(50)])}
        assert (
            all(len(pids) == 1 for pids in ready)
            and (ready == {(pool.server.process.pid,)}) == shared
        )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("code, text", [
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("def f(:", "SyntaxError"),
    ("raise SystemExit('stop')", "SystemExit: stop"),
    ("x = 1", "AttributeError"),
    ("while True: pass", "not loaded within 0.3 s"),
    ("import os; os._exit(4)", "the process died"),
    ("def f(): pass\ndef prepare(): raise OSError('no')\nf.prepare = prepare", "OSError: no"),
])  # fmt: skip
def test_unloadable_file_is_an_error_of_every_call(monkeypatch, tmp_path, code, text, shared):
    (tmp_path / "bad.py").write_text(code)
    target, started = f"{tmp_path}/bad.py:f", []
    monkeypatch.setattr(
        module, "Process", lambda *arguments: started.append(Process(*arguments)) or started[-1]
    )
    with watched(target, 2, shared=shared, start_seconds=0.3 if "while" in code else PATIENCE) as (
        pool,
        counts,
    ):
        for error in errors(pool.map([()] * 100)):
            assert error.startswith(f"{target} cannot be loaded: ") and text in error
        assert (
            len(started) == 3
        )  # not 100; and not 1, because another process may have been killed by it
    assert max(counts) <= 3


def test_late_load_failure_keeps_the_pool_running(tmp_path):
    """The second process is still loading when the first has answered all calls."""
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
    with opened(f"{tmp_path}/once.py:f", 2) as pool:
        assert [r.value for r in pool.map([()] * 30)] == [3] * 30
        assert [process.is_async for process in pool.processes] == [False, None]
        on.touch()
        select.select([pool.processes[1].socket], [], [], PATIENCE)
        assert [r.value for r in pool.map([()] * 30)] == [3] * 30


# ---- async ----


def test_blocked_event_loop_is_killed(monkeypatch, tmp_path):
    """Concurrent calls exceed the deadline too; calls that were answered before or sent afterwards
    succeed."""
    began = tmp_path / "began"
    calls = [(0.0,)] * 70 + [(0.0, "block", str(began))] + [(0.0,)] * 130
    with watched(WAIT, 2) as (pool, counts):
        StillClock(monkeypatch, [pool], {70}, reached=began.is_file)
        results = pool.map(calls)
        late = [i for i, r in enumerate(results) if r.timed_out]
        assert 70 in late and len(late) <= 64 and set(late) <= set(range(71 - 64, 71 + 64))
        assert all(r.value is not None for i, r in enumerate(results) if i not in late)
    assert max(counts) <= 2  # the killed process and the next one


# ---- external events ----


def workers(pool: Pool) -> list[int]:
    return descendants(pool.server.process.pid)


def test_externally_killed_processes_are_replaced(tmp_path):
    with watched(DO, 2) as (pool, _):
        meet(pool, tmp_path / "here", 2)
        for killed in (workers, workers, lambda pool: [pool.server.process.pid]):
            kill(*killed(pool))  # idle: no call is lost
            until(lambda: all([process.answers() or process.end for process in pool.processes]))
            assert errors(pool.map([("value", 1)] * 20)) == [None] * 20
        began = tmp_path / "began"

        def shoot():
            until(lambda: began.is_file() and began.read_text())
            os.kill(int(began.read_text()), signal.SIGKILL)

        (thread := threading.Thread(target=shoot)).start()
        calls = [("value", 1)] * 20
        calls[7] = ("deaf", str(began))
        results = pool.map(calls)
        thread.join()
        assert [i for i, r in enumerate(results) if r.error] == [7]
        assert "SIGKILL" in results[7].error and not results[7].timed_out


def test_interrupted_map_leaves_no_answers_for_the_next():
    def interrupt(*_):
        raise KeyboardInterrupt

    with watched(DO, 2) as (pool, _):
        pool.map([("value", 0)] * 4)
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                alarm = ("alarm", os.getpid())
                pool.map([("value", 100 + i) for i in range(20)] + [alarm] + [("value", 200)] * 20)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert [r.value for r in pool.map([("value", i) for i in range(20)])] == list(range(20))


def test_processes_end_after_their_parent_is_killed(tmp_path):
    """Processes are in C code that holds the GIL, in a wait, or idle, and have children; a fork of
    the parent may survive."""
    files = [tmp_path / name for name in ("power", "deaf", "spawn_and_hang")]
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.rewards.old_processes import Pool
pool = Pool({DO!r}, 4, 9999.0)
pool.map([("value", i) for i in range(100)])
if os.fork() == 0: time.sleep(9999)
pool.map([(file.rpartition("/")[2], file) for file in {list(map(str, files))!r}])
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
