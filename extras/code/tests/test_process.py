"""One confined process from its parent's view: start, limits, and an end that leaves nothing
behind."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import PATIENCE, PIPE, ROOT, Clock, alive, descendants, open_files, until

from extras.code.sandbox import process, program
from extras.code.sandbox.program import Limits, Program, ProgramError, run_program
from extras.code.tests import hostile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program.problem() is not None, reason=str(program.problem())),
]
LIMITS = Limits(seconds=PATIENCE)


# ---- start and time ----


def test_slow_start_does_not_count_as_program_time(monkeypatch):
    clock, start = Clock(monkeypatch, process, program), process.Child._start

    def slowly(*arguments):
        start(*arguments)
        clock.ahead += seconds

    monkeypatch.setattr(process.Child, "_start", slowly)
    seconds = process.START_SECONDS / 2
    outcome = run_program("print(1)", "", Limits(seconds=seconds / 2))
    assert outcome == program.Outcome("ok", "1\n") and outcome.seconds < seconds / 2
    seconds = process.START_SECONDS + 1
    with pytest.raises(
        RuntimeError, match="the interpreter for a program did not start: time limit"
    ):
        run_program("print(1)", "", LIMITS)


def test_outcome_reports_the_seconds_of_the_run(monkeypatch):
    clock, wait, started = (
        Clock(monkeypatch, process, program),
        process.Child.wait,
        time.monotonic(),
    )

    def slowly(child):
        clock.ahead += 7
        return wait(child)

    monkeypatch.setattr(process.Child, "wait", slowly)
    outcome = run_program("print(1)", "", LIMITS)
    assert 7 <= outcome.seconds < 7 + time.monotonic() - started


def test_missing_disk_or_descriptors_raise_a_runtime_error(monkeypatch):
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nothing/like/this")
        for run in (lambda: run_program("print(1)"), lambda: Program("x = 1")):
            with pytest.raises(
                RuntimeError, match="a program could not be started: .*nothing/like/this"
            ):
                run()
    kept = [os.dup(0)]
    while (
        kept[-1] != len(kept) + before - 2
    ):  # until no lower number is free: the limit is on numbers
        kept.append(os.dup(0))
    outcomes = []
    for room in range(1, 25):  # at any point where the descriptors run out
        resource.setrlimit(resource.RLIMIT_NOFILE, (kept[-1] + room, limits[1]))
        try:
            outcomes.append(run_program("print(1)", "", LIMITS).status)
        except RuntimeError as error:
            outcomes.append("Too many open files" in str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in kept:
        os.close(descriptor)
    room = outcomes.index("ok")
    assert 8 <= room and outcomes == [True] * room + ["ok"] * (24 - room)
    assert open_files() == before and not hostile.left_over()


# ---- limits ----


@pytest.mark.parametrize(
    "source, limits, status",
    [
        ("print(1)", {}, "ok"),
        ("1 / 0", {}, "exit code 1"),
        ("x = ", {}, "exit code 1"),
        ("import sys; sys.exit(3)", {}, "exit code 3"),
        ("import sys; sys.exit('sorry')", {}, "exit code 1"),
        ("import ctypes; ctypes.string_at(0)", {}, "killed by signal 11"),
        ("import time; time.sleep(9999)", dict(seconds=0.3), "time limit"),
        ("x = bytes(200 << 20)", dict(memory_mib=100), "memory limit"),
        ("x = bytes(200 << 20)", {}, "ok"),
        ("print('x' * 1001)", dict(output_bytes=1000), "output limit"),
        ("print('x' * 999)", dict(output_bytes=1000), "ok"),
        ("open('x', 'wb').write(bytes(3 << 20))", dict(file_mib=2), "exit code 1"),
        (
            "for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))\n"
            "import time; time.sleep(9999)",
            dict(disk_mib=5),
            "disk limit",
        ),
        (
            "for i in range(9): open(str(i), 'wb')\nimport time; time.sleep(9999)",
            dict(files=5),
            "disk limit",
        ),
    ],
)
def test_exceeded_limits_give_their_status(source, limits, status):
    assert run_program(source, "", Limits(**dict(seconds=PATIENCE) | limits)).status == status


def test_number_of_threads_is_limited():
    """With small stacks they stay below the memory limit. Python's threads need more, so the
    program creates them with raw calls."""
    source = """
import ctypes, time
libc = ctypes.CDLL(None)
attributes = ctypes.create_string_buffer(64)
libc.pthread_attr_init(attributes)
libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))
for _ in range(%d):
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), attributes, libc.pause, None)
time.sleep(%f)
print("done")
"""
    assert run_program(source % (200, 9999), "", LIMITS).status == "thread limit"
    assert run_program(source % (20, 0.2), "", LIMITS) == program.Outcome("ok", "done\n")


def test_unread_requests_end_at_the_deadline():
    with Program(
        "import time, threading\ndef f(x): time.sleep(9999)", Limits(seconds=2)
    ) as program:
        with pytest.raises(ProgramError, match="time limit"):
            program.call("f", ["x" * 5_000_000])
    with Program("import os\ndef f(x): os.closerange(3, 100)", LIMITS) as program:
        for _ in range(2):
            with pytest.raises(ProgramError):
                program.call("f", ["x"])


# ---- end ----


def test_many_runs_leave_nothing_behind():
    run_program("print(1)", "", LIMITS)
    before, threads = open_files(), len(os.listdir("/proc/self/task"))
    children = set(descendants(os.getpid()))  # of other tests
    for source in ("print(1)", "1 / 0", "import os; os.abort()", "while True: print(1)"):
        run_program(source, "x", Limits(seconds=PATIENCE, output_bytes=100))
        with (
            pytest.raises(ProgramError),
            Program(source, Limits(seconds=0.2 if "while" in source else PATIENCE)) as program,
        ):
            program.call("nothing")
    assert open_files() == before and len(os.listdir("/proc/self/task")) == threads
    assert set(descendants(os.getpid())) <= children
    assert not hostile.left_over()


def test_program_dies_with_its_parent(tmp_path):
    """A killed parent cannot clean up: the kernel ends the program."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
        "from extras.code.sandbox.program import *\n"
        "run_program(\"open('began', 'w')\\nwhile True: pass\", '', Limits(seconds=9999))"
    )
    environment = os.environ | dict(TMPDIR=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE, env=environment) as parent:
        until(lambda: any(tmp_path.glob("*/began")))
        programs = descendants(parent.pid)
        parent.kill()
    assert programs
    until(lambda: not any(map(alive, programs)))


def test_interrupted_runs_leave_nothing_behind(monkeypatch):
    """The interrupt is Ctrl-C while a program runs."""
    before = open_files()

    def interrupt(child):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.Child, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_program("while True: pass", "", LIMITS)
    assert open_files() == before and not hostile.left_over()


def test_programs_run_concurrently():
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(
            pool.map(lambda i: run_program("print(int(input()) * 2)", str(i), LIMITS), range(40))
        )
    assert [outcome.stdout for outcome in outcomes] == [f"{2 * i}\n" for i in range(40)]
