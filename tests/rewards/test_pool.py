"""The pool of processes: functions that hang, crash, print, fork, block, and a parent that dies."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import ROOT, descendants

from common.rewards.pool import Pool

USER_FILE = '''
import asyncio, ctypes, os, signal, sys, threading, time


class Refuses(BaseException):
    def __str__(self): raise ValueError("no text")


class Mine: pass


def do(what, *arguments):
    """Python, with `what` to say how."""
    return globals()[what](*arguments)


def value(x): return x
def size(row): return len(row["text"])
def spin():
    while True: pass
def power(): return 3 ** (10**9) % 7  # C code that keeps the GIL and looks at no signal
def deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM): signal.signal(number, signal.SIG_IGN)
    time.sleep(100)
def spawn(path):
    import subprocess
    child = subprocess.Popen(["sleep", "100"])
    open(path, "w").write(str(child.pid))
    time.sleep(100)
def leave(code): os._exit(code)
def quit(): sys.exit(5)
def segfault(): ctypes.string_at(0)
def kill(): os.kill(os.getpid(), signal.SIGKILL)
def close_all(): os.closerange(0, 1000); return 1
def recurse(): return recurse()
def interrupt(): raise KeyboardInterrupt
def refuse(): raise Refuses
def lines(): raise ValueError("one\\ntwo")
def function(): return lambda: 0
def mine(): return Mine()
def hoard(): return len([bytearray(2**20) for _ in range(2000)])
def fork(): os.fork(); return 1
def say(text):
    print(text); sys.stdout.buffer.write(b"bytes" * 1000); os.write(1, b"directly"); return sys.stdin.read()
def pid(seconds): time.sleep(seconds); return os.getpid()
def where():
    return "torch" in sys.modules, sys.path, os.getcwd(), os.getsid(0), sorted(m for m in sys.modules if "common" in m)


running, most, loops = 0, 0, set()


async def wait(seconds, how="sleep"):
    global running, most
    running, most = running + 1, max(most, running + 1)
    try:
        loops.add(asyncio.get_running_loop())
        if how == "block": time.sleep(seconds)
        if how == "own": raise TimeoutError("from a server")
        if how == "exit": raise SystemExit("mine")
        if how == "stubborn":
            for _ in range(100):
                try: await asyncio.sleep(seconds)
                except asyncio.CancelledError: pass
        await asyncio.sleep(seconds)
        return seconds, most, len(loops), os.getpid()
    finally:
        running -= 1


async def refuse_async(): raise Refuses
'''


@pytest.fixture(scope="module")
def do(tmp_path_factory) -> str:
    (file := tmp_path_factory.mktemp("user") / "mine.py").write_text(USER_FILE)
    return f"{file}:do"


@contextmanager
def watched(*arguments, **named):
    """A pool, and a list of how many processes it has had, looked at every 10 ms. None is left at the end."""
    before, counts, done = set(descendants(os.getpid())), [], threading.Event()

    def watch():
        while not done.wait(0.01):
            counts.append(len(set(descendants(os.getpid())) - before))

    (thread := threading.Thread(target=watch)).start()
    try:
        with Pool(*arguments, **named) as pool:
            yield pool, counts
    finally:
        done.set()
        thread.join()
    assert not set(descendants(os.getpid())) - before


def errors(results) -> list[str | None]:
    return [result.error for result in results]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


# ---- values and errors ----


def test_values_come_in_order_from_all_processes(do):
    with watched(3, 20.0) as (pool, counts):
        results = pool.map(do, [("value", i) for i in range(500)])
        assert [r.value for r in results] == list(range(500)) and not any(errors(results))
        assert len({r.value for r in pool.map(do, [("pid", 0.02)] * 30)}) == 3
        assert pool.map(do, []) == [] and [r.value for r in pool.map("math:sqrt", [(9,), (4,)])] == [3, 2]
    assert max(counts) == 3


def test_what_a_function_raises_is_one_line(do):
    calls = ["recurse", "quit", "interrupt", "refuse", "lines", "function", "mine", "nothing"]
    with watched(1, 20.0) as (pool, counts):
        results = pool.map(do, [(call,) for call in calls] + [("value", threading.Lock()), ("value", 3)])
        texts = [
            "RecursionError: maximum", "SystemExit: 5", "KeyboardInterrupt", "Refuses: (its text cannot be had)",
            "ValueError: one", "the result cannot be pickled: ", "the result cannot be unpickled: ",
            "KeyError: 'nothing'", "the call cannot be pickled: TypeError",
        ]  # fmt: skip
        for error, text in zip(errors(results), texts, strict=False):
            assert error.startswith(text) and "\n" not in error
        assert results[-1] == (3, None, False) and not any(r.timed_out for r in results)
        pid = pool.workers[0].process.pid
        assert pool.map(do, [("value", 1)])[0].value == 1 and pool.workers[0].process.pid == pid  # the same one still


@pytest.mark.parametrize(
    "how, text",
    [(("leave", 3), "exit 3"), (("leave", 0), "exit 0"), (("segfault",), "SIGSEGV"), (("kill",), "SIGKILL"),
     (("close_all",), "lost its connection")],
)  # fmt: skip
def test_a_process_that_dies_loses_its_call_alone(do, how, text):
    with watched(2, 20.0) as (pool, counts):
        for _ in range(2):
            calls = [("value", i) for i in range(60)]
            calls[20] = calls[21] = calls[59] = how
            results = pool.map(do, calls)
            assert {i for i, r in enumerate(results) if r.error} == {20, 21, 59}
            assert all(text in results[i].error and not results[i].timed_out for i in (20, 21, 59))
            assert all(r.value == i for i, r in enumerate(results) if not r.error)
    assert max(counts) <= 2


def test_memory_is_limited(do):
    with watched(1, 20.0, memory_gib=0.5) as (pool, _):
        assert errors(pool.map(do, [("hoard",), ("value", 1)])) == ["MemoryError", None]


def test_output_and_children_do_not_disturb(do, capfd):
    with watched(1, 20.0) as (pool, _):
        results = pool.map(do, [("say", "hello"), ("fork",), ("value", 1)] * 3)
        assert [r.value for r in results] == ["", 1, 1] * 3
    out, err = capfd.readouterr()
    assert out == "" and err.count("hello") == 3 and err.count("directly") == 3


def test_a_process_is_light_and_finds_the_parents_modules(do, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/some/folder")
    (tmp_path / "here.py").write_text("def three(): return 3\n")
    with Pool(1, 20.0) as pool:
        torch, path, cwd, session, modules = pool.map(do, [("where",)])[0].value
        assert not torch and path == sys.path and cwd == str(tmp_path) and session != os.getsid(0) and not modules
        assert pool.map("here.py:three", [()])[0].value == 3


# ---- deadlines ----


@pytest.mark.parametrize("how", ["spin", "power", "deaf"])
def test_what_hangs_is_killed_alone(do, how):
    calls = [("value", i) for i in range(80)]
    calls[10] = calls[11] = calls[79] = (how,)
    with watched(2, 0.6) as (pool, counts):
        start = time.monotonic()
        results = pool.map(do, calls)
        assert time.monotonic() - start < 10
        assert {i for i, r in enumerate(results) if r.timed_out} == {10, 11, 79}
        assert all(r.error == "no answer within 0.6 s" for r in results if r.timed_out)
        assert all(r.value == i for i, r in enumerate(results) if not r.timed_out)
    assert max(counts) == 2


def test_each_call_has_a_clock_of_its_own(do):
    """What was sent ahead waits longer than the deadline, and loses nothing by it."""
    with Pool(1, 0.6) as pool:
        results = pool.map(do, [("pid", 0.2)] * 8)
        assert not any(errors(results)) and len({r.value for r in results}) == 1


def test_a_slow_parent_costs_no_call(do, monkeypatch):
    """An answer that lies there when the parent comes back is an answer."""
    pool, feed = Pool(1, 0.5), Pool._feed
    monkeypatch.setattr(
        Pool, "_feed", lambda self: (feed(self), any(w.calls for w in self.workers) and time.sleep(0.7))
    )
    with pool:
        assert errors(pool.map(do, [("value", 1)] * 3)) == [None] * 3


def test_children_of_what_hangs_end_too(do, tmp_path):
    with Pool(1, 0.5) as pool:
        assert pool.map(do, [("spawn", str(tmp_path / "pid"))])[0].timed_out
        assert gone(int((tmp_path / "pid").read_text()))


def test_large_rows_do_not_block_the_parent(do):
    """A process that hangs reads nothing: writing to it must not wait."""
    rows = [dict(text="x" * 20_000_000) for _ in range(6)]
    calls = [("spin",), *(("size", row) for row in rows), ("value", rows[0])]
    with Pool(1, 1.0) as pool:
        start = time.monotonic()
        results = pool.map(do, calls)
        assert time.monotonic() - start < 8
        assert [r.timed_out for r in results] == [True] + [False] * 7
        assert [r.value for r in results[1:7]] == [20_000_000] * 6 and results[7].value == rows[0]


def test_start_and_imports_are_off_the_clock(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time; time.sleep(1)\ndef f(x): return x\nf.prepare = lambda: time.sleep(0.5)"
    )
    with Pool(2, 0.4) as pool:
        assert [r.value for r in pool.map(f"{tmp_path}/slow.py:f", [(1,), (2,)])] == [1, 2]


@pytest.mark.parametrize(
    "code, text",
    [("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
     ("def f(:", "SyntaxError"), ("raise SystemExit('stop')", "SystemExit: stop"), ("x = 1", "AttributeError"),
     ("while True: pass", "not loaded within 1.5 s"), ("import os; os._exit(4)", "exit 4"),
     ("def f(): pass\ndef prepare(): raise OSError('no')\nf.prepare = prepare", "OSError: no")],
)  # fmt: skip
def test_a_file_that_cannot_be_loaded_is_an_error_of_every_call(do, tmp_path, code, text):
    (tmp_path / "bad.py").write_text(code)
    with watched(2, 20.0, start_timeout=1.5 if "while" in code else 20.0) as (pool, counts):
        start = time.monotonic()
        for error in errors(pool.map(f"{tmp_path}/bad.py:f", [()] * 100)):
            assert f"{tmp_path}/bad.py:f cannot be loaded: " in error and text in error
        assert time.monotonic() - start < 10  # once, not 100 times
        pool.start_timeout = 20.0
        assert pool.map(do, [("value", 1)] * 9)[8].value == 1
    assert max(counts) <= 2


def test_a_load_that_fails_late_is_no_matter_to_another_function(do, tmp_path):
    """The second process is still loading when the first has answered all."""
    code = "import os, time\nif os.path.exists(p := __file__ + 'x'): time.sleep(0.5); raise OSError\nopen(p, 'w')\n"
    (tmp_path / "once.py").write_text(code + "def f(): return 3")
    with Pool(2, 20.0) as pool:
        assert [r.value for r in pool.map(f"{tmp_path}/once.py:f", [()] * 30)] == [3] * 30
        assert not any(errors(pool.map(do, [("pid", 0.1)] * 30)))


# ---- async ----


def test_async_calls_run_together_in_one_process(do):
    target = do.replace(":do", ":wait")
    with watched(3, 5.0) as (pool, _):
        pool.start()
        start = time.monotonic()
        results = [r.value for r in pool.map(target, [(0.3,)] * 100)]
        assert time.monotonic() - start < 5  # 30 s one after the other
        most, loops, pids = max(r[1] for r in results), results[-1][2], {r[3] for r in results}
        assert most == 64 and loops == 1 and len(pids) == 1
        assert pool.map(target, [(0,)])[0].value[2] == 1  # the loop stays, with what is tied to it
        assert pool.map(do, [("value", 3)])[0].value == 3  # and another function takes its place
        assert pool.map(target, [(0.1,)])[0].value[1:3] == (64, 1)  # the file is not loaded anew, nor the loop


def test_async_calls_fail_alone(do):
    target = do.replace(":do", ":wait")
    with watched(2, 0.8) as (pool, _):
        results = pool.map(target, [(0.01,), (50,), (0, "own"), (0, "exit"), (0.02,), (30, "stubborn"), (0.03,)])
        late, missing = "no answer within 0.8 s", None
        assert errors(results) == [
            missing, late, "TimeoutError: from a server", "SystemExit: mine", missing, late, missing
        ]  # fmt: skip
        assert [r.timed_out for r in results] == [False, True, False, False, False, True, False]
        pid = pool.map(target, [(0,)])[0].value[3]
        assert pool.map(target, [(50,)])[0].timed_out and pool.workers[0].process.pid == pid  # cancelled, not killed
        assert errors(pool.map(do.replace(":do", ":refuse_async"), [()])) == ["Refuses: (its text cannot be had)"]


def test_a_blocked_event_loop_is_killed(do):
    """What ran beside it is late too; what was answered before, or is sent afterwards, is not."""
    calls = [(0.01,)] * 70 + [(100, "block")] + [(0.1,)] * 130
    with watched(2, 0.8) as (pool, counts):
        start = time.monotonic()
        results = pool.map(do.replace(":do", ":wait"), calls)
        assert time.monotonic() - start < 8
        late = [i for i, r in enumerate(results) if r.timed_out]
        assert 70 in late and 1 <= len(late) <= 64 and min(late) >= 7 and max(late) < 70 + 64
        assert all(r.value is not None for i, r in enumerate(results) if i not in late)
    assert max(counts) == 1


# ---- from outside ----


def test_processes_killed_from_outside(do):
    with watched(2, 20.0) as (pool, _):
        pool.start()
        assert len(pool.workers) == 2
        pool.map(do, [("pid", 0.01)] * 20)
        for worker in pool.workers:  # at rest: nothing is lost
            os.kill(worker.process.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert errors(pool.map(do, [("value", 1)] * 20)) == [None] * 20
        timer = threading.Timer(0.4, lambda: os.kill(pool.workers[0].process.pid, signal.SIGKILL))
        timer.start()
        lost = [r for r in pool.map(do, [("pid", 0.1)] * 20) if r.error]
        timer.join()
        assert len(lost) == 1 and "SIGKILL" in lost[0].error and not lost[0].timed_out


def test_an_interrupted_map_leaves_no_answers_for_the_next(do):
    def interrupt(*_):
        raise KeyboardInterrupt

    with watched(2, 20.0) as (pool, _):
        pool.map(do, [("value", 0)] * 4)
        old = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.map(do, [("pid", 0.1)] * 40)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert [r.value for r in pool.map(do, [("value", i) for i in range(20)])] == list(range(20))


def test_processes_end_with_a_parent_that_is_killed(do):
    """In the middle of C code that keeps the GIL, of a wait, at rest; also if a fork of the parent lives on."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.rewards.pool import Pool
pool = Pool(3, 100.0)
pool.start()
if os.fork() == 0: time.sleep(100)
print(flush=True)
pool.map({do!r}, [("value", 1), ("power",), ("deaf",)])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    parent.stdout.readline()
    time.sleep(1)
    children = descendants(parent.pid)
    workers = [p for p in children if b"rewards/process.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    others = set(children) - set(workers)
    assert len(workers) == 3 and len(others) == 1
    parent.kill()
    parent.wait()
    assert gone(*workers)
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def test_sizes_must_be_positive():
    for arguments in ((0, 1), (1, 0), (1, float("nan")), (1, 1, 0), (1, 1, 1, -1)):
        with pytest.raises(ValueError, match="positive"):
            Pool(*arguments)
