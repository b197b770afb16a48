"""Workers: loaded functions, limits, errors and concurrent answers."""

import json
import mmap
import os
import re
import resource
import socket
import subprocess
import sys
import threading

import pytest
from helpers import PATIENCE

from common.rewards import old_worker as worker
from common.rewards.old_worker import limit_memory, load, one_line
from common.rewards.result import Result
from tests.rewards.pools import DO, USER_FILE, WAIT, errors, opened, watched

REFUSE = f"{USER_FILE}:refuse_async"


# ---- parts ----


def test_function_is_loaded_and_prepared_once(tmp_path):
    (tmp_path / "a.py").write_text(
        "count = 0\ndef f(): return count\ndef g(): return count\n"
        "def prepare():\n    global count\n    count += 1\nf.prepare = prepare"
    )
    target = str(tmp_path / "a.py")
    for _ in range(2):
        assert load(f"{target}:f")() == load(f"{target}:g")() == 1
    assert load("math:sqrt")(9) == 3
    with pytest.raises(AttributeError):
        load("math:nothing")


class Silent(Exception):
    def __str__(self):
        raise self


@pytest.mark.parametrize("error, line", [
    (ValueError("one\ntwo"), "ValueError: one"), (ValueError("\n one\n"), "ValueError: one"),
    (KeyError(), "KeyError"), (KeyError("x"), "KeyError: 'x'"),
    (Silent(), "Silent: (its text cannot be had)"), (OSError("x" * 999), "OSError: " + "x" * 500),
])  # fmt: skip
def test_errors_are_formatted_on_one_line(error, line):
    assert one_line(error) == line


def test_memory_limit_is_added_to_the_present_use():
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        limit_memory(0.5)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            mmap.mmap(-1, 1 << 30)
        limit_memory(4)
        mmap.mmap(-1, 1 << 30).close()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_server_ends_if_its_parent_died_before_it_started():
    """A fork of the parent may hold the connection open."""
    ours, theirs = socket.socketpair()
    setup = dict(
        path=sys.path,
        control=theirs.fileno(),
        parent=os.getppid(),
        target=DO,
        shared=False,
        memory_gib=1,
    )
    line = [
        sys.executable,
        worker.__file__,
        json.dumps(setup | dict(grace=0.0)),
    ]  # its parent is this process
    with ours, theirs:
        assert subprocess.run(line, pass_fds=[theirs.fileno()], timeout=PATIENCE).returncode == 0


# ---- calls ----


def test_exception_of_a_function_is_reported_on_one_line():
    calls = [
        "recurse",
        "leave_politely",
        "interrupt",
        "refuse",
        "lines",
        "function",
        "mine",
        "nothing",
    ]
    with watched(DO, 1) as (pool, _):
        results = pool.map(
            [(call,) for call in calls] + [("value", threading.Lock()), ("value", 3)]
        )
        texts = [
            "RecursionError: maximum", "SystemExit: 5", "KeyboardInterrupt",
            "Refuses: (its text cannot be had)", "ValueError: one",
            "the result cannot be pickled: ", "the result cannot be unpickled: ",
            "KeyError: 'nothing'", "ValueError: the call cannot be pickled: TypeError",
        ]  # fmt: skip
        for error, text in zip(errors(results), texts, strict=False):
            assert error.startswith(text) and "\n" not in error
        assert results[-1] == Result(3) and not any(r.timed_out for r in results)
        assert len({r.value for r in pool.map([("pid",)] * 3)}) == 1 and len(pool.processes) == 1


def test_memory_is_limited():
    with watched(DO, 1, memory_gib=0.5) as (pool, _):
        error, none = errors(pool.map([("hoard",), ("value", 1)]))
        assert re.fullmatch(r"MemoryError \(line \d+\)", error) and none is None


def test_output_and_children_do_not_affect_answers(capfd):
    with watched(DO, 1) as (pool, _):
        results = pool.map([("say", "hello"), ("fork",), ("value", 1)] * 3)
        assert [r.value for r in results] == ["", 1, 1] * 3
    out, err = capfd.readouterr()
    assert out == "" and err.count("hello") == 3 and err.count("directly") == 3


def test_output_controls_no_terminal_in_any_encoding(capfd, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with watched(DO, 1) as (pool, _):
        assert errors(pool.map([("say", "\x1b[2J⟦")])) == [None]
    assert r"\x1b[2J\u27e6" in capfd.readouterr().err


@pytest.mark.parametrize("line", [b"x" * 2**16, b"x" * 63 + b"\n"], ids=["one line", "many lines"])
def test_output_is_bounded(line, capfd):
    with opened(DO, 2) as pool:
        assert errors(pool.map([("flood", line), ("say", "hello")])) == [None, None]
    err = capfd.readouterr().err
    assert 2**20 <= len(err) < 2**20 + 300
    assert err.endswith(f"\n{DO}: printed 1 MiB, the rest is dropped; write to a file\n")


def test_worker_imports_little_and_finds_the_modules_of_the_parent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/some/folder")
    (tmp_path / "here.py").write_text("def three(): return 3\n")
    with watched(DO, 1) as (pool, _):
        torch, path, cwd, session, modules = pool.map([("where",)])[0].value
        assert path == [*sys.path, str(USER_FILE.parent)]
        assert not torch and cwd == str(tmp_path) and session != os.getsid(0) and not modules
    with opened("here.py:three", 1) as pool:
        assert pool.map([()])[0].value == 3


def test_workers_draw_different_random_numbers(tmp_path):
    code = (
        "import numpy.random, random, time\ndef f(name):\n    time.sleep(0.01)\n"
        "    return eval(name).random()"
    )
    (tmp_path / "draw.py").write_text(code)
    with opened(f"{tmp_path}/draw.py:f", 3, shared=True) as pool:
        for name in ("numpy.random", "random"):
            assert len({result.value for result in pool.map([(name,)] * 60)}) == 60


# ---- async ----


def test_async_calls_run_together_in_one_process():
    with watched(WAIT, 3) as (pool, _):
        results = [r.value for r in pool.map([(0.0, "meet", 64)] * 64 + [(0.0,)] * 36)]
        most, loops, pids = max(r[1] for r in results), results[-1][2], {r[3] for r in results}
        assert most == 64 and loops == 1 and len(pids) == 1
        assert pool.map([(0.0,)])[0].value[1:] == (
            64,
            1,
            *pids,
        )  # the loop stays, with the clients that are tied to it


@pytest.mark.slow
def test_async_calls_fail_separately():
    with opened(WAIT, 2, 1.5) as pool:
        results = pool.map(
            [(0.0,), (9999.0,), (0.0, "own"), (0.0, "exit"), (0.0,), (0.0, "stubborn"), (0.0,)]
        )
        late, missing = "no answer within 1.5 s", None
        assert [error and re.sub(r" \(line \d+\)$", "", error) for error in errors(results)] == [
            missing, late, "TimeoutError: from a server", "SystemExit: mine", missing, late, missing
        ]  # fmt: skip
        assert [r.timed_out for r in results] == [False, True, False, False, False, True, False]
        pid = pool.map([(0.0,)])[0].value[3]
        assert (
            pool.map([(9999.0,)])[0].timed_out and pool.map([(0.0,)])[0].value[3] == pid
        )  # cancelled, not killed
    with opened(REFUSE, 2, 1.5) as pool:
        (error,) = errors(pool.map([()]))
        assert re.fullmatch(r"Refuses: \(its text cannot be had\) \(line \d+\)", error)
