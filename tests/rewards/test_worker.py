"""What a process of the pool does: it loads functions, answers calls, and is in nobody's way."""

import mmap
import os
import resource
import socket
import subprocess
import sys
import threading

import pytest
from helpers import PATIENCE

from common.rewards import worker
from common.rewards.pool import Pool
from common.rewards.worker import limit_memory, load_function, one_line
from tests.rewards.pools import DO, USER_FILE, WAIT, errors, watched

REFUSE = f"{USER_FILE}:refuse_async"


# ---- what it is made of ----


def test_a_function_is_loaded_and_prepared_once(tmp_path):
    (tmp_path / "a.py").write_text("count = 0\ndef f(): return count\ndef g(): return count\n"
                                   "def prepare():\n    global count\n    count += 1\nf.prepare = prepare")  # fmt: skip
    target = str(tmp_path / "a.py")
    for _ in range(2):
        assert load_function(f"{target}:f")() == load_function(f"{target}:g")() == 1
    assert load_function("math:sqrt")(9) == 3
    with pytest.raises(AttributeError):
        load_function("math:nothing")


class Silent(Exception):
    def __str__(self):
        raise self


@pytest.mark.parametrize(
    "error, line",
    [(ValueError("one\ntwo"), "ValueError: one"), (ValueError("\n one\n"), "ValueError: one"), (KeyError(), "KeyError"),
     (KeyError("x"), "KeyError: 'x'"), (Silent(), "Silent: (its text cannot be had)"),
     (OSError("x" * 999), "OSError: " + "x" * 500)],
)  # fmt: skip
def test_one_line(error, line):
    assert one_line(error) == line


def test_the_limit_of_memory_is_beyond_what_is_in_use():
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        limit_memory(0.5)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            mmap.mmap(-1, 1 << 30)
        limit_memory(4)
        mmap.mmap(-1, 1 << 30).close()
        limit_memory(None)
        assert resource.getrlimit(resource.RLIMIT_AS)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_it_ends_if_its_parent_has_before_it_could_ask_to_be_told():
    """Somebody, a fork of the parent, may hold the connection open."""
    ours, theirs = socket.socketpair()
    line = [sys.executable, worker.__file__, str(theirs.fileno()), str(os.getppid())]  # not the process that starts it
    with ours, theirs:
        assert subprocess.run(line, pass_fds=[theirs.fileno()], timeout=PATIENCE).returncode == 0


# ---- calls ----


def test_what_a_function_raises_is_one_line():
    calls = ["recurse", "leave_politely", "interrupt", "refuse", "lines", "function", "mine", "nothing"]
    with watched(1) as (pool, counts):
        results = pool.map(DO, [(call,) for call in calls] + [("value", threading.Lock()), ("value", 3)])
        texts = [
            "RecursionError: maximum", "SystemExit: 5", "KeyboardInterrupt", "Refuses: (its text cannot be had)",
            "ValueError: one", "the result cannot be pickled: ", "the result cannot be unpickled: ",
            "KeyError: 'nothing'", "the call cannot be pickled: TypeError",
        ]  # fmt: skip
        for error, text in zip(errors(results), texts, strict=False):
            assert error.startswith(text) and "\n" not in error
        assert results[-1] == (3, None, False) and not any(r.timed_out for r in results)
        pid = pool.workers[0].process.pid
        assert pool.map(DO, [("value", 1)])[0].value == 1 and pool.workers[0].process.pid == pid  # the same one still


def test_memory_is_limited():
    with watched(1, memory_gib=0.5) as (pool, _):
        assert errors(pool.map(DO, [("hoard",), ("value", 1)])) == ["MemoryError", None]


def test_output_and_children_do_not_disturb(capfd):
    with watched(1) as (pool, _):
        results = pool.map(DO, [("say", "hello"), ("fork",), ("value", 1)] * 3)
        assert [r.value for r in results] == ["", 1, 1] * 3
    out, err = capfd.readouterr()
    assert out == "" and err.count("hello") == 3 and err.count("directly") == 3


def test_it_is_light_and_finds_the_parents_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/some/folder")
    (tmp_path / "here.py").write_text("def three(): return 3\n")
    with watched(1) as (pool, _):
        torch, path, cwd, session, modules = pool.map(DO, [("where",)])[0].value
        assert not torch and path == sys.path and cwd == str(tmp_path) and session != os.getsid(0) and not modules
        assert pool.map("here.py:three", [()])[0].value == 3


# ---- async ----


def test_async_calls_run_together_in_one_process():
    with watched(3) as (pool, _):
        pool.start()
        results = [r.value for r in pool.map(WAIT, [(0.0, "meet", 64)] * 64 + [(0.0,)] * 36)]
        most, loops, pids = max(r[1] for r in results), results[-1][2], {r[3] for r in results}
        assert most == 64 and loops == 1 and len(pids) == 1
        assert pool.map(WAIT, [(0.0,)])[0].value[2] == 1  # the loop stays, with what is tied to it
        assert pool.map(DO, [("value", 3)])[0].value == 3  # and another function takes its place
        assert pool.map(WAIT, [(0.0,)])[0].value[1:3] == (64, 1)  # the file is not loaded anew, nor the loop


@pytest.mark.slow
def test_async_calls_fail_alone():
    with Pool(2, 1.5) as pool:
        results = pool.map(WAIT, [(0.0,), (9999.0,), (0.0, "own"), (0.0, "exit"), (0.0,), (0.0, "stubborn"), (0.0,)])
        late, missing = "no answer within 1.5 s", None
        assert errors(results) == [
            missing, late, "TimeoutError: from a server", "SystemExit: mine", missing, late, missing
        ]  # fmt: skip
        assert [r.timed_out for r in results] == [False, True, False, False, False, True, False]
        pid = pool.map(WAIT, [(0.0,)])[0].value[3]
        assert pool.map(WAIT, [(9999.0,)])[0].timed_out and pool.workers[0].process.pid == pid  # cancelled, not killed
        assert errors(pool.map(REFUSE, [()])) == ["Refuses: (its text cannot be had)"]
