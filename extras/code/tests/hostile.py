# ruff: noqa: E501 (the programs)
"""Programs that try to escape from the sandbox, and the expected outcome of each. Standard library
only: `test_sandbox.py` runs those whose outcome may depend on the user or the interpreter a second
time, with others.

A program prints ESCAPED when a forbidden action succeeds; BAIT is replaced by a folder beside the
program's folder that it may neither read nor change, PARENT by the process id of its parent."""

import contextlib
import json
import os
import resource
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHORT = 0.2  # seconds for an endless program
LONG = 300.0  # for the others, which a busy machine must not cut short: none takes nearly as long
SECRET = "S3CRET-8c1f"

PRELUDE = r"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
def attempt(what, *args, **kwargs):
    try:
        result = what(*args, **kwargs)
    except Exception:
        return None
    print("ESCAPED", getattr(what, "__name__", what), args, result, flush=True)
    return result
def raw(number, *args):
    if x86:
        ctypes.set_errno(0)
        args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
        result = libc.syscall(ctypes.c_long(number), *args)
        if result != -1:
            print("ESCAPED syscall", number, result, flush=True)
        return result
def read(path):
    with open(path, "rb") as f:
        return f.read(100)
def write(path):
    with open(path, "w") as f:
        f.write("x")
"""
DRIP = """
import time
def drip(times=1):
    for _ in range(times):
        os.write(1, b".")
        if times > 1: time.sleep(0.002)
"""
SAY = """
said = []
def print(*args, **kwargs): said.append(" ".join(map(str, args)))
"""

# name: source
ATTACKS = {
    # ---- files ----
    "write files": """
for path in ("/tmp/x-escaped", "../x-escaped", "BAIT/x", "BAIT/file", os.path.expanduser("~/x-escaped"), "/dev/shm/x-escaped",
             "/var/tmp/x-escaped", "/etc/x-escaped", "/dev/kmsg", "/dev/tty", "/proc/self/oom_score_adj", "/proc/self/mem"):
    attempt(write, path)
    attempt(os.open, path, os.O_RDWR | os.O_APPEND)
    attempt(os.open, os.path.dirname(path), os.O_RDWR | os.O_TMPFILE)
""",
    "open without a right": """
for path in ("BAIT/file", "/etc/passwd", "/dev/ptmx", "/dev/tty", os.__file__, "/dev/null", "."):
    attempt(os.open, path, 3)
    attempt(os.open, path, 3 | os.O_TRUNC)
    attempt(os.open, path, 3 | os.O_CREAT)
    attempt(os.open, path, os.O_RDONLY | os.O_TRUNC)
    raw(2, path.encode(), 3); raw(2, path.encode(), os.O_TRUNC)
attempt(os.open, ".", os.O_TMPFILE | os.O_RDWR)
attempt(os.open, ".", os.O_TMPFILE | os.O_WRONLY)
write("mine")
attempt(os.open, "mine", os.O_RDONLY | os.O_TRUNC)
""",
    "read files": """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/1/environ", "/proc/self/environ", "/proc/self/maps",
             "/proc/self/status", "/proc/PARENT/environ", "/proc/PARENT/mem", "/proc/PARENT/cmdline", "/proc/PARENT/maps",
             "/proc/cpuinfo", "/proc/net/tcp", "/sys/kernel/notes", "/proc/self/root/etc/passwd", "/proc/PARENT/cwd/pyproject.toml",
             "/proc/self/fd/0", "/dev/mem", "/dev/vda", "/dev/sda", "/dev/nvidia0", "BAIT/file", "CODE/sandbox/program.py",
             "CODE/sandbox/confine.py", "TESTS/hostile.py", os.path.expanduser("~/.bashrc"), "/root/.bashrc"):
    attempt(read, path)
    attempt(os.listdir, os.path.dirname(path) if "proc" not in path else "/proc")
attempt(os.scandir, "..")
attempt(read, "../" + os.path.basename("BAIT") + "/file")
fd = os.open("BAIT/file", os.O_PATH)
attempt(os.read, fd, 10)
attempt(read, f"/proc/self/fd/{fd}")
attempt(os.open, "", os.O_RDONLY, dir_fd=fd)
directory = os.open("BAIT", os.O_PATH)
attempt(os.open, "file", os.O_RDONLY, dir_fd=directory)
""",
    "packages of the interpreter": """
import sysconfig
for name in ("purelib", "platlib"):
    path = sysconfig.get_paths()[name]
    for root, folders, files in os.walk(path):
        folders.sort()
        for file in sorted(files)[:3]:
            attempt(read, os.path.join(root, file))
        if root.count("/") > path.count("/") + 1:
            break
try:
    import pip
    print("ESCAPED", pip)
except ImportError:
    pass
""",
    "environment": """
import ctypes
for name in ("HOME", "PATH", "USER", "HOSTILE_TEST"):
    if name in os.environ:
        print("ESCAPED", name)
libc.getenv.restype = ctypes.c_char_p
if libc.getenv(b"HOSTILE_TEST"):
    print("ESCAPED getenv")
""",
    "metadata": """
import shutil
for path in ("BAIT/file", "BAIT", b"BAIT/file"):
    attempt(os.chmod, path, 0o777)
    attempt(os.chown, path, os.getuid(), os.getgid())
    attempt(os.lchown, path, os.getuid(), os.getgid())
    attempt(os.utime, path)
    attempt(os.utime, path, (0, 0), follow_symlinks=False)
    attempt(os.truncate, path, 0)
    attempt(os.setxattr, path, "user.x", b"1")
    attempt(os.removexattr, path, "user.x")
    attempt(os.listxattr, path)
    fd = os.open(path, os.O_PATH)
    for f in (os.fchmod, os.chmod):
        attempt(f, fd, 0o777)
    attempt(os.utime, fd)
    attempt(os.truncate, fd, 0)
attempt(os.chmod, ".", 0o755)
attempt(os.utime, ".")
""",
    "links and renames": """
for target in ("BAIT/file", "BAIT"):
    attempt(os.symlink, target, "link")
    attempt(os.link, target, "hard")
    attempt(os.rename, target, "moved")
    attempt(os.rename, "BAIT/file", "BAIT/other")
    attempt(os.remove, target)
    attempt(os.rmdir, target)
write("mine")
attempt(os.rename, "mine", "BAIT/mine")
attempt(os.replace, "mine", "BAIT/file")
attempt(os.link, "mine", "BAIT/mine")
attempt(os.link, "mine", "mine2")
attempt(os.mkdir, "folder")
attempt(os.mkdir, "BAIT/folder")
attempt(os.mkfifo, "fifo")
attempt(os.mknod, "device", 0o600 | 0o020000, os.makedev(1, 3))
attempt(os.rmdir, os.getcwd())
attempt(os.remove, "mine")
attempt(os.rename, "mine", "mine3")
""",
    "import from the directory": """
for name in ("json", "re", "encodings", "child", "confine"):
    with open(name + ".py", "w") as f:
        f.write("print('ESCAPED import')")
import json, re, importlib
importlib.import_module("encodings")
""",
    # ---- processes ----
    "fork": """
attempt(os.fork)
attempt(os.forkpty)
attempt(os.posix_spawn, "/bin/true", ["true"], {})
attempt(os.posix_spawn, sys.executable, ["python"], {})
attempt(os.system, "true") if os.system("true") == 0 else None
attempt(os.execv, "/bin/sh", ["sh", "-c", "echo ESCAPED"])
attempt(os.execv, sys.executable, ["python", "-c", "print('ESCAPED')"])
for flags in (17, 0, 0x4100 | 17, 0x11200 | 17, 0x100 | 17, 0x3d0f00 | 0x2000, 0x3d0f00 | 0x10000000):
    raw(56, flags, 0, 0, 0, 0)
raw(435, ctypes.create_string_buffer(88), 88)
libc.vfork.restype = ctypes.c_int
if x86 and libc.vfork() == 0: os._exit(0)
""",
    "subprocess": """
import subprocess, multiprocessing
attempt(subprocess.run, ["/bin/true"])
attempt(subprocess.run, [sys.executable, "-c", "print('ESCAPED')"])
attempt(os.popen, "echo ESCAPED")
p = multiprocessing.get_context("fork").Process(target=print, args=("ESCAPED",))
attempt(p.start)
attempt(multiprocessing.get_context("spawn").Process(target=print).start)
attempt(multiprocessing.Pool, 2)
attempt(__import__("pty").spawn, "/bin/sh")
""",
    "fork bomb": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "thread bomb": """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(100,)).start()
    except RuntimeError: pass
""",
    "exec": """
attempt(os.memfd_create, "x")
write("program")
attempt(os.execve, "./program", ["x"], {})
""",
    "signals": """
import signal
for pid in (PARENT, -1, 0, 1, -PARENT):
    attempt(os.kill, pid, 0)
    attempt(os.kill, pid, signal.SIGURG)  # harmless: a broken sandbox must fail the test, not the machine
attempt(os.killpg, 0, signal.SIGURG)
""",
    "signals by fcntl": """
import fcntl
r, w = os.dup(0), os.dup(1)
for fd in range(10):
    for command, argument in ((8, PARENT), (10, 23), (15, ctypes.create_string_buffer(8)), (1024, 0), (1026, 1), (1031, 1 << 20), (1033, 15)):
        attempt(fcntl.fcntl, fd, command, argument if isinstance(argument, int) else bytes(argument))
    for command in (0x8901, 0x8902, 0x5452, 0x5412, 0x540E, 0x5403, 0x5422):
        attempt(fcntl.ioctl, fd, command, PARENT)
attempt(fcntl.flock, os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)
attempt(fcntl.fcntl, os.open(os.__file__, os.O_RDONLY), 1024, 1)
""",
    "the parent's limits": """
import resource
limits = (ctypes.c_ulong * 2)(1, 1)
raw(302, PARENT, 4, limits, None); raw(302, PARENT, 4, None, limits); raw(302, 0, 4, limits, None)
attempt(resource.prlimit, PARENT, resource.RLIMIT_CORE, (1, 1))
attempt(os.setpriority, os.PRIO_PROCESS, PARENT, 19)
attempt(os.nice, 5)
attempt(os.sched_setaffinity, PARENT, {0})
attempt(os.sched_setscheduler, PARENT, os.SCHED_IDLE, os.sched_param(0))
attempt(os.setpgid, 0, PARENT); attempt(os.setsid); attempt(os.chroot, ".")
""",
    "own limits": """
import resource
for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    for value in ((-1, -1), (1 << 40, 1 << 40), (100, 100)):
        attempt(resource.setrlimit, limit, value)
try: resource.setrlimit(resource.RLIMIT_STACK, (1 << 26, resource.getrlimit(resource.RLIMIT_STACK)[1]))
except Exception as e: print("harmless but refused", e)
attempt(os.setuid, 0 if os.getuid() else 65534); attempt(os.setgroups, []); attempt(os.initgroups, "root", 0)
""",
    "prctl": "for option in (1, 3, 4, 8, 15, 22, 23, 24, 35, 36, 38, 59):\n    if libc.prctl(option, 1, 0, 0, 0) >= 0: print('ESCAPED', option)",
    "every other system call": "OTHERS",
    "x32": "if x86: libc.syscall(ctypes.c_long(0x40000000 + 39)); print('ESCAPED x32')",
    "int 0x80": """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
if x86:
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    print("ESCAPED int 0x80")
""",
    # ---- network and IPC ----
    "network": """
import socket, urllib.request
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, 38, 40):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        attempt(socket.socket, family, kind)
attempt(socket.create_connection, ("127.0.0.1", 22), 1)
attempt(socket.socketpair)
attempt(urllib.request.urlopen, "http://127.0.0.1/", None, 1)
attempt(socket.getaddrinfo, "localhost", 80)
attempt(socket.gethostbyname, "example.com")
attempt(socket.socket, fileno=0)
""",
    "shared memory and queues": """
from multiprocessing import shared_memory
attempt(shared_memory.SharedMemory, "escaped", True, 100)
import multiprocessing
attempt(multiprocessing.Lock)
""",
    # ---- bombs ----
    "memory, slowly": "x = []\nwhile True: x.append('x' * 10**6)",
    "memory, swallowed": "x = []\nwhile True:\n    try: x.append(bytearray(10**7))\n    except MemoryError: pass",
    "memory, integer": "x = 1 << (1 << 40)\nprint('ESCAPED')\n10 ** 10 ** 9",
    "memory, mmap": """
import mmap
maps = []
while True:
    maps.append(mmap.mmap(-1, 64 << 20))
    for i in range(0, 64 << 20, 4096): maps[-1][i] = 1
    if len(maps) > 20: print("ESCAPED mmap")
""",
    "one big file": "with open('big', 'wb') as f:\n    for i in range(1000):\n        f.write(b'x' * (1 << 20))\nprint('ESCAPED')",
    "sparse file": "f = open('sparse', 'wb')\nattempt(f.truncate, 1 << 40)\nattempt(os.pwrite, f.fileno(), b'x', 1 << 40)",
    "many big files": "for i in range(10000):\n    with open(f'f{i}', 'wb') as f: f.write(b'x' * (8 << 20))\nprint('ESCAPED')",
    "many descriptors": "fds = []\nwhile True: fds.append(os.dup(0)); attempt(lambda: 1 / (len(fds) > 100))",
    "drips and makes files": DRIP + "for i in range(5000):\n    os.close(os.open(f'f{i}', os.O_CREAT | os.O_WRONLY))\n    i % 20 or drip()\ndrip(400)",
    "drips and starts threads": DRIP + """
attributes = ctypes.create_string_buffer(64)
libc.pthread_attr_init(attributes)
libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))
for i in range(1500):
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), attributes, libc.pause, None)
    i % 5 or drip()
drip(400)
""",
    "floods stdout": "while True: print('x' * 10000)",
    "floods stderr": "while True: os.write(2, b'x' * 65536)",
    "floods every descriptor": """
for fd in range(3, 64):
    try: os.set_blocking(fd, False)
    except OSError: pass
while True:
    for fd in range(64):
        try: os.write(fd, b'{"value": 1}' * 5000)
        except OSError: pass
""",
}  # fmt: skip
TROUBLES = {  # equal for every user
    # ---- ends ----
    "endless loop": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "waits for input": "os.close(0)\nimport time\nwhile True:\n    try: sys.stdin.read(1)\n    except Exception: time.sleep(0.1)",
    "ignores signals": """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
""",
    "exits with the code of memory errors": "os._exit(101)",
    "aborts": "os.abort()",
    "crashes": "ctypes.string_at(0)",
    "crashes in recursion": "sys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n + 'x')\ndef f(): f()\nf()",
    "deep recursion": "def f(): f()\nf()",
    "atexit loops": "import atexit\natexit.register(lambda: any(iter(int, 1)))",
    "finalizer loops": "class A:\n    def __del__(self):\n        while True: pass\na = A()",
    "threads outlive main": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
    "closes everything": "os.closerange(0, 1000)\nimport time\ntime.sleep(1000)",
    "redirects everything": "fd = os.open('out', os.O_RDWR | os.O_CREAT)\nfor i in range(64):\n    if i != fd:\n        try: os.dup2(fd, i)\n        except OSError: pass",
    "patches built-ins": "import builtins\nbuiltins.__import__ = builtins.open = builtins.exec = builtins.print = None\nos.write = os.read = None",
    "changes the directory": "os.chdir('/')\nattempt(write, 'x-escaped')\nattempt(read, 'etc/passwd')\nos.chdir('BAIT')\nattempt(write, 'x')\nattempt(read, 'file')",
    # ---- text ----
    "bytes that are no UTF-8": "os.write(1, b'\\xff\\xfe\\x00' * 100)",
    "surrogates": "sys.stdout.buffer.write('\\ud800'.encode('utf-8', 'surrogatepass'))\nprint('\\udc80', chr(0), '\\u202e')\nprint('\\ud800')",
    "NUL in the source": "x = 1\0\nprint('ESCAPED')",
    "a lone surrogate in the source": "x = '\ud800'\nprint('ESCAPED')",
    "10 MB of source": "x = 1\n" * 1_500_000 + "while True: pass",
    "nested source": "(" * 200_000,
    "another coding": "# coding: utf-16\nprint('ESCAPED')",
}  # fmt: skip
HOSTILE = ATTACKS | TROUBLES
# Possible endings of `run_program`; all others must end "ok". Programs that may reach the time
# limit have a short one. "*": any ending, for any limit.
EXPECTED = {
    "subprocess": {"ok"}, "fork bomb": {"time limit"}, "thread bomb": {"time limit", "thread limit", "memory limit"},
    "x32": {"killed by signal 31"}, "int 0x80": {"killed by signal 31"},
    "memory, slowly": {"memory limit"}, "memory, swallowed": {"time limit"},
    "memory, integer": {"memory limit", "exit code 1"}, "memory, mmap": {"exit code 1", "memory limit"},
    "one big file": {"exit code 1"}, "many big files": {"disk limit"}, "many descriptors": {"exit code 1"},
    "drips and makes files": {"disk limit"}, "drips and starts threads": {"thread limit"},
    "floods stdout": {"output limit"}, "floods stderr": {"time limit"}, "floods every descriptor": {"output limit"},
    "endless loop": {"time limit"}, "sleeps": {"time limit"}, "waits for input": {"time limit"},
    "ignores signals": {"time limit"}, "exits with the code of memory errors": {"memory limit"},
    "aborts": {"killed by signal 11", "killed by signal 6"}, "crashes": {"killed by signal 11"},
    "crashes in recursion": {"*"}, "deep recursion": {"exit code 1"}, "atexit loops": {"time limit"},
    "finalizer loops": {"time limit"}, "threads outlive main": {"time limit"}, "closes everything": {"time limit"},
    "redirects everything": {"*"}, "patches built-ins": {"*"}, "surrogates": {"exit code 1"},
    "NUL in the source": {"exit code 1"}, "a lone surrogate in the source": {"exit code 1"},
    "10 MB of source": {"time limit", "memory limit"}, "nested source": {"exit code 1", "memory limit"},
    "another coding": {"exit code 1"},
}  # fmt: skip


def every_other_call() -> str:
    """Return a program that calls every forbidden system call number with useless arguments."""
    from extras.code.sandbox.confine import ALLOWED, CLONE3, SOME, seccomp

    names = [*ALLOWED.split(), *SOME]
    known = {seccomp.seccomp_syscall_resolve_name(name.encode()) for name in names}
    # uretprobe and uprobe: the kernel bypasses the filter and kills other callers
    known |= {CLONE3, 335, 336}
    return f"""
if x86:
    for number in range(480):
        if number not in {known!r}:
            ctypes.set_errno(0)
            if libc.syscall(ctypes.c_long(number), -1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
                print("ESCAPED", number, ctypes.get_errno())
"""


def source_of(name: str, bait: str) -> str:
    source = HOSTILE[name]
    if len(source) < 100_000 and "coding" not in name:
        source = PRELUDE + source
    here = Path(__file__).resolve().parent
    for word, value in (("BAIT", bait), ("PARENT", str(os.getpid())), ("TESTS", str(here)), ("CODE", str(here.parent)),
                        ("OTHERS", every_other_call() if "OTHERS" in source else "")):  # fmt: skip
        source = source.replace(word, value)
    return source


def state_of(folder: str) -> list:
    """Return every property of the bait that a program could change."""
    found = []
    for path in [Path(folder), *sorted(Path(folder).rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        owner = (status.st_mode, status.st_uid, status.st_mtime_ns, status.st_size)
        found.append((str(path), owner, content, os.listxattr(path)))
    return found


def own_state() -> list:
    """Return every property of this process that a program could change, except its open files:
    other tests have some."""
    names = [name for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    folders = ("/tmp", "/dev/shm", "/var/tmp", "/etc", str(Path.home()), ".")
    escaped = [path for folder in folders for path in Path(folder).glob("x-escaped*")]
    scheduling = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0))
    return [*scheduling, os.getcwd(), limits, escaped]


def left_over() -> list[str]:
    """Return the folders of programs, and the child processes that still run or were not waited
    for."""
    folders = [p for p in os.listdir(tempfile.gettempdir()) if p.startswith("onefile-sandbox-")]
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read()
            if parent == str(os.getpid()) and (b"child.main" in line or state == "Z"):
                processes.append(f"{pid} {state}")
    return folders + processes


def attack(name: str, bait: str) -> list[str]:
    """Run one program in both ways and return its violations."""
    from extras.code.sandbox.program import Limits, Program, ProgramError, run_program

    source, wrong, expected = source_of(name, bait), [], EXPECTED.get(name, {"ok"})
    seconds = SHORT if expected & {"time limit", "*"} else LONG
    outcome = run_program(source, "", Limits(seconds=seconds))
    texts = [outcome.stdout]
    if not expected & {outcome.status, "*"}:
        wrong.append(f"status {outcome.status}: {outcome.stdout[:300]}")
    try:  # one may take over its own call, and then it waits
        program = Program(source.replace(PRELUDE, SAY + PRELUDE), Limits(seconds=min(seconds, 10)))
        with contextlib.closing(program):
            texts.append(repr(program.call("said.copy")))
            program.call("said")
            wrong.append("a list was called")
    except ProgramError:
        pass
    return wrong + [text[:500] for text in texts if "ESCAPED" in text or SECRET in text]


def run_all(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the violations of each program; the key "" has the files and processes left behind."""
    from extras.code.sandbox.program import run_program

    os.environ["HOSTILE_TEST"] = SECRET
    with (
        tempfile.TemporaryDirectory(prefix="bait-") as bait,
        tempfile.TemporaryDirectory() as tempfile.tempdir,
    ):
        Path(bait, "file").write_text(SECRET, encoding="utf-8")
        before, threads, left = [state_of(bait), own_state()], threading.active_count(), left_over()
        with ThreadPoolExecutor(6) as pool:
            wrong = dict(zip(names, pool.map(lambda name: attack(name, bait), names), strict=True))
        after = [state_of(bait), own_state()]
        bad = [
            f"changed: {one} {other}"
            for one, other in zip(before, after, strict=True)
            if one != other
        ]
        if threading.active_count() > threads:
            bad.append("threads are left")
        bad += [f"left over: {what}" for what in set(left_over()) - set(left)]
    tempfile.tempdir = None
    if run_program("print(input() * 2)", "ab").stdout != "abab\n":
        bad.append("a good program does not run any more")
    return wrong | {"": bad}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from extras.code.sandbox.program import problem

    json.dump(dict(problem=problem(), wrong={} if problem() else run_all(ATTACKS)), sys.stdout)
