"""Workers: loaded functions, limits and errors."""

import json
import mmap
import os
import re
import resource
import socket
import subprocess
import sys

import pytest
from helpers import PATIENCE

from common.rewards import worker
from common.rewards.worker import limit_memory, load, one_line
from tests.rewards.pools import DO, USER_FILE, errors, opened, watched

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
        json.dumps(setup | dict(argument="null")),
    ]  # its parent is this process
    with ours, theirs:
        assert subprocess.run(line, pass_fds=[theirs.fileno()], timeout=PATIENCE).returncode == 0


# ---- calls ----


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
