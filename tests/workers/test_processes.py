"""Processes that run a user's code: values, errors, deadlines, deaths, and what is left behind."""

import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import warnings
from subprocess import PIPE

import pytest
from helpers import ROOT
from processes import PATIENCE, alive, descendants, kill, until

from common.workers import pool as module
from common.workers import worker
from common.workers.pool import ForkServer, Process
from common.workers.worker import Result, load
from tests.workers.pools import DO, USER_FILE, WAIT, Mapper, opened

pytestmark = pytest.mark.slow  # processes
FORK = "os.fork() * 0 + 1"
ENVIRONMENT = """
import os, signal, subprocess, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
class Counter:
    def __len__(self): return 0
    def __init__(self): self.count = 0
    def add(self, number):
        self.count += number
        return self.count, os.getpid()
    def hang(self):
        time.sleep(9999)
    def child(self):
        return os.getpid(), subprocess.Popen(["sleep", "9999"], start_new_session=True).pid
    def close(self):
        open(FILE, "w").write(str(self.count))
        if self.count == 7: time.sleep(9999)
"""


def errors(results: list[Result]) -> list[str | None]:
    """Without the lines of the user's file."""
    return [result.error and re.sub(r" \(line \d+\)$", "", result.error) for result in results]


def meet(pool: Mapper, folder, size: int) -> None:
    """All processes of the pool run at the same time."""
    folder.mkdir()
    assert len({r.value for r in pool.map([("meet(*x)", (str(folder), size))] * size)}) == size


async def ask(process: Process, *call, seconds: float = PATIENCE) -> Result:
    return (await process.call_each([call], seconds))[0]


def ended(*pids: int) -> None:
    until(lambda: not any(map(alive, pids)))


@pytest.fixture(autouse=True)
def punctual(monkeypatch):
    """Late answers are waited for as long as a busy machine needs."""
    monkeypatch.setattr(module, "LATE", 0.2)


@pytest.fixture
def server():
    """Return a function that makes a server. At the end no process is left."""
    before, servers = set(descendants(os.getpid())), []

    def make(target: str, shared: bool = True) -> ForkServer:
        servers.append(ForkServer(target, shared=shared))
        return servers[-1]

    yield make
    for each in servers:
        each.close()
    assert not set(descendants(os.getpid())) - before


@pytest.fixture
def counter(server, tmp_path):
    (tmp_path / "env.py").write_text(f"FILE = {str(tmp_path / 'closed')!r}\n{ENVIRONMENT}")
    return server(f"{tmp_path}/env.py:Counter")


# ---- values and errors ----


def test_values_and_errors_of_a_function(server):
    async def main():
        process = Process(server(DO))
        assert await ask(process, "x", 3) == Result(3)
        for what, text in (
            ("recurse()", "RecursionError: maximum"), ("sys.exit(5)", "SystemExit: 5"),
            ("raises(KeyboardInterrupt)", "KeyboardInterrupt"),
            ("raises(Refuses)", "Refuses: (its text cannot be had)"),
            ("raises(ValueError('\\none\\ntwo'))", "ValueError: one"),
            ("raises(ValueError('x' * 999))", f"ValueError: {'x' * 500} ("),
            ("nothing", "NameError: name 'nothing' is not defined"),
            ("lambda: 0", "the result cannot be pickled: "),
            ("Mine()", "the result cannot be unpickled: "),
            ("len(bytes(8 * 2**30))", "MemoryError (line "),
        ):  # fmt: skip
            result = await ask(process, what)
            assert result.error.startswith(text) and "\n" not in result.error
        error = (await ask(process, threading.Lock())).error
        assert error.startswith("the call cannot be pickled: ") and not process.closed
        assert (await ask(process, FORK)).value == 1
        large = "x" * 10_000_000
        assert (await ask(process, "x", large)).value == large
        process.close()
        assert (await ask(process, "os.getpid()")).error == "the process died"

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("code, text", [
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("raise SystemExit('stop')", "SystemExit: stop"),
    ("x = 1", "AttributeError"), ("while True: pass", "no answer within 0.5 s"),
    ("import os; os._exit(4)", "the process died"),
    ("def f(): pass\ndef prepare(): raise OSError('no')\nf.prepare = prepare", "OSError: no"),
])  # fmt: skip
def test_file_that_cannot_be_loaded_is_an_error_of_the_call(server, tmp_path, code, text, shared):
    (tmp_path / "bad.py").write_text(code)
    target = f"{tmp_path}/bad.py:f"

    async def main():
        seconds = 0.5 if "while" in code else PATIENCE
        process = Process(server(target, shared), seconds)
        error = (await ask(process)).error
        assert error.startswith(f"{target} cannot be loaded: ") and text in error
        assert process.closed and not process.loaded

    asyncio.run(main())


def test_object_keeps_its_state_and_is_closed(counter, tmp_path):
    """In any event loop, many at a time. One that hangs in `close` is killed."""

    async def play(number: int) -> None:
        process = Process(counter)
        values = [await process.call("add", number, seconds=PATIENCE) for _ in range(2)]
        assert [result.value[0] for result in values] == [number, 2 * number]
        process.close()
        ended(values[0].value[1])

    async def main(*numbers):
        await asyncio.gather(*map(play, numbers))

    asyncio.run(main(1, 2, 3))
    asyncio.run(main(3.5))
    assert (tmp_path / "closed").read_text() == "7.0"


def test_two_hundred_processes_at_once(server):
    async def main():
        one = server(f"{USER_FILE}:do")
        processes = [Process(one) for _ in range(200)]
        results = await asyncio.gather(*(ask(process, "os.getpid()") for process in processes))
        assert len({result.value for result in results}) == 200
        for process in processes:
            process.close()
        ended(*(result.value for result in results))

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
def test_file_is_loaded_and_prepared_once_in_each_process_or_for_all(shared, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, random, numpy.random\nready = []\n"
        "def f(): return tuple(ready), random.random(), numpy.random.random()\n"
        "f.prepare = lambda: ready.append(os.getpid())"
    )
    target = f"{tmp_path}/slow.py:f"
    assert load(target) is load(target)
    with opened(target, 2, shared=shared) as mapper:
        values = [result.value for result in mapper.map([()] * 40)]
        ready, *draws = map(set, zip(*values, strict=True))
        assert all(len(pids) == 1 for pids in ready)
        assert (ready == {(mapper.pool.server.process.pid,)}) == shared
        assert [len(numbers) for numbers in draws] == [40, 40]  # processes draw different ones


# ---- deadlines ----


def test_only_hanging_calls_are_killed(tmp_path):
    calls = [("x", i) for i in range(40)]
    hanging = {10: "spin()", 11: "power()", 39: "deaf()"}
    for i, how in hanging.items():
        calls[i] = (how,)
    with opened(DO, 2) as pool:
        results = pool.map(calls, [0.3 if i in hanging else None for i in range(40)])
        assert {i for i, r in enumerate(results) if r.timed_out} == hanging.keys()
        assert all(r.error == "no answer within 0.3 s" for r in results if r.timed_out)
        assert all(r.value == i for i, r in enumerate(results) if not r.timed_out)
        meet(pool, tmp_path / "here", 2)


@pytest.mark.parametrize("shared", [False, True])
def test_deadline_excludes_start_and_imports(shared, tmp_path):
    """Also after a call that was killed."""
    (tmp_path / "slow.py").write_text(
        "import time\ntime.sleep(0.5)\ndef f(hangs):\n    while hangs: pass"
    )
    with opened(f"{tmp_path}/slow.py:f", 1, 0.3, shared=shared) as pool:
        assert [r.timed_out for r in pool.map([(0,), (1,), (0,)])] == [False, True, False]


def test_large_rows_do_not_block_the_parent():
    """A hanging process reads nothing, so writing to it must not block."""
    row = dict(text="x" * 4_000_000)
    calls = [("spin()",), *[("len(x['text'])", row)] * 3, ("x", row)]
    with opened(DO, 1) as pool:
        late, *sizes, same = pool.map(calls, [0.2, *[None] * 4])
    assert late.timed_out and sizes == [Result(4_000_000)] * 3 and same.value == row


def test_answer_that_a_busy_parent_has_not_read_is_not_late(server):
    """The engine runs for seconds between two turns of the loop."""

    async def main():
        process = Process(server(DO))
        await ask(process, "os.getpid()")
        call = asyncio.ensure_future(ask(process, "x", "x" * 200_000, seconds=0.1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.3)
        assert len((await call).value) == 200_000 and not process.closed

    asyncio.run(main())


# ---- deaths ----


@pytest.mark.parametrize("how, shared", [
    ("os._exit(3)", False), ("__import__('ctypes').string_at(0)", False),
    ("os.kill(os.getpid(), signal.SIGKILL)", True), ("os.closerange(0, 1000)", False),
])  # fmt: skip
def test_dying_process_loses_only_its_call(how, shared, tmp_path):
    with opened(DO, 2, shared=shared) as pool:
        calls = [("x", i) for i in range(40)]
        calls[20] = calls[21] = calls[39] = (how,)
        results = pool.map(calls)
        died = {i: "the process died" for i in (20, 21, 39)}
        assert {i: r.error for i, r in enumerate(results) if r.error} == died
        assert all(r.value == i for i, r in enumerate(results) if not r.error)
        meet(pool, tmp_path / "here", 2)


def test_externally_killed_processes_are_replaced(tmp_path):
    with opened(DO, 2) as mapper:
        meet(mapper, tmp_path / "here", 2)
        server = mapper.pool.server
        for killed in (lambda: descendants(server.process.pid), lambda: [server.process.pid]):
            pids = killed()
            kill(*pids)  # idle: no call is lost
            ended(*pids)
            mapper.loop.run(asyncio.sleep(0.1))
            assert errors(mapper.map([("x", 1)] * 20)) == [None] * 20


@pytest.mark.parametrize("how", ["power", "spawn_and_hang"])
def test_late_process_is_killed_with_its_children(server, how, tmp_path):
    async def main():
        process = Process(server(DO))
        pid = (await ask(process, "os.getpid()")).value
        result = await ask(process, f"{how}(x)", str(tmp_path / "pids"), seconds=0.5)
        assert result == Result(error="no answer within 0.5 s", timed_out=True)
        assert process.closed and process.loaded
        pids = [*map(int, (tmp_path / "pids").read_text().split())]
        assert len(pids) == (3 if how == "spawn_and_hang" else 1)
        ended(pid, *pids)

    asyncio.run(main())


def test_cancelled_or_closed_call_ends_its_process_and_children(counter):
    async def main():
        cancelled, closed = Process(counter), Process(counter)
        for process in (cancelled, closed):
            pids = (await process.call("child", seconds=PATIENCE)).value
            call = asyncio.ensure_future(process.call("hang", seconds=PATIENCE))
            await asyncio.sleep(0.1)
            if process is closed:
                process.close()
                assert (await call).error == "the process died"
            else:
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert process.closed
            ended(*pids)

    asyncio.run(main())


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


def test_cancelled_calls_leave_no_answers_for_the_next():
    with opened(DO, 2) as pool:
        pool.map([("x", 0)] * 4)
        calls = [("x", 100 + i) for i in range(20)] + [("spin()",)] + [("x", 200)] * 20

        async def cancelled() -> None:
            await asyncio.wait_for(asyncio.gather(*(pool.pool.call(*call) for call in calls)), 0.5)

        with pytest.raises(TimeoutError):
            pool.loop.run(cancelled())
        assert [r.value for r in pool.map([("x", i) for i in range(20)])] == list(range(20))


def test_calls_end_if_no_process_can_start(monkeypatch):
    def fails(self):
        raise OSError("too many open files")

    with opened(WAIT, 1) as pool:
        monkeypatch.setattr("common.workers.pool.ForkServer._start", fails)
        results = pool.map([(0.0,)] * 3)
    assert all("too many open files" in result.error for result in results)


def test_processes_end_after_their_parent_is_killed(tmp_path):
    """Processes are in C code that holds the GIL, in a wait, or idle, and have children; a fork of
    the parent may survive."""
    files = [tmp_path / name for name in ("power", "deaf", "spawn_and_hang")]
    code = f"""
import asyncio, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.workers.pool import Pool
pool, loop = Pool({DO!r}, 4, 9999.0), asyncio.Runner()
async def call(calls): await asyncio.gather(*(pool.call(*call) for call in calls))
loop.run(call([("x", i) for i in range(100)]))
if os.fork() == 0: time.sleep(9999)
loop.run(call([(file.rpartition("/")[2] + "(x)", file) for file in {list(map(str, files))!r}]))
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


def test_server_ends_if_its_parent_had_died_before():
    """Another process may hold the connection open."""
    ours, theirs = socket.socketpair()
    setup = dict(path=sys.path, control=theirs.fileno(), parent=os.getppid(), target=DO)
    words = [sys.executable, worker.__file__, json.dumps(setup | dict(shared=False, argument=""))]
    with ours, theirs:
        done = subprocess.run(words, pass_fds=[theirs.fileno()], timeout=PATIENCE)
    assert done.returncode == 0


# ---- async ----


def test_async_calls_that_wait_go_to_a_process_together():
    """Each process keeps its event loop, with the clients that are tied to it."""
    with opened(WAIT, 2) as pool:
        results = [r.value for r in pool.map([(0.0, "meet", 64)] * 64)]
        assert max(r[0] for r in results) == 64 and len({r[2] for r in results}) == 1
        for _ in range(3):
            results = [r.value for r in pool.map([(0.0,)] * 100)]
            assert {r[1] for r in results} == {1} and len({r[2] for r in results}) <= 2


def test_async_calls_fail_separately():
    """One returns what cannot be pickled, one cleans up for ever."""
    with opened(WAIT, 1, 0.4) as pool:
        hows = ["sleep", "late", "own", "exit", "function", "stubborn", "sleep"]
        late = "no answer within 0.4 s"
        results = pool.map([(0.0, how) for how in hows])
        found = errors(results)
        assert "pickle" in found.pop(4)
        own = "TimeoutError: from a server"
        assert found == [None, late, own, "SystemExit: mine", late, None]
        assert [r.timed_out for r in results] == [how in ("late", "stubborn") for how in hows]
        assert results[0].value[2] == pool.map([(0.0,)])[0].value[2]  # cancelled, not killed


@pytest.mark.parametrize("how", ["block", "kill"])
def test_async_calls_of_a_process_share_its_end(how):
    """Calls that were answered before or sent afterwards succeed."""
    with opened(WAIT, 1, 0.5) as pool:
        assert errors(pool.map([(0.0,)] * 3)) == [None] * 3
        results = pool.map([(0.0,)] * 20 + [(0.0, how)] + [(0.0,)] * 100)
        end = "the process died" if how == "kill" else "no answer within 0.5 s"
        assert [r.error for r in results] == [end] * 64 + [None] * 57


def test_async_calls_have_the_longest_of_their_limits():
    with opened(WAIT, 1) as pool:
        results = pool.map([(0.0,), (0.4,)], [0.2, PATIENCE])
    assert errors(results) == [None, None]


# ---- what a process sees ----


def test_output_and_forks_do_not_affect_answers(capfd, monkeypatch):
    """Nor does the encoding of the terminal."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with opened(DO, 1) as pool:
        results = pool.map([("say(x)", "hello⟦"), (FORK,), ("x", 1)] * 3)
        assert [r.value for r in results] == ["", 1, 1] * 3
    out, err = capfd.readouterr()
    assert out == "" and err.count(r"hello\u27e6") == 3 and err.count("directly") == 3


def test_worker_imports_little_and_finds_the_modules_of_the_parent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/some/folder")
    (tmp_path / "here.py").write_text("import beside\ndef three(): return beside.THREE\n")
    (tmp_path / "beside.py").write_text("THREE = 3\n")
    with opened(DO, 1) as pool:
        torch, path, cwd, session, modules = pool.map([("where()",)])[0].value
        assert path == [*sys.path, str(USER_FILE.parent)]
        assert not torch and cwd == str(tmp_path) and session != os.getsid(0) and not modules
    with opened("here.py:three", 1) as pool:
        assert pool.map([()])[0].value == 3


def test_a_process_that_is_dropped_has_closed_its_stream():
    """Else asyncio does so while the thread of the loop may be at it, and prints a traceback."""

    async def drop() -> None:
        process = Process(ForkServer(__name__ + ":errors", shared=True))
        await ask(process, [Result()])
        del process
        gc.collect()

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(drop())
    assert [each for each in warned if "StreamWriter" in str(each.message)] == []
