"""Programs: hostile ones are confined (`hostile.py`), good ones run, and their functions can be
called."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import PATIENCE, ROOT, open_files

from extras.code.sandbox import child, program
from extras.code.sandbox.program import Limits, Program, ProgramError, run_program
from extras.code.tests import hostile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program.problem() is not None, reason=str(program.problem())),
]
LIMITS = Limits(seconds=PATIENCE)


# ---- hostile programs ----


@pytest.fixture(scope="session")
def attacks() -> dict[str, list[str]]:
    return hostile.run_all(hostile.HOSTILE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*hostile.HOSTILE, ""])
def test_hostile_program_is_confined(name, attacks):
    """The name "" stands for the state after all programs: nothing outside has changed, no files or
    processes are left, and a good program still runs."""
    assert attacks[name] == []


@pytest.mark.slow
def test_hostile_programs_are_confined_for_an_ordinary_user():
    """Root has more rights, and is exempt from some limits. User 65534 runs the programs whose
    outcome may differ, from a copy that it can read."""
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    user = dict(
        user=65534,
        group=65534,
        extra_groups=[],
        env=dict(HOME="/nonexistent", PATH="/usr/bin:/bin"),
        cwd="/",
    )
    pythons = [getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"]

    def works(python: str) -> bool:
        code = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            return subprocess.run([python, "-c", code], capture_output=True, **user).returncode == 0
        except OSError:
            return False

    python = next(filter(works, pythons), None)
    if python is None:
        pytest.skip(f"an ordinary user can start none of {', '.join(pythons)}")
    # not in pytest's folder: each new pytest session removes the permissions again
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        modules = [
            f"extras/code/sandbox/{name}.py" for name in ("program", "process", "child", "confine")
        ]
        for name in (*modules, "extras/code/tests/hostile.py"):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder, name))
        done = subprocess.run(
            [python, f"{folder}/extras/code/tests/hostile.py"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            **user,
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["problem"] is None
    assert len(answer["wrong"]) == len(hostile.ATTACKS) + 1
    assert {name: wrong for name, wrong in answer["wrong"].items() if wrong} == {}


# ---- good programs ----


@pytest.mark.parametrize("source, stdin, stdout", [
    ("print(input()[::-1])", "abc\n", "cba\n"),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3", "6\n"),
    ("import sys\nfor line in sys.stdin: print(line.strip(), end=';')", "a\nb\n", "a;b;"),
    (
        "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", "é𝒳\u202e\x00\n",
        "é𝒳\u202e\x00\n",
    ),
    ("print('é𝒳')", "", "é𝒳\n"),
    ("\ufeffprint(1)", "", "1\n"),
    ("# coding: latin-1\nprint(1)", "", "1\n"),
    ("if __name__ == '__main__': print(__name__)", "", "__main__\n"),
    ("print('x' * 1000000)", "", "x" * 1000000 + "\n"),
    ("print(len(input()))", "x" * 5_000_000, "5000000\n"),
    ("import sys\nprint(1)\nsys.exit()", "", "1\n"),
    (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1)\n"
        "print(f(20000))",
        "", "0\n",
    ),
    (
        "import sys, threading, resource\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 27, -1))\n"
        "threading.stack_size(1 << 27)\nt = threading.Thread(target=lambda: print(1))\n"
        "t.start()\nt.join()",
        "", "1\n",
    ),
    (
        "with open('a.txt', 'w') as f: f.write('hi')\n"
        "with open('a.txt', 'a') as f: f.write('!')\nimport os\n"
        "with open('b.txt', 'w+') as f: print(f.write('x'), f.seek(0), f.read())\n"
        "print(open('a.txt').read(), sorted(os.listdir()), os.path.exists('c'))\n"
        "with open('a.txt', 'r+') as f:\n"
        "    f.truncate(1)\n    print(f.read())", "", "1 0 x\nhi! ['a.txt', 'b.txt'] False\nh\n",
    ),
    (
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+', dir='.', delete=False) as f: "
        "print(f.write('hi'))",
        "", "2\n",
    ),
    ("print(1)\nexit()\nprint(2)", "", "1\n"),
    ("print(1)\nquit(0)", "", "1\n"),
    ("print(len(str(10 ** 20000)), int('1' * 9000) % 10)", "", "20001 1\n"),
    ("def f(x: int): pass\nprint(f.__annotations__)", "", "{'x': <class 'int'>}\n"),
    (
        "import sys, functools\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
        "def f(n): return n and 1 + f(n - 1)\nprint(f(50000))", "", "50000\n",
    ),
    (
        "import threading\nx = []\nts = [threading.Thread(target=x.append, "
        "args=(i,)) for i in range(20)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\nprint(sorted(x) == list(range(20)))", "",
        "True\n",
    ),
    (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as p: print(sum(p.map(abs, range(9))))", "", "36\n",
    ),
    (
        "import time\nt = time.time()\ntime.sleep(0.05)\n"
        "print(time.time() - t >= 0.05, time.localtime().tm_year > 2000)", "", "True True\n",
    ),
    (
        "import random, os, secrets, uuid\n"
        "print(len(os.urandom(8)), random.SystemRandom().random() < 1)",
        "", "8 True\n",
    ),
    (
        "import signal\ndef handler(*a): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "try:\n    signal.setitimer(0, 0.05)\n    while True: pass\n"
        "except TimeoutError: print('alarm')",
        "", "alarm\n",
    ),
    (
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int\n"
        "print(pickle.loads(pickle.dumps(A(3))))", "", "A(x=3)\n",
    ),
    (
        "import ctypes, hashlib, zlib, lzma, bz2, decimal\n"
        "print(hashlib.sha256(b'').hexdigest()[:4])",
        "", "e3b0\n",
    ),
    (
        "import os, sys\nprint(dict(os.environ), sys.argv, len(sys.path) > 0, '' in sys.path)", "",
        "{'LC_CTYPE': 'C.UTF-8'} ['program.py'] True False\n",
    ),
    (
        "import os\nprint(open(os.devnull, 'w').write('x'), os.isatty(1), "
        "os.getcwd() == os.path.realpath('.'))",
        "", "1 False True\n",
    ),
    (
        "import datetime, zoneinfo\nprint(datetime.datetime.now() > datetime.datetime(2020, 1, 1))",
        "", "True\n",
    ),
    ("x = {1, 2}\nmatch 3:\n    case 3: print('ok')", "", "ok\n"),
])  # fmt: skip
def test_good_programs_run(source, stdin, stdout):
    outcome = run_program(source, stdin, LIMITS)
    if "environ" in source:  # UTF-8 mode needs no locale: Python sets one only where it finds it
        assert outcome.stdout in (stdout, stdout.replace("{'LC_CTYPE': 'C.UTF-8'}", "{}"))
    else:
        assert outcome.stdout == stdout
    assert outcome.status == "ok"


# ---- calls ----


@pytest.mark.parametrize(
    "body, kind",
    [
        ("raise KeyError('no')", "raised"),
        ("raise SystemExit(0)", "raised"),
        ("raise KeyboardInterrupt", "raised"),
        ("raise GeneratorExit", "raised"),
        ("class E(Exception):\n        def __str__(self): raise self\n    raise E", "raised"),
        ("return f(x)", "raised"),
        ("x = []; x.append(x); return x", "cannot be passed"),
        ("y = []\n    for i in range(101): y = [y]\n    return y", "cannot be passed"),
        ("y = []\n    for i in range(10**5): y = [y]\n    return y", "cannot be passed"),
        ("return range(100_001)", "cannot be passed"),
        ("import itertools; return map(abs, itertools.count())", "cannot be passed"),
        ("return (1 / 0 for i in [1])", "raised"),
        ("return int", "cannot be passed"),
        ("return object()", "cannot be passed"),
        ("return f", "cannot be passed"),
        ("return [1, {2: f}]", "cannot be passed"),
        ("return memoryview(b'')", "cannot be passed"),
        (
            "class R:\n        def __reduce__(self): return (exit, ())\n    return R()",
            "cannot be passed",
        ),
        ("return 'x' * (2 << 20)", "output limit"),
        ("return 1 << (8 << 21)", "output limit"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import os; os.abort()", "killed by signal 11"),
        ("while True: pass", "time limit"),
        ("return __ask__(1)", "malformed"),
        ('return say(b\'{"value": 1}{"value": 2}\\n\')', "malformed"),
        ('return say(b\'{"value": 1, "error": [["A"], ""]}\\n\')', "malformed"),
        ('return say(b\'{"error": [[], ""]}\\n\')', "malformed"),
        ('return say(b\'{"error": [[1], ""]}\\n\')', "malformed"),
        ('return say(b\'{"error": "x"}\\n\')', "malformed"),
        ("return say(b'[1]\\n')", "malformed"),
        ("return say(b'\\n')", "malformed"),
        ("return say(b'\\xff\\xfe\\n')", "malformed"),
        ("return say(b'[' * 500_000 + b'\\n')", "malformed"),
        ("return say(b'{\"value\": ' * 50_000 + b'\\n')", "malformed"),
        ("return say(b'1' * 500_000 + b'\\n')", "malformed"),
        ("return say(b'1' * 1_500_000)", "output limit"),
        ('return say(b\'{"value": {"tuple": 1}}\\n\')', "malformed"),
        ('return say(b\'{"value": {"set": [[]]}}\\n\')', "malformed"),
        ('return say(b\'{"value": {"a": 1}}\\n\')', "malformed"),
        ('return say(b\'{"value": {"object": "f"}}\\n\')', "cannot be passed"),
        ('return say(b\'{"value": {"int": "1_"}}\\n\')', "malformed"),
        ("return say(b'{\"value\": ' + b'[' * 200 + b']' * 200 + b'}\\n')", "malformed"),
    ],
)
def test_invalid_answers_raise_their_kind(body, kind):
    limits = Limits(seconds=0.3 if kind == "time limit" else PATIENCE)
    # the line is the last output: the value of `f` does not follow
    say = (
        "import os, time\ndef say(line):\n    os.write(__ask__.__self__.answers, line)\n"
        "    time.sleep(9999)\n"
    )
    with Program(say + f"def f(x):\n    {body}", limits) as program:
        with pytest.raises(ProgramError) as error:
            program.call("f", [1])
    assert error.value.kind == kind


QUESTION = (
    "import os, time\nos.write(__ask__.__self__.answers, b'{\"ask\": 1}\\n')\ntime.sleep(9999)"
)


@pytest.mark.parametrize("source", ["__ask__(1)", QUESTION])
def test_question_during_the_source_is_malformed(source):
    with pytest.raises(ProgramError) as error, Program(source, LIMITS):
        pass
    assert error.value.kind == "malformed" and not hostile.left_over()


def test_calls_after_the_end_raise_the_same_error():
    with Program("import os\ndef f(): os._exit(0)\ndef g(): return 1", LIMITS) as program:
        assert program.call("g") == 1
        for function in ("f", "g", "g"):
            with pytest.raises(ProgramError, match="exit code 0"):
                program.call(function)


@pytest.mark.parametrize(
    "source", ["x = ", "1 / 0", "import sys\nsys.exit()", "import os\nos._exit(0)", "x = 1\0"]
)
def test_failing_source_raises_a_program_error(source):
    before = open_files()
    with pytest.raises(ProgramError), Program(source, LIMITS):
        pass
    assert open_files() == before and not hostile.left_over()


def test_arguments_must_be_plain():
    with Program("def f(x): return x", LIMITS) as program:
        with pytest.raises(TypeError, match="a value of type function"):
            program.call("f", [open_files])
        assert program.call("f", ["x" * 500_000]) == "x" * 500_000  # more than a pipe holds


# ---- the machine ----


def test_problem_names_the_unsupported_platform(monkeypatch):
    assert program.problem() is None
    for name, value, message in (
        ("sys.platform", "darwin", "needs Linux"),
        ("platform.machine", "riscv64", "this is riscv64"),
    ):
        module, attribute = name.split(".")
        with monkeypatch.context() as patch:
            fake = (
                dict(machine=lambda value=value: value)
                if module == "platform"
                else dict(platform=value)
            )
            patch.setattr(program, module, type("module", (), fake | dict(attribute=attribute)))
            assert message in program.problem.__wrapped__()


def test_missing_confinement_runs_no_program(monkeypatch):
    monkeypatch.setattr("extras.code.sandbox.program.problem", lambda: "no Landlock")
    with pytest.raises(ValueError, match="programs cannot be run safely here: no Landlock"):
        run_program("print(1)")
    with pytest.raises(ValueError, match="no Landlock"):
        Program("x = 1")
    assert run_program("print(1)", "", LIMITS, unsafe=True).stdout == "1\n"
    with Program("def f(): return 1", LIMITS, unsafe=True) as program:
        assert program.call("f") == 1


def test_modules_import_only_the_standard_library():
    """The child and worker processes import them."""
    heavy = ("torch", "numpy", "transformers")
    code = f"import sys; import extras.code.reward; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        ).stdout
        == "[]\n"
    )
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL and platform.system() == "Linux"
    assert child.READY.endswith(b"\n")
