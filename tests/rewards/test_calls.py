"""The handle of one forked process: values, errors, deadlines, deaths, and what is left behind."""

import asyncio
import os
import re
import threading
import time

import pytest
from helpers import PATIENCE, alive, descendants, until

from common.rewards.processes import ForkServer, Process
from common.rewards.result import Result
from common.rewards.worker import EACH
from tests.rewards.pools import DO, USER_FILE, WAIT

pytestmark = pytest.mark.slow  # processes
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


def ended(*pids: int) -> None:
    until(lambda: not any(map(alive, pids)))


@pytest.fixture
def server():
    """Return a function that makes a server. At the end no process is left."""
    before, servers = set(descendants(os.getpid())), []

    def make(target: str, **named) -> ForkServer:
        servers.append(ForkServer(target, **dict(shared=True) | named))
        return servers[-1]

    yield make
    for each in servers:
        each.close()
    assert not set(descendants(os.getpid())) - before


@pytest.fixture
def counter(server, tmp_path):
    (tmp_path / "env.py").write_text(f"FILE = {str(tmp_path / 'closed')!r}\n{ENVIRONMENT}")
    return server(f"{tmp_path}/env.py:Counter", grace=1.0)


def test_values_and_errors_of_a_function(server):
    async def main():
        process = Process(server(DO))
        assert await process.call(None, "value", 3, seconds=PATIENCE) == Result(3)
        for what, text in (
            ("recurse", "RecursionError: maximum"), ("leave_politely", "SystemExit: 5"),
            ("interrupt", "KeyboardInterrupt"), ("refuse", "Refuses: (its text cannot be had)"),
            ("lines", "ValueError: one"), ("nothing", "KeyError: 'nothing'"),
            ("function", "the result cannot be pickled: "),
            ("mine", "the result cannot be unpickled: "),
        ):  # fmt: skip
            result = await process.call(None, what, seconds=PATIENCE)
            assert result.error.startswith(text) and "\n" not in result.error
        error = (await process.call(None, threading.Lock(), seconds=1)).error
        assert error.startswith("the call cannot be pickled: ") and not process.closed
        assert (await process.call(None, "fork", seconds=PATIENCE)).value == 1
        large = "x" * 10_000_000
        assert (await process.call(None, "value", large, seconds=PATIENCE)).value == large
        process.close()
        assert (await process.call(None, "pid", seconds=1)).error == "the process has ended"

    asyncio.run(main())


def test_object_keeps_its_state_and_is_closed(counter, tmp_path):
    """In any event loop, many at a time."""

    async def play(number: int) -> None:
        process = Process(counter)
        values = [await process.call("add", number, seconds=PATIENCE) for _ in range(3)]
        assert [result.value[0] for result in values] == [number, 2 * number, 3 * number]
        process.close()
        ended(values[0].value[1])

    async def main():
        await asyncio.gather(*map(play, range(1, 5)))

    for _ in range(2):
        asyncio.run(main())
    assert (tmp_path / "closed").is_file()


def test_close_that_hangs_is_killed(counter, tmp_path):
    async def main():
        process = Process(counter)
        _, pid = (await process.call("add", 7, seconds=PATIENCE)).value
        process.close()
        ended(pid)

    asyncio.run(main())
    assert (tmp_path / "closed").read_text() == "7"


@pytest.mark.parametrize("how", ["spin", "power", "deaf", "spawn_and_hang"])
def test_late_process_is_killed_with_its_children(server, how, tmp_path):
    async def main():
        process = Process(server(DO))
        pid = (await process.call(None, "pid", seconds=PATIENCE)).value
        began = time.monotonic()
        result = await process.call(None, how, str(tmp_path / "pids"), seconds=3.0)
        assert result == Result(error="no answer within 3 s", timed_out=True)
        assert time.monotonic() - began < 30 and process.closed and process.loaded
        pids = [*map(int, (tmp_path / "pids").read_text().split())]
        assert len(pids) == (3 if how == "spawn_and_hang" else 1)
        ended(pid, *pids)

    asyncio.run(main())


def test_answer_that_a_busy_parent_has_not_read_is_not_late(server):
    """The engine runs for seconds between two turns of the loop."""

    async def main():
        process = Process(server(DO))
        await process.call(None, "pid", seconds=PATIENCE)
        call = asyncio.ensure_future(process.call(None, "value", "x" * 200_000, seconds=0.5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(3)
        assert len((await call).value) == 200_000 and not process.closed

    asyncio.run(main())


@pytest.mark.parametrize("how", ["leave", "segfault", "kill", "close_all"])
def test_death_is_an_error_of_the_call(server, how):
    async def main():
        process = Process(server(DO))
        arguments = (3,) if how == "leave" else ()
        result = await process.call(None, how, *arguments, seconds=PATIENCE)
        assert result == Result(error="the process died") and process.closed
        other = Process(process.server)
        assert (await other.call(None, "value", 1, seconds=PATIENCE)).value == 1
        os.kill(process.server.process.pid, 9)  # the next process starts it again
        process.server.process.wait()
        assert (await other.call(None, "value", 1, seconds=PATIENCE)).error == "the process died"
        assert (await Process(process.server).call(None, "pid", seconds=PATIENCE)).error is None

    asyncio.run(main())


def test_cancelled_call_ends_its_process_and_children(counter):
    async def main():
        process, idle = Process(counter), Process(counter)
        pids = (await process.call("child", seconds=PATIENCE)).value
        call = asyncio.ensure_future(process.call("hang", seconds=PATIENCE))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert process.closed
        ended(*pids)
        assert (await idle.call("add", 1, seconds=PATIENCE)).value[0] == 1
        pids = (await idle.call("child", seconds=PATIENCE)).value
        call = asyncio.ensure_future(idle.call("hang", seconds=PATIENCE))
        await asyncio.sleep(0.1)
        idle.close()  # while it runs
        assert (await call).error == "the process died"
        ended(*pids)

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("code, text", [
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("def f(:", "SyntaxError"), ("raise SystemExit('stop')", "SystemExit: stop"),
    ("x = 1", "AttributeError"), ("while True: pass", "not loaded within 1 s"),
    ("import os; os._exit(4)", "the process died"),
    ("def f(): pass\ndef prepare(): raise OSError('no')\nf.prepare = prepare", "OSError: no"),
])  # fmt: skip
def test_file_that_cannot_be_loaded_is_an_error_of_the_call(server, tmp_path, code, text, shared):
    (tmp_path / "bad.py").write_text(code)
    target = f"{tmp_path}/bad.py:f"

    async def main():
        seconds = 1.0 if "while" in code else PATIENCE
        process = Process(server(target, shared=shared), seconds)
        error = (await process.call(None, seconds=PATIENCE)).error
        assert error.startswith(f"{target} cannot be loaded: ") and text in error
        assert process.closed and not process.loaded

    asyncio.run(main())


def test_async_functions_time_out_by_themselves(server):
    async def main():
        process = Process(server(WAIT))
        calls = [(0.0,), (9999.0,), (0.0, "own"), (0.0, "exit"), (0.0,)]
        results = (await process.call(EACH, *calls, seconds=2.0)).value
        late = "no answer within 2 s"
        errors = [Result(*result).error for result in results]
        assert [error and re.sub(r" \(line \d+\)$", "", error) for error in errors] == [
            None, late, "TimeoutError: from a server", "SystemExit: mine", None
        ]  # fmt: skip
        pid = results[0][0][3]
        result = await process.call(None, 9999.0, seconds=0.5)
        assert result == Result(error="no answer within 0.5 s", timed_out=True)
        assert (await process.call(None, 0.0, seconds=PATIENCE)).value[3] == pid
        stopped = await process.call(None, 0.0, "stop", seconds=PATIENCE)  # the loop of the worker
        assert stopped.error == "RuntimeError: Event loop stopped before Future completed."
        assert (await process.call(None, 0.0, seconds=PATIENCE)).error is None
        blocked = await process.call(None, 0.0, "block", seconds=0.5)
        assert blocked.timed_out and process.closed

    asyncio.run(main())


def test_two_hundred_processes_at_once(server):
    async def main():
        one = server(f"{USER_FILE}:do")
        processes = [Process(one) for _ in range(200)]
        results = await asyncio.gather(*(p.call(None, "pid", seconds=PATIENCE) for p in processes))
        assert len({result.value for result in results}) == 200
        for process in processes:
            process.close()
        ended(*(result.value for result in results))

    asyncio.run(main())
