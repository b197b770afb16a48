"""Rewards and environments that return the wrong things, hang, crash, or change their process and
machine."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from helpers import alive, kill

from bench.fault_cases.case import Case, work
from bench.fault_cases.hostile import FINE, SAME, ended, lines, rows_of, unexpected, usual
from bench.fault_cases.hostile_data import ANSWER, USER, chat

DIGITS = "sum(map(str.isdigit, completion))"
RETURNS = {  # an expression of `completion` and `row`, and how the run ends
    "None": FINE,
    "'text'": "ValueError",
    "[1.0]": "TypeError",
    "{}": "TypeError",
    "float('nan')": "returned nan",
    "float('-inf')": "returned -inf",
    "1j": "TypeError",
    "10**400": "OverflowError",
    "True": FINE,
    f"__import__('numpy').float32({DIGITS})": SAME,
    "(x for x in [1])": "cannot be pickled",
    "lambda: 1": "cannot be pickled",
    "type('A', (), {})()": "cannot be pickled",
    "(1.0, {'a': float('nan')})": "'a'",
    "(1.0, {'mean': 1})": "'mean'",
    "(1.0, {1: 2})": FINE,
    "(1.0, 2.0)": "TypeError",
    "bytes(10**8)": "",
    "print(completion) or later()": "cannot be pickled",
    f"row.clear() or {DIGITS}": SAME,
}
BODIES = {  # statements before the right value is returned
    "raise ValueError('a\\nb')": "ValueError: a",
    "raise BaseException": "BaseException",
    "sys.exit(0)": "SystemExit",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise MemoryError": "MemoryError",
    "f(completion, row)": "Recursion",
    "raise Unprintable": "(its text cannot be had)",
    "raise ValueError('x' * 10**7)": "ValueError: xxx",
    "raise ExceptionGroup('a', [ValueError()])": "ExceptionGroup",
    "raise StopIteration": "StopIteration",
    "while True: pass": "no answer within 1 s",
    "time.sleep(999)": "no answer within 1 s",
    "3 ** (10 ** 9) % 7": "no answer within 1 s",
    "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(999)": "no answer within 1 s",
    "os._exit(0)": "died",
    "os.abort()": "SIGABRT",
    "ctypes.string_at(0)": "SIGSEGV",
    "os.kill(os.getpid(), 9)": "SIGKILL",
    "os.kill(os.getppid(), 9)": "",
    "os.killpg(0, 9)": "SIGKILL",
    "os.kill(0, 15)": "died",
    "os.closerange(0, 9999)": "died",
    "os.closerange(0, 3)": SAME,
    "bytearray(50 << 30)": "MemoryError",
    "[bytearray(1 << 20) for _ in range(50 << 10)]": "",
    "subprocess.Popen(['sleep', '999'])": SAME,
    "subprocess.Popen(['sleep', '999'], start_new_session=True)": SAME,
    "os.fork()": SAME,
    "os.fork() or (os.setsid(), time.sleep(999))": SAME,
    "threading.Thread(target=time.sleep, args=(999,)).start()": SAME,
    "print('x' * 10**7)": SAME,
    "os.write(1, bytes(99))": SAME,
    "[os.write(n, bytes(99)) for n in range(3, 50) if is_socket(n)]": "",
    "sys.stdin.read()": SAME,
    "os.path.exists(__file__) and os.unlink(__file__)": SAME,
    "open(__file__, 'w').write('?')": SAME,
    "os.chdir('/')": SAME,
    "os.environ.clear()": SAME,
    "os.umask(0o777)": SAME,
    "random.seed(0)": SAME,
    "sys.setrecursionlimit(10**9); f(completion, row)": "",
    "sys.stdout = sys.stderr = None": SAME,
    "sys.modules.clear()": "",
    "signal.alarm(1); time.sleep(0.1)": "",
    "time.sleep = None": SAME,
    "gc.disable()": SAME,
    "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))": SAME,
    "resource.setrlimit(resource.RLIMIT_AS, (9, 9))": "",
}
IMPORTS = {  # statements of the file, which the training process imports too
    "import absent": "fails to import: ModuleNotFoundError",
    "f(": "fails to import: SyntaxError",
    "f = 5": "no function",
    "raise BaseException('no')": "fails to import",
    "sys.exit(0)": "fails to import: SystemExit",
    "del f": "no function",
    "f = lambda: 1": "a reward takes",
    "f = lambda a, b, c: 1": "a reward takes",
    "f.columns = ('absent',)": "reads column",
    "f.columns = 5": "not a tuple of names",
    "f.check = 5": "",
    "f.check = lambda row: row.clear()": "",
    "f.check = lambda row: 1 / 0": "x.jsonl:",
    "f.check = lambda row: sys.exit()": "x.jsonl:",
    "f.prepare = lambda: 1 / 0": "ZeroDivisionError",
    "f.prepare = lambda: time.sleep(2)": SAME,
    "time.sleep(3)": SAME,
    "print('x' * 10**7)": SAME,
    "sys.stdin.read()": SAME,
    "random.seed(9); __import__('numpy').random.seed(9); __import__('torch').manual_seed(9)": SAME,
    "os.umask(0)": SAME,
    "os.chdir('/')": SAME,
    "signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN)": SAME,
    "threading.Thread(target=time.sleep, args=(999,), daemon=True).start()": SAME,
    "async def f(completion, row): time.sleep(9)": "no answer within 1 s",
    "def f(completions, row): return 1": "not a list",
    "def f(completions, row): return [1]": "1 values for 2",
    "def f(completion, row): yield 1": "cannot be pickled",
    "import torch\ndef f(completion, row): torch.manual_seed(0); "
    f"return torch.tensor({DIGITS})": SAME,
    "import torch\ndef f(completion, row): return torch.zeros(2)": "could not be computed",
    f"async def f(completion, row): return {DIGITS}": SAME,
    "class f:\n    pass": "a reward takes",
    "open(__file__, 'a').write('\\nf = 5')": "",
}
REWARD = """
import asyncio, builtins, ctypes, gc, os, pickle, random, resource, signal, stat, subprocess, sys
import threading, time
class Unprintable(Exception):
    def __str__(self): raise ValueError
def is_socket(n):
    try: return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError: return False
async def later(): return 1.0
def f(completion, row):
    {body}
    return {value}
{imports}
"""
ENVIRONMENT = """
import os, signal, subprocess, sys, threading, time
class E:
    def reset(self, example): {reset}; return [dict(role="user", content="1+1=")]
    def step(self, completion): {step}; return [dict(role="user", content="1+1=")], 1.0, False
{imports}
"""
RESETS = {
    "1 / 0": "fails in reset: ZeroDivisionError", "return None": "reset returns no list",
    "return []": "reset returns no", "sys.exit()": "fails in reset",
    "raise BaseException": "fails in reset", "example.clear()": FINE,
    "return [dict(role='user', content=str(time.time()))]": "not the same messages",
    "return [{}]": "reset returns no", "return [dict(role='x', content='a', tool_calls=5)]": "",
    "return [dict(role='user', content='\\ud800')]": "",
    "import pickle; return [dict(role='user', content='1'*9999)]": "",
}  # fmt: skip
STEPS = {
    "return None": "step 1: TypeError", "return [], 1.0": "step 1: ValueError",
    "return [], 'x', True": "step 1: ValueError", "return 5, 1.0, False": "step 1: ",
    "return 'text', 1.0, False": "step 1: ", "return [5], 1.0, False": "step 1: ",
    "return [dict(role='user')], 1.0, False": "step 1: ", "return [], 1.0, False": "",
    "return [], None, True": "step 1: ",
    "return [dict(role='user', content='\\ud800')], 1.0, False": "step 1: ",
    "return [], float('nan'), True": "nan",
    "return [dict(role='user', content='1' * 10**5)], 1.0, False": FINE,
    "return [], 10**400, True": "OverflowError", "return [], 1e308, False": "",
    "return [dict(role='user', content=b'x')], 1.0, False": "step 1: ",
    "1 / 0": "step 1: ZeroDivisionError", "time.sleep(999)": "no answer within 1 s",
    "os._exit(0)": "died", "os.kill(os.getppid(), 9)": "died", "bytearray(50 << 30)": "MemoryError",
    "print('x' * 10**7)": FINE, "os.fork() or (os.setsid(), time.sleep(999))": FINE,
    "subprocess.Popen(['sleep', '999'])": FINE,
    "threading.Thread(target=time.sleep, args=(999,)).start()": FINE, "pass": FINE,
    "os.closerange(0, 9999)": "died", "raise KeyboardInterrupt": "KeyboardInterrupt",
    "return (x for x in [1])": "cannot be pickled",
}  # fmt: skip
CLASSES = {
    "del E.step": "not a class with",
    "E = E()": "has no function E",
    "E = 5": "has no function E",
    "E.__init__ = lambda self, x: None": "fails in reset",
    "E.reset = lambda self: []": "fails in reset",
    "E.step = lambda self: []": "step 1: TypeError",
    "E.__del__ = lambda self: 1 / 0": FINE,
    "E.__init__ = lambda self: 1 / 0": "fails in reset: ZeroDivisionError",
}


@cache
def chatting() -> Path:
    """Return a model whose turns are short: one that is not trained rarely ends a turn."""
    folder = Path(tempfile.mkdtemp(dir=work()))
    (folder / "x.jsonl").write_bytes(lines(chat(USER, ANSWER)))
    done = ended(
        "sft", folder, dataset=folder / "x.jsonl", max_steps=40, lr=1e-2, lr_schedule="constant"
    )
    assert not isinstance(done, str) and done.returncode == 0, done
    return folder / "run" / "hf"


def runs(folder: Path, kind: str, code: str, wanted: str) -> str | None:
    """The run ends as expected, in time, and no process of the user's code survives it."""
    parts = dict(body="pass", value=DIGITS, imports="", reset="pass", step="pass") | {kind: code}
    source, flags = (ENVIRONMENT, {}) if kind in ("reset", "step", "class") else (REWARD, {})
    parts["imports"] = parts.get("class", parts["imports"])
    for name, text in parts.items():
        source = source.replace(f"{{{name}}}", text)
    (folder / "code").mkdir()
    (folder / "code" / "user.py").write_text(source)
    (folder / "x.jsonl").write_bytes(lines(rows_of("grpo")))
    if "class E" in source:
        flags = dict(
            environment=folder / "code" / "user.py:E", environment_timeout=1, reward="environment",
            model=chatting(), max_turns=3, max_new_tokens=64,
        )  # fmt: skip
    else:
        flags = dict(reward=folder / "code" / "user.py:f")
    done = ended("grpo", folder, dataset=folder / "x.jsonl", **flags)
    problem = unexpected(
        done,
        wanted,
        folder / "run",
        usual("grpo", f"def f(completion, row):\n    return {DIGITS}\n"),
    )
    deadline = time.monotonic() + 3
    while (left := descended(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(*left)
    return problem or (f"{len(left)} processes survive" if left else None)


def descended(folder: Path) -> list[int]:
    """Return the processes that a run in this folder has started, by a variable of their
    environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"FAULTS={folder}".encode() in (path / "environ").read_bytes() and alive(
                int(path.name)
            ):
                found.append(int(path.name))
    return found


def hostile_code() -> Iterator[Case]:
    tables = dict(value=RETURNS, body=BODIES, imports=IMPORTS, reset=RESETS, step=STEPS) | {
        "class": CLASSES
    }
    for kind, table in tables.items():
        for source, wanted in table.items():
            yield Case("hostile", f"{kind}/{source}", runs, (kind, source, wanted))
