# ruff: noqa: E501 (the programs)
"""Programs in the sandbox: hostile ones are confined (hostile.py), good ones run, limits hold, and
nothing is left behind."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from subprocess import PIPE

import pytest
from helpers import ROOT
from processes import PATIENCE, Clock, alive, descendants, open_files, until

from extras.code.sandbox import process, program
from extras.code.sandbox.program import Limits, Outcome, Program, ProgramError, run_program
from extras.code.tests import hostile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program.problem() is not None, reason=str(program.problem())),
]
LIMITS = Limits(seconds=PATIENCE)


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch, tmp_path):
    """Keep the folders of other test runs out of `hostile.left_over`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# ---- hostile programs ----


@pytest.fixture(scope="session")
def attacks() -> dict[str, list[str]]:
    return hostile.run_all(hostile.HOSTILE)


@pytest.mark.parametrize("name", [*hostile.HOSTILE, ""])
def test_hostile_program_is_confined(name, attacks):
    """The name "" stands for the state after all programs: nothing outside has changed, no files or
    processes are left, and a good program still runs."""
    assert attacks[name] == []


def test_hostile_programs_are_confined_for_an_ordinary_user():
    """Root has more rights, and is exempt from some limits. User 65534 runs the programs whose
    outcome may differ, from a copy that it can read."""
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    home = dict(HOME="/nonexistent", PATH="/usr/bin:/bin")
    user = dict(user=65534, group=65534, extra_groups=[], env=home, cwd="/", capture_output=True)

    def works(python: str) -> bool:
        code = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            return subprocess.run([python, "-c", code], **user).returncode == 0
        except OSError:
            return False

    pythons = [getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"]
    python = next(filter(works, pythons), None)
    if python is None:
        pytest.skip(f"an ordinary user can start none of {', '.join(pythons)}")
    # not in pytest's folder: each new pytest session removes the permissions again
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(ROOT / "extras/code/sandbox", f"{folder}/extras/code/sandbox")
        script = f"{folder}/extras/code/tests/hostile.py"
        os.mkdir(os.path.dirname(script))
        shutil.copy(ROOT / "extras/code/tests/hostile.py", script)
        done = subprocess.run([python, script], text=True, timeout=PATIENCE, **user)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["problem"] is None
    assert len(answer["wrong"]) == len(hostile.ATTACKS) + 1
    assert {name: wrong for name, wrong in answer["wrong"].items() if wrong} == {}


# ---- good programs: source, stdin, stdout ----

GOOD = [
    ("print(input()[::-1])", "abc\n", "cba\n"),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3", "6\n"),
    ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", "é𝒳\u202e\x00\n", "é𝒳\u202e\x00\n"),
    ("\ufeffprint('é𝒳')", "", "é𝒳\n"),
    ("print('x' * 1000000)", "", "x" * 1000000 + "\n"),
    ("print(len(input()))", "x" * 5_000_000, "5000000\n"),
    ("import sys\nprint(1)\nsys.exit()", "", "1\n"),
    ("print(1)\nquit(0)", "", "1\n"),
    ("import sys, functools\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
     "def f(n): return n and 1 + f(n - 1)\nprint(f(50000))", "", "50000\n"),
    ("import sys, threading, resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 27, -1))\n"
     "threading.stack_size(1 << 27)\nt = threading.Thread(target=lambda: print(1))\nt.start()\nt.join()", "", "1\n"),
    ("with open('a.txt', 'w') as f: f.write('hi')\nwith open('a.txt', 'a') as f: f.write('!')\nimport os\n"
     "with open('b.txt', 'w+') as f: print(f.write('x'), f.seek(0), f.read())\n"
     "print(open('a.txt').read(), sorted(os.listdir()), os.path.exists('c'))\n"
     "with open('a.txt', 'r+') as f:\n    f.truncate(1)\n    print(f.read())", "", "1 0 x\nhi! ['a.txt', 'b.txt'] False\nh\n"),
    ("import tempfile\nwith tempfile.NamedTemporaryFile('w+', dir='.', delete=False) as f: print(f.write('hi'))", "", "2\n"),
    ("print(len(str(10 ** 20000)), int('1' * 9000) % 10)", "", "20001 1\n"),
    ("from concurrent.futures import ThreadPoolExecutor\n"
     "with ThreadPoolExecutor(8) as p: print(sum(p.map(abs, range(9))))", "", "36\n"),
    ("import time\nt = time.time()\ntime.sleep(0.05)\nprint(time.time() - t >= 0.05, time.localtime().tm_year > 2000)", "",
     "True True\n"),
    ("import random, os, secrets, uuid\nprint(len(os.urandom(8)), random.SystemRandom().random() < 1)", "", "8 True\n"),
    ("import signal\ndef handler(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, handler)\n"
     "try:\n    signal.setitimer(0, 0.05)\n    while True: pass\nexcept TimeoutError: print('alarm')", "", "alarm\n"),
    ("import os, sys\nprint({*os.environ} <= {'LC_CTYPE'}, sys.argv, len(sys.path) > 0, '' in sys.path)", "",
     "True ['program.py'] True False\n"),
    ("import os\nprint(open(os.devnull, 'w').write('x'), os.isatty(1), os.getcwd() == os.path.realpath('.'))", "", "1 False True\n"),
]  # fmt: skip


@pytest.mark.parametrize("source, stdin, stdout", GOOD, ids=range(len(GOOD)))
def test_good_programs_run(source, stdin, stdout):
    assert run_program(source, stdin, LIMITS) == Outcome("ok", stdout)


def test_standard_library_can_be_imported():
    """The test imports all modules, except those with side effects."""
    skip = {"antigravity", "this", "idlelib", "turtledemo", "test", "lib2to3", "msilib", "nt"}
    skip |= {"tkinter", "turtle"}
    names = sorted(name for name in sys.stdlib_module_names - skip if not name.startswith("_"))
    source = (
        f"import importlib\nfailed = {{}}\nfor name in {names!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except BaseException as e: failed[name] = repr(e)\nprint(failed)"
    )
    python = getattr(sys, "_base_executable", sys.executable)
    command = [python, "-I", "-S", "-B", "-X", "utf8", "-W", "ignore", "-c", source]
    free = subprocess.run(command, capture_output=True, text=True)
    assert run_program(source, "", LIMITS) == Outcome("ok", free.stdout)


# ---- limits ----


@pytest.mark.parametrize("source, status", [
    ("import sys; sys.exit(3)", "exit code 3"), ("import sys; sys.exit('sorry')", "exit code 1"),
    ("print('x' * 1001)", "output limit"), ("print('x' * 999)", "ok"),
])  # fmt: skip
def test_status_of_a_program(source, status):
    """The hostile programs have the other statuses."""
    assert run_program(source, "", Limits(PATIENCE, output_bytes=1000)).status == status


def test_time_is_that_of_the_program(monkeypatch):
    """It does not include the interpreter's start, but includes the program's end."""
    clock = Clock(monkeypatch, process, program)
    start, wait = process.Child._start, process.Child.wait

    def start_slowly(*arguments):
        start(*arguments)
        clock.ahead += seconds

    def wait_slowly(child):
        clock.ahead += 7
        return wait(child)

    monkeypatch.setattr(process.Child, "_start", start_slowly)
    seconds = process.START_SECONDS / 2
    limits = Limits(seconds=seconds / 2)
    outcome = run_program("print(1)", "", limits)
    assert outcome == Outcome("ok", "1\n") and outcome.seconds < seconds / 2
    called = program.run_tests("def f(): return 1", [("call", "f", [], {}, [1])], limits)
    assert list(called) == [True]  # nor does that of the judge
    monkeypatch.setattr(process.Child, "wait", wait_slowly)
    assert run_program("print(1)", "", LIMITS).seconds >= 7
    seconds = process.START_SECONDS + 1
    with pytest.raises(RuntimeError, match="interpreter for a program did not start: time limit"):
        run_program("print(1)", "", LIMITS)


def test_missing_disk_or_descriptors_raise_a_runtime_error(monkeypatch):
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nothing/like/this")
        for run in (lambda: run_program("print(1)"), lambda: Program("x = 1")):
            with pytest.raises(RuntimeError, match="could not be started: .*nothing/like/this"):
                run()
    kept = [os.dup(0)]
    while kept[-1] != len(kept) + before - 2:  # until no lower number is free
        kept.append(os.dup(0))
    for room in range(1, 20):  # at any point where the descriptors run out
        resource.setrlimit(resource.RLIMIT_NOFILE, (kept[-1] + room, limits[1]))
        try:
            assert run_program("print(1)", "", LIMITS).status == "ok"
            break
        except RuntimeError as error:
            assert "Too many open files" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in kept:
        os.close(descriptor)
    assert 5 < room < 19 and open_files() == before and not hostile.left_over()


# ---- end ----


ENDS = ["print(1)", "1 / 0", "x = ", "x = 1\0", "import sys\nsys.exit()", "import os\nos._exit(0)",
        "import os; os.abort()", "while True: print(1)"]  # fmt: skip


def test_many_runs_leave_nothing_behind(monkeypatch):
    """Runs that Ctrl-C interrupts leave nothing either."""
    run_program("print(1)", "", LIMITS)
    before, threads = open_files(), len(os.listdir("/proc/self/task"))
    children = set(descendants(os.getpid()))  # of other tests
    for source in ENDS:
        run_program(source, "x", Limits(seconds=PATIENCE, output_bytes=100))
        limits = Limits(seconds=0.2 if "while" in source else PATIENCE)
        with pytest.raises(ProgramError), closing(Program(source, limits)) as caller:
            caller.call("nothing")

    def interrupt(child):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.Child, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_program("while True: pass", "", LIMITS)
    assert open_files() == before and len(os.listdir("/proc/self/task")) == threads
    assert set(descendants(os.getpid())) <= children
    assert not hostile.left_over()


def test_program_dies_with_its_parent(tmp_path):
    """A parent that is killed cannot clean up, so the kernel ends the program."""
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


# ---- calls from the parent ----


@pytest.mark.parametrize("body, kind", [
    ("raise SystemExit(0)", "raised"),
    ("class E(Exception):\n        def __str__(self): raise self\n    raise E", "raised"),
    ("return (1 / 0 for i in [1])", "raised"), ("x = []; x.append(x); return x", "raised"),
    ("return 'x' * (2 << 20)", "output limit"), ("import os; os._exit(0)", "exit code 0"),
    ("import os; os.abort()", "killed by signal 11"),
    ("pass\nimport time\ntime.sleep(9999)", "time limit"),
    *[(f"return say(b{line!r})", "malformed") for line in (
        '{"value": 1}{"value": 2}\n', '{"error": [[], ""], "x": 1}{\n', '{"error": "x"}\n', "[1]\n", "\n",
    )],
    (r"return say(b'\xff\xfe\n')", "malformed"),
    (r"return say(b'[' * 500_000 + b'\n')", "malformed"),
    (r"return say(b'1' * 500_000 + b'\n')", "malformed"),
    ("return say(b'1' * 1_500_000)", "output limit"),
])  # fmt: skip
def test_invalid_answers_raise_their_kind(body, kind):
    limits = Limits(seconds=0.3 if kind == "time limit" else PATIENCE)
    # the line is the last output: the value of `f` does not follow
    say = (
        "import os, time\ndef say(line):\n    for fd in range(3, 20):\n"
        "        try: os.write(fd, line)\n        except OSError: pass\n    time.sleep(9999)\n"
    )
    with pytest.raises(ProgramError) as error:
        with closing(Program(say + f"def f(x):\n    {body}", limits)) as caller:
            caller.call(
                "f", "x" * 5_000_000 if kind == "time limit" else 1
            )  # which it may not read
    assert error.value.kind == kind


def test_calls_after_the_end_raise_the_same_error():
    with closing(Program("import os\ndef f(): os._exit(0)\ndef g(): return 1", LIMITS)) as caller:
        assert caller.call("g") == 1
        for function in ("f", "g", "g"):
            with pytest.raises(ProgramError, match="exit code 0"):
                caller.call(function)


# ---- the machine ----


def test_privileges_are_dropped(monkeypatch):
    """The child reads its own status before it loses access."""
    look = "print(open('/proc/self/status').read(), 'dumpable', libc.prctl(3), flush=True)"
    change = f"import os; os.dup2(2, 1); confine.restrict_files = lambda libc: {look}; child.main"
    monkeypatch.setattr(process, "START", process.START.replace("child.main", change))
    monkeypatch.setattr(subprocess, "DEVNULL", subprocess.PIPE)
    with process.Child("program", b"", LIMITS, False) as child:
        seen = child.process.stderr.read().decode()
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert f"{name}:\t0000000000000000\n" in seen
    assert "NoNewPrivs:\t1\n" in seen and "dumpable 0" in seen


@pytest.mark.parametrize("layer", ["restrict_files", "restrict_calls"])
def test_problem_detects_a_missing_layer(monkeypatch, layer):
    """A layer may be skipped silently, or refused by the kernel."""
    with monkeypatch.context() as patch:
        skip = f"confine.{layer} = lambda *_: None; child.main"
        patch.setattr(process, "START", process.START.replace("child.main", skip))
        name = "Landlock" if layer == "restrict_files" else "seccomp"
        assert name in program.problem.__wrapped__()
    refuse = f"confine.{layer} = lambda *_: confine.check(-1, 'no such layer'); child.main"
    monkeypatch.setattr(process, "START", process.START.replace("child.main", refuse))
    assert "no such layer" in program.problem.__wrapped__()
    with pytest.raises(RuntimeError, match="could not be confined: .*no such layer"):
        run_program("print(1)")
    assert run_program("print(1)", "", LIMITS, unsafe=True).stdout == "1\n"
    # the other layers still hold
    left = "import os; os.fork()" if layer == "restrict_files" else "open('/etc/passwd')"
    assert run_program(left, "", LIMITS, unsafe=True).status == "exit code 1"


def test_a_machine_without_confinement_runs_no_program(monkeypatch):
    with monkeypatch.context() as patch:
        change = process.START.replace("child.main", "confine.seccomp = None; child.main")
        patch.setattr(process, "START", change)
        assert "libseccomp.so.2 is missing" in program.problem.__wrapped__()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "needs Linux" in program.problem.__wrapped__()
    with monkeypatch.context() as patch:
        patch.setattr(program.platform, "machine", lambda: "riscv64")
        assert "this is riscv64" in program.problem.__wrapped__()
    monkeypatch.setattr(program, "problem", lambda: "no Landlock")
    for run in (run_program, Program):
        with pytest.raises(ValueError, match="programs cannot be run safely here: no Landlock"):
            run("print(1)")
    assert run_program("print(1)", "", LIMITS, unsafe=True).stdout == "1\n"
