"""The sandbox: what hostile programs cannot do (`hostile.py`), what good ones can, and how values cross."""

import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import pytest
from helpers import descendants
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sandbox import child, confine, process, program
from common.sandbox.child import decode, encode
from common.sandbox.program import Limits, Program, ProgramError, run_program

pytestmark = pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))
ROOT = Path(__file__).resolve().parent.parent.parent


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch, tmp_path):
    """`hostile.left_over` is not to see what other test runs are at."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# ---- hostile programs ----


@pytest.fixture(scope="session")
def attacks() -> dict[str, list[str]]:
    return hostile.run_all()


@pytest.mark.parametrize("name", [*hostile.HOSTILE, ""])
def test_hostile(name, attacks):
    """ "": nothing outside was changed, nothing is left, and a good program still runs."""
    assert attacks[name] == []


def test_hostile_as_an_ordinary_user():
    """Root may do more, and less: it is exempt from some limits. The same list as `nobody`, from a copy it can read."""
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    user = dict(user=65534, group=65534, extra_groups=[], env=dict(HOME="/nonexistent", PATH="/usr/bin:/bin"), cwd="/")
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
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as folder:  # not pytest's: each new session of it takes the rights away again
        os.chmod(folder, 0o755)
        modules = [f"common/sandbox/{name}.py" for name in ("program", "process", "child", "confine")]
        for name in (*modules, "tests/sandbox/hostile.py"):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder, name))
        done = subprocess.run(
            [python, f"{folder}/tests/sandbox/hostile.py"], capture_output=True, text=True, timeout=300, **user
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["problem"] is None
    assert len(answer["wrong"]) == len(hostile.HOSTILE) + 1
    assert {name: wrong for name, wrong in answer["wrong"].items() if wrong} == {}


def test_nothing_is_left_after_many_runs():
    run_program("print(1)")
    before, threads = open_files(), len(os.listdir("/proc/self/task"))
    children = set(descendants(os.getpid()))  # of other tests
    for source in ("print(1)", "1 / 0", "import os; os.abort()", "while True: print(1)"):
        run_program(source, "x", Limits(output_bytes=100))
        with pytest.raises(ProgramError), Program(source, Limits(seconds=0.2)) as program:
            program.call("nothing")
    assert open_files() == before and len(os.listdir("/proc/self/task")) == threads
    assert set(descendants(os.getpid())) <= children
    assert not hostile.left_over()


def test_a_program_dies_with_its_parent(tmp_path):
    """Killed outright, the parent cannot clean up: the kernel ends the program."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
        "from common.sandbox.program import *\nprint('started', flush=True)\n"
        "run_program('while True: pass', '', Limits(seconds=60))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | dict(TMPDIR=str(tmp_path))
    )
    parent.stdout.readline()
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()) or not (pids := children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_interrupted_runs_leave_nothing(monkeypatch):
    """Ctrl-C while a program runs."""
    before = open_files()

    def interrupt(child):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.Child, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_program("while True: pass")
    assert open_files() == before and not hostile.left_over()


# ---- good programs ----


@pytest.mark.parametrize(
    "source, stdin, stdout",
    [
        ("print(input()[::-1])", "abc\n", "cba\n"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3", "6\n"),
        ("import sys\nfor line in sys.stdin: print(line.strip(), end=';')", "a\nb\n", "a;b;"),
        ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", "é𝒳\u202e\x00\n", "é𝒳\u202e\x00\n"),
        ("print('é𝒳')", "", "é𝒳\n"),
        ("\ufeffprint(1)", "", "1\n"),
        ("# coding: latin-1\nprint(1)", "", "1\n"),
        ("if __name__ == '__main__': print(__name__)", "", "__main__\n"),
        ("print('x' * 1000000)", "", "x" * 1000000 + "\n"),
        ("print(len(input()))", "x" * 5_000_000, "5000000\n"),
        ("import sys\nprint(1)\nsys.exit()", "", "1\n"),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and f(n - 1)\nprint(f(20000))", "", "0\n"),
        ("import sys, threading, resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 27, -1))\n"
         "threading.stack_size(1 << 27)\nt = threading.Thread(target=lambda: print(1))\nt.start()\nt.join()", "",
         "1\n"),
        ("with open('a.txt', 'w') as f: f.write('hi')\nwith open('a.txt', 'a') as f: f.write('!')\nimport os\n"
         "with open('b.txt', 'w+') as f: print(f.write('x'), f.seek(0), f.read())\n"
         "print(open('a.txt').read(), sorted(os.listdir()), os.path.exists('c'))\nwith open('a.txt', 'r+') as f:\n"
         "    f.truncate(1)\n    print(f.read())", "", "1 0 x\nhi! ['a.txt', 'b.txt'] False\nh\n"),
        ("import tempfile\nwith tempfile.NamedTemporaryFile('w+', dir='.', delete=False) as f: print(f.write('hi'))",
         "", "2\n"),
        ("print(1)\nexit()\nprint(2)", "", "1\n"),
        ("print(1)\nquit(0)", "", "1\n"),
        ("print(len(str(10 ** 20000)), int('1' * 9000) % 10)", "", "20001 1\n"),
        ("def f(x: int): pass\nprint(f.__annotations__)", "", "{'x': <class 'int'>}\n"),
        ("import sys, functools\nsys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
         "def f(n): return n and 1 + f(n - 1)\nprint(f(50000))", "", "50000\n"),
        ("import threading\nx = []\nts = [threading.Thread(target=x.append, args=(i,)) for i in range(20)]\n"
         "[t.start() for t in ts]\n[t.join() for t in ts]\nprint(sorted(x) == list(range(20)))", "", "True\n"),
        ("from concurrent.futures import ThreadPoolExecutor\n"
         "with ThreadPoolExecutor(8) as p: print(sum(p.map(abs, range(9))))",
         "", "36\n"),
        ("import time\nt = time.time()\ntime.sleep(0.05)\n"
         "print(time.time() - t >= 0.05, time.localtime().tm_year > 2000)", "",
         "True True\n"),
        ("import random, os, secrets, uuid\nprint(len(os.urandom(8)), random.SystemRandom().random() < 1)", "",
         "8 True\n"),
        ("import signal\ndef handler(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, handler)\n"
         "try:\n    signal.setitimer(0, 0.05)\n    while True: pass\nexcept TimeoutError: print('alarm')", "",
         "alarm\n"),
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int\n"
         "print(pickle.loads(pickle.dumps(A(3))))", "",
         "A(x=3)\n"),
        ("import ctypes, hashlib, zlib, lzma, bz2, decimal\nprint(hashlib.sha256(b'').hexdigest()[:4])", "", "e3b0\n"),
        ("import os, sys\nprint(dict(os.environ), sys.argv, len(sys.path) > 0, '' in sys.path)", "",
         "{'LC_CTYPE': 'C.UTF-8'} ['program.py'] True False\n"),
        ("import os\nprint(open(os.devnull, 'w').write('x'), os.isatty(1), os.getcwd() == os.path.realpath('.'))", "",
         "1 False True\n"),
        ("import datetime, zoneinfo\nprint(datetime.datetime.now() > datetime.datetime(2020, 1, 1))", "", "True\n"),
        ("x = {1, 2}\nmatch 3:\n    case 3: print('ok')", "", "ok\n"),
    ],
)  # fmt: skip
def test_good_programs(source, stdin, stdout):
    outcome = run_program(source, stdin, Limits(seconds=20))
    if "environ" in source:  # UTF-8 mode needs no locale: Python sets one only where it finds it
        assert outcome.stdout in (stdout, stdout.replace("{'LC_CTYPE': 'C.UTF-8'}", "{}"))
    else:
        assert outcome.stdout == stdout
    assert outcome.status == "ok"


def test_the_standard_library_can_be_imported():
    """Every module that can be imported here, but those that do something then."""
    skip = {"antigravity", "this", "idlelib", "turtledemo", "test", "lib2to3", "msilib", "nt", "tkinter", "turtle"}
    names = sorted(name for name in sys.stdlib_module_names - skip if not name.startswith("_"))
    source = (
        f"import importlib\nfailed = {{}}\nfor name in {names!r}:\n    try: importlib.import_module(name)\n"
        "    except BaseException as e: failed[name] = repr(e)\nprint(failed)"
    )
    python = getattr(sys, "_base_executable", sys.executable)
    free = subprocess.run(
        [python, "-I", "-S", "-B", "-X", "utf8", "-W", "ignore", "-c", source], capture_output=True, text=True
    )
    outcome = run_program(source, "", Limits(seconds=60))
    assert outcome.status == "ok" and outcome.stdout == free.stdout


@pytest.mark.parametrize(
    "source, limits, status",
    [
        ("print(1)", {}, "ok"),
        ("1 / 0", {}, "exit code 1"),
        ("x = ", {}, "exit code 1"),
        ("import sys; sys.exit(3)", {}, "exit code 3"),
        ("import sys; sys.exit('sorry')", {}, "exit code 1"),
        ("import ctypes; ctypes.string_at(0)", {}, "killed by signal 11"),
        ("import time; time.sleep(9)", dict(seconds=0.3), "time limit"),
        ("x = bytes(200 << 20)", dict(memory_mib=100), "memory limit"),
        ("x = bytes(200 << 20)", {}, "ok"),
        ("print('x' * 1001)", dict(output_bytes=1000), "output limit"),
        ("print('x' * 999)", dict(output_bytes=1000), "ok"),
        ("open('x', 'wb').write(bytes(3 << 20))", dict(file_mib=2), "exit code 1"),
        ("for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))\nimport time; time.sleep(9)", dict(disk_mib=5),
         "disk limit"),
        ("for i in range(9): open(str(i), 'wb')\nimport time; time.sleep(9)", dict(files=5), "disk limit"),
    ],
)  # fmt: skip
def test_limits(source, limits, status):
    assert run_program(source, "", Limits(**limits)).status == status


def test_what_a_run_says_of_its_time():
    assert 0.3 < run_program("import time; time.sleep(0.3)").seconds < 3


def test_a_machine_without_room_is_an_error_of_the_machine(monkeypatch):
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nothing/like/this")
        for run in (lambda: run_program("print(1)"), lambda: Program("x = 1").__enter__()):
            with pytest.raises(RuntimeError, match="a program could not be started: .*nothing/like/this"):
                run()
    for room in range(12):  # wherever the descriptors run out
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + room, limits[1]))
        try:
            assert run_program("print(1)").status == "ok"
        except RuntimeError as error:
            assert "Too many open files" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() == before


def test_many_threads_are_too_many():
    """With small stacks they do not reach the limit of memory. Python's own need more, so these are made by hand."""
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
    assert run_program(source % (200, 9), "", Limits(seconds=9)).status == "thread limit"
    assert run_program(source % (20, 0.2), "", Limits(seconds=9)) == program.Outcome("ok", "done\n")


def test_privileges_are_dropped(monkeypatch):
    """Seen by the child itself, before it cannot look any more."""
    look = "print(open('/proc/self/status').read(), 'dumpable', libc.prctl(3), flush=True)"
    start = process.START.replace("child.main", f"confine.restrict_files = lambda libc: {look}; child.main")
    monkeypatch.setattr(process, "START", start)
    seen = run_program("").stdout
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert f"{name}:\t0000000000000000\n" in seen
    assert "NoNewPrivs:\t1\n" in seen and "dumpable 0" in seen


def test_many_at_once():
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(
            pool.map(lambda i: run_program("print(int(input()) * 2)", str(i), Limits(seconds=20)), range(40))
        )
    assert [outcome.stdout for outcome in outcomes] == [f"{2 * i}\n" for i in range(40)]


def test_a_slow_start_is_not_the_programs_time(monkeypatch):
    monkeypatch.setattr(process, "START", "import time; time.sleep(0.5); " + process.START)
    assert run_program("print(1)", "", Limits(seconds=0.4)).status == "ok"


# ---- calls ----


class Text(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__

    def __len__(self):
        return 10**9


class Whole(int):
    def __index__(self):
        return 7

    __int__ = __index__


class Items(list):
    def __iter__(self):
        return iter([1])


Point = namedtuple("Point", "x y")
VALUES = [
    0, -1, 2**63, -(2**63), -(2**63) - 1, 10**5000, True, False, None, 0.5, -0.0, math.inf, -math.inf, 1e-320, 1j,
    complex(-0.0, 1),
    "", "é𝒳", "\ud800", "\udc00\ud800", "\ud83d\ude00", "\x00\n\u2028", '"\\', b"", b"\xff\x00", [], (), set(),
    frozenset(), {},
    [1, (2, [3])], {1: "a", "1": "b", (1, 2): [3], None: 4, 2.5: 5, frozenset({1}): 6, b"x": 7}, {(1, (2,)),
    frozenset({3})},
    {"value": 1}, {"tuple": [1]}, {"error": [[], ""]}, [[[[]]]], list(range(1000)),
]  # fmt: skip


def identical(a: object, b: object) -> bool:
    """Equal with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return all(identical(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, set | frozenset):
        return a == b and Counter(map(type, a)) == Counter(map(type, b))
    return repr(a) == repr(b) if isinstance(a, float | complex) else a == b


def test_values_cross_exactly():
    with Program("def f(x): return x", Limits(seconds=30)) as program:
        for value in VALUES:
            assert identical(program.call("f", [value]), value), value
        assert math.isnan(program.call("f", [math.nan]))
        assert program.call("f", kwargs=dict(x=(1,))) == (1,)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()) | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


@settings(max_examples=50)
@given(PLAIN)
def test_encode_decode(value):
    assert identical(decode(json.loads(json.dumps(encode(value)))), value)


def test_subclasses_cross_as_what_they_are_built_on():
    given = [
        Text("ab"),
        Whole(5),
        Items([1, 2]),
        Point(1, 2),
        OrderedDict(a=1),
        defaultdict(list, a=[1]),
        Counter("aab"),
    ]
    crossed = decode(json.loads(json.dumps(encode(given))))
    assert identical(crossed, ["ab", 5, [1, 2], (1, 2), {"a": 1}, {"a": [1]}, {"a": 2, "b": 1}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["tuple", "set", "frozenset", "dict", "int", "str", "bytes", "complex", "object", "x"]),
            inner,
        )
    ),
)


@settings(max_examples=100)
@given(JSON)
def test_decode_raises_nothing_else(data):
    try:
        decode(data)
    except (ValueError, TypeError):
        pass


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_colliding_keys_are_refused(kind):
    """They would take the parent minutes: the hash of k * (2**61 - 1) is 0."""
    keys = [{"int": hex(k * (2**61 - 1))} for k in range(1, 9_000)]
    with pytest.raises(ValueError, match="too many equal hashes"):
        decode({kind: [[key, 0] for key in keys] if kind == "dict" else keys})


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
def test_many_keys_that_the_program_could_choose_by_their_hashes_are_refused(kind):
    for count, what in ((10_000, int), (20_000, str)):
        keys = [what(i) for i in range(count)]
        assert len(decode({kind: [[key, 0] for key in keys] if kind == "dict" else keys})) == count
    keys = list(range(10_001))
    with pytest.raises(ValueError, match="too many keys that are not strings"):
        decode({kind: [[key, 0] for key in keys] if kind == "dict" else keys})


@pytest.mark.parametrize(
    "result, value",
    [("(i for i in (1, 2))", [1, 2]), ("map(str, [1])", ["1"]), ("range(3)", [0, 1, 2]), ("{1: 2}.items()", [(1, 2)]),
     ("{1: 2}.keys()", [1]), ("{1: 2}.values()", [2]), ("__import__('collections').deque([1])", [1]), ("zip('a', 'b')",
     [("a", "b")]), ("range(100_000)", list(range(100_000)))],
)  # fmt: skip
def test_results_that_can_only_be_gone_through_are_iterators(result, value):
    """Equal to no list, as in the program itself."""
    with Program(f"def f(): return {result}") as program:
        assert program.call("f") != value and identical(list(program.call("f")), value)


def test_bytearrays_are_bytes():
    with Program("def f(): return bytearray(b'a')") as program:
        assert identical(program.call("f"), b"a")


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
        ("class R:\n        def __reduce__(self): return (exit, ())\n    return R()", "cannot be passed"),
        ("return 'x' * (2 << 20)", "output limit"),
        ("return 1 << (8 << 21)", "output limit"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import os; os.abort()", "killed by signal 11"),
        ("while True: pass", "time limit"),
        ("return __ask__(1)", "malformed"),
        ("return say(b'{\"value\": 1}{\"value\": 2}\\n')", "malformed"),
        ("return say(b'{\"value\": 1, \"error\": [[\"A\"], \"\"]}\\n')", "malformed"),
        ("return say(b'{\"error\": [[], \"\"]}\\n')", "malformed"),
        ("return say(b'{\"error\": [[1], \"\"]}\\n')", "malformed"),
        ("return say(b'{\"error\": \"x\"}\\n')", "malformed"),
        ("return say(b'[1]\\n')", "malformed"),
        ("return say(b'\\n')", "malformed"),
        ("return say(b'\\xff\\xfe\\n')", "malformed"),
        ("return say(b'[' * 500_000 + b'\\n')", "malformed"),
        ("return say(b'{\"value\": ' * 50_000 + b'\\n')", "malformed"),
        ("return say(b'1' * 500_000 + b'\\n')", "malformed"),
        ("return say(b'1' * 1_500_000)", "output limit"),
        ("return say(b'{\"value\": {\"tuple\": 1}}\\n')", "malformed"),
        ("return say(b'{\"value\": {\"set\": [[]]}}\\n')", "malformed"),
        ("return say(b'{\"value\": {\"a\": 1}}\\n')", "malformed"),
        ("return say(b'{\"value\": {\"object\": \"f\"}}\\n')", "cannot be passed"),
        ("return say(b'{\"value\": {\"int\": \"1_\"}}\\n')", "malformed"),
        ("return say(b'{\"value\": ' + b'[' * 200 + b']' * 200 + b'}\\n')", "malformed"),
    ],
)  # fmt: skip
def test_answers_that_are_none(body, kind):
    # nothing else follows the line: not the value that `f` returns
    say = "import os, time\ndef say(line):\n    os.write(__ask__.__self__.answers, line)\n    time.sleep(60)\n"
    with Program(say + f"def f(x):\n    {body}", Limits(seconds=3)) as program:
        with pytest.raises(ProgramError) as error:
            program.call("f", [1])
    assert error.value.kind == kind


def test_errors_say_what_was_raised():
    source = "class Own(KeyError): pass\ndef f(x): raise Own('no', x)"
    with Program(source) as program, pytest.raises(ProgramError) as error:
        program.call("f", [1])
    assert error.value.types[:3] == ("Own", "KeyError", "LookupError") and error.value.message == "('no', 1)"
    assert str(error.value) == "raised: Own: ('no', 1)"


def test_the_key_of_a_key_error_is_relayed_as_it_is():
    with Program("def f(x): raise KeyError(x)") as program:
        for key, message in (("k", "k"), (1, "1")):
            with pytest.raises(ProgramError) as error:
                program.call("f", [key])
            assert error.value.message == message


QUESTION = "import os, time\nos.write(__ask__.__self__.answers, b'{\"ask\": 1}\\n')\ntime.sleep(60)"


@pytest.mark.parametrize("source", ["__ask__(1)", QUESTION])
def test_a_question_while_the_source_runs(source):
    with pytest.raises(ProgramError) as error, Program(source, Limits(seconds=3)):
        pass
    assert error.value.kind == "malformed" and not hostile.left_over()


def test_a_program_that_ended_stays_ended():
    with Program("import os\ndef f(): os._exit(0)\ndef g(): return 1") as program:
        assert program.call("g") == 1
        for function in ("f", "g", "g"):
            with pytest.raises(ProgramError, match="exit code 0"):
                program.call(function)


@pytest.mark.parametrize("source", ["x = ", "1 / 0", "import sys\nsys.exit()", "import os\nos._exit(0)", "x = 1\0"])
def test_a_source_that_does_not_run(source):
    before = open_files()
    with pytest.raises(ProgramError), Program(source):
        pass
    assert open_files() == before and not hostile.left_over()


def test_a_module_keeps_its_state_and_may_use_standard_streams():
    source = """
import sys, dataclasses, typing
print("hello")
print("there", file=sys.stderr)
rest = sys.stdin.read()
@dataclasses.dataclass
class A:
    x: "int"
n = 0
def f():
    global n
    n += 1
    print(n)
    return n, rest, typing.get_type_hints(A)["x"] is int
if __name__ == "__main__":
    n = 100
"""
    with Program(source) as program:
        assert program.call("f") == (1, "", True)
        assert program.call("f") == (2, "", True)
        assert program.call("lambda x: x + n", [1]) == 3


def test_arguments_must_be_plain():
    with Program("def f(x): return x") as program:
        with pytest.raises(TypeError, match="a value of type function"):
            program.call("f", [open_files])
        assert program.call("f", ["x" * 500_000]) == "x" * 500_000  # more than a pipe holds


def test_requests_that_nobody_reads_end_at_the_deadline():
    with Program("import time, threading\ndef f(x): time.sleep(60)", Limits(seconds=0.5)) as program:
        with pytest.raises(ProgramError, match="time limit"):
            program.call("f", ["x" * 5_000_000])
    with Program("import os\ndef f(x): os.closerange(3, 100)", Limits(seconds=5)) as program:
        for _ in range(2):
            with pytest.raises(ProgramError):
                program.call("f", ["x"])


# ---- the machine ----


def test_problem(monkeypatch):
    assert program.problem() is None
    for name, value, message in (
        ("sys.platform", "darwin", "needs Linux"),
        ("platform.machine", "riscv64", "this is riscv64"),
    ):
        module, attribute = name.split(".")
        with monkeypatch.context() as patch:
            fake = dict(machine=lambda value=value: value) if module == "platform" else dict(platform=value)
            patch.setattr(program, module, type("module", (), fake | dict(attribute=attribute)))
            assert message in program._problem.__wrapped__()


@pytest.mark.parametrize("layer", ["restrict_files", "restrict_calls"])
def test_problem_sees_a_layer_that_is_missing(monkeypatch, layer):
    """Left out silently, and refused by the kernel."""
    with monkeypatch.context() as patch:
        skip = f"confine.{layer} = lambda libc: None; child.main"
        patch.setattr(process, "START", process.START.replace("child.main", skip))
        name = "Landlock" if layer == "restrict_files" else "seccomp"
        assert name in program._problem.__wrapped__()
    with monkeypatch.context() as patch:
        refuse = f"confine.{layer} = lambda libc: confine.check(-1, 'no such layer'); child.main"
        patch.setattr(process, "START", process.START.replace("child.main", refuse))
        assert "no such layer" in program._problem.__wrapped__()
        with pytest.raises(RuntimeError, match="could not be confined: .*no such layer"):
            run_program("print(1)")
        assert run_program("print(1)", unsafe=True).stdout == "1\n"
        left = "import os; os.fork()" if layer == "restrict_files" else "open('/etc/passwd')"
        assert run_program(left, unsafe=True).status == "exit code 1", "the other layers still hold"


def test_without_confinement_nothing_runs(monkeypatch):
    monkeypatch.setattr("common.sandbox.program.problem", lambda: "no Landlock")
    with pytest.raises(ValueError, match="programs cannot be run safely here: no Landlock"):
        run_program("print(1)")
    with pytest.raises(ValueError, match="no Landlock"):
        Program("x = 1")
    assert run_program("print(1)", unsafe=True).stdout == "1\n"
    with Program("def f(): return 1", unsafe=True) as program:
        assert program.call("f") == 1


HEADERS = {0: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 1: "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("column", HEADERS)
def test_the_numbers_of_system_calls(column):
    """Against the kernel's headers. aarch64 uses the generic numbers; a name may be another there."""
    if not Path(HEADERS[column]).exists():
        pytest.skip(f"no {HEADERS[column]}")
    text = Path(HEADERS[column]).read_text()
    found = dict(re.findall(r"#define (__NR(?:3264)?_\w+) (\d+)\b", text))
    numbers = {name.removeprefix("__NR3264_").removeprefix("__NR_"): int(number) for name, number in found.items()}
    renamed = {"newfstatat": "fstatat"} if column == 1 else {}
    some = {name: row for name, (row, _) in (confine.SOME | confine.OPEN).items()}
    tables = confine.ALLOWED | some | {"clone3": confine.CLONE3}
    for name, row in tables.items():
        if row[column] is not None:
            assert numbers[renamed.get(name, name)] == row[column], name
        else:
            assert name not in numbers, f"{name} is missing"


def test_the_filter_of_the_other_architecture_is_sound():
    """The jumps stay inside and every path ends in a verdict."""
    for machine in confine.ARCHITECTURES:
        code = confine.seccomp_filter(machine)
        steps = [(code[i] | code[i + 1] << 8, code[i + 2], code[i + 3]) for i in range(0, len(code), 8)]
        for i, (operation, yes, no) in enumerate(steps):
            if operation & 7 == 5:
                assert i + 1 + max(yes, no) < len(steps)
        assert steps[-1][0] == 6 and len(steps) < 4096


def test_modules_are_light():
    """Only the standard library: the child and worker processes import them."""
    heavy = ("torch", "numpy", "transformers")
    code = f"import sys; import common.rewards.code_reward; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL and platform.system() == "Linux"
    assert child.READY.endswith(b"\n")
