"""Confinement of the calling process, for good, before child.py runs untrusted source in it.

- limits on memory, file size and CPU time, no capabilities, no new privileges, death with the
  parent;
- Landlock: the process may read the standard library and shared libraries, and read and write
  regular files of its own directory, but not delete or rename them, so that the parent can count
  them. The *names* and sizes of other files are not hidden;
- seccomp: only the system calls of `ALLOWED`: no other process, no network, no signals, no change
  of metadata.

Pure ctypes, without imports from `common`: the child runs without the project on its path.
"""

import ctypes
import os
import resource
import struct
from itertools import chain

# the parent kills a process with more; RLIMIT_NPROC counts all processes of a user, not for root
THREADS = 64
OPEN_FILES = 64
STACK_MIB = 512


def confine(parent: int, memory_mib: int, file_mib: int, cpu_seconds: int, unsafe: bool) -> None:
    """Apply all layers; the current directory may be written. `parent`: the process id of the
    parent.

    Raises `OSError` naming a layer that this machine does not have; with `unsafe` it is left out.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for apply, *arguments in (
        (limit_resources, memory_mib, file_mib, cpu_seconds),
        (drop_privileges, libc, parent),
        (restrict_files, libc),
        (restrict_calls, libc),
    ):
        try:
            apply(*arguments)
        except (OSError, ValueError, AttributeError) as error:  # the last: no C library of Linux
            if not unsafe:
                raise OSError(str(error)) from error


# ---- limits and privileges ----


def limit_resources(memory_mib: int, file_mib: int, cpu_seconds: int) -> None:
    """Limit address space, files and CPU time, which is a second line of defence behind the
    parent's clock."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_FSIZE, file_mib << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_STACK, STACK_MIB << 20),  # of the main thread: for deep recursion
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, hard if limit == resource.RLIMIT_STACK else value))


def drop_privileges(libc: ctypes.CDLL, parent: int) -> None:
    # no_new_privs; SIGKILL when the parent dies; not dumpable
    for option, value in ((38, 1), (1, 9), (4, 0)):
        check(libc.prctl(option, value, 0, 0, 0), "prctl")
    if os.getppid() != parent:  # it had died before PR_SET_PDEATHSIG
        os._exit(1)
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")


def check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


# ---- Landlock ----

WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
MAKE_REG = 1 << 8
TRUNCATE = 1 << 14
# By ABI version: rights on files (the last is IOCTL_DEV), on TCP (bind, connect), scopes (abstract
# sockets, signals).
FILE_RIGHTS = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15, 5: 1 << 16}
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")


def restrict_files(libc: ctypes.CDLL) -> None:
    """Take away every right that Landlock handles, except those granted here."""

    def call(number: int, *args: object) -> int:
        words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in (number, *args)]
        return check(libc.syscall(*words), "Landlock")

    abi = call(444, None, 0, 1)
    every = FILE_RIGHTS[min(abi, 5)] - 1
    attributes = struct.pack("QQQ", every, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    ruleset = call(444, attributes, 8 if abi < 4 else 16 if abi < 6 else 24, 0)

    def grant(path: str, rights: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this machine
            return
        call(445, ruleset, 1, struct.pack("=Qi", rights & every, fd), 0)
        os.close(fd)

    library = os.path.dirname(os.__file__)
    grant(library, READ_DIR)  # it may contain other packages: grant its entries without those
    with os.scandir(library) as entries:
        for entry in entries:
            if entry.name not in ("site-packages", "dist-packages"):
                grant(entry.path, READ_FILE | READ_DIR if entry.is_dir() else READ_FILE)
    for folder in shared_library_folders():
        if library.startswith(folder + "/"):
            with os.scandir(folder) as entries:
                for entry in entries:
                    if ".so" in entry.name and entry.is_file():
                        grant(entry.path, READ_FILE)
        else:
            grant(folder, READ_FILE | READ_DIR)
    grant("/usr/share/zoneinfo", READ_FILE | READ_DIR)
    for path in FILES:
        grant(path, READ_FILE)
    grant("/dev/null", READ_FILE | WRITE_FILE)
    grant(".", READ_FILE | READ_DIR | WRITE_FILE | MAKE_REG | TRUNCATE)
    call(446, ruleset, 1 if abi >= 7 else 0)  # 1: do not fill the audit log with refusals
    os.close(ruleset)


def shared_library_folders() -> set[str]:
    """Return the folders of the libraries of this process: extension modules that it may still load
    are there too."""
    folders = set()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].rstrip("\n")
            if ".so" in path and path.startswith("/"):
                folders.add(os.path.dirname(os.path.realpath(path)))
    return folders - {"/"}


# ---- seccomp ----

# name: number on x86-64, on aarch64. Python needs these to compute, to use files and to run
# threads.
ALLOWED = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    "ftruncate": (77, 46),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "getrandom": (318, 278),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# name: (numbers, alternatives); an alternative is {argument: its lower 32 bits}, NULL an argument
# that must be zero.
NULL = -1
SOME = {
    # a thread, with exactly the flags of glibc or musl: never a process
    "clone": ((56, 220), [{0: 0x3D0F00}, {0: 0x7D0F00}]),
    # reading limits, and setting RLIMIT_STACK, which contest programs often raise
    "prlimit64": ((302, 261), [{0: 0, 2: NULL}, {0: 0, 1: 3}]),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": ((16, 29), [{1: c} for c in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)]),
    # F_DUPFD, F_[GS]ETFD, F_[GS]ETFL, locks, F_DUPFD_CLOEXEC. Not F_SETOWN, F_SETSIG: they send
    # signals; no leases.
    "fcntl": ((72, 25), [{1: c} for c in (0, 1, 2, 3, 4, 5, 6, 7, 1030)]),
}
CLONE3 = (435, 435)
# name: (numbers, which argument the flags are)
OPEN = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
# column of the tables, AUDIT_ARCH
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

# instructions of BPF, and values that it returns
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_OF = 0x45
MASK = 0x54
LEAVE = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050001
ENOSYS = 0x00050026
# flags of open
O_TRUNC = 0o1000
O_TMPFILE = 0o20000000


def seccomp_filter(machine: str) -> bytes:
    """Return the BPF program: an array of struct sock_filter. Loads take 32 bits of struct
    seccomp_data."""
    column, audit = ARCHITECTURES[machine]
    # Numbers of other architectures (int 0x80) and of x32 have other meanings: kill.
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (LEAVE, 0, 0, KILL)]
    code += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, 0x40000000), (LEAVE, 0, 0, KILL)]
    for numbers in ALLOWED.values():
        if numbers[column] is not None:
            code += [(EQUAL, 0, 1, numbers[column]), (LEAVE, 0, 0, ALLOW)]
    # ENOSYS: a filter cannot read the flags of clone3, which are in memory; the C library then uses
    # clone.
    code += [(EQUAL, 0, 1, CLONE3[column]), (LEAVE, 0, 0, ENOSYS)]
    for numbers, alternatives in SOME.values():
        body = [*chain(*map(allow_if, alternatives)), (LEAVE, 0, 0, EPERM)]
        code += [(EQUAL, 0, len(body), numbers[column]), *body]
    # Landlock requires no right for access mode 3, nor for O_RDONLY | O_TRUNC before Linux 6.2;
    # files of O_TMPFILE have no name, so the parent cannot count them.
    for numbers, arg in OPEN.values():
        if numbers[column] is not None:
            code += [(EQUAL, 0, 8, numbers[column]), (LOAD, 0, 0, 16 + 8 * arg)]
            code += [(ANY_OF, 4, 0, O_TMPFILE), (MASK, 0, 0, O_TRUNC | 3), (EQUAL, 2, 0, O_TRUNC)]
            code += [(MASK, 0, 0, 3), (EQUAL, 0, 1, 3), (LEAVE, 0, 0, EPERM), (LEAVE, 0, 0, ALLOW)]
    code += [(LEAVE, 0, 0, EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def allow_if(conditions: dict[int, int]) -> list[tuple]:
    """Return instructions that allow the call if its arguments have these lower 32 bits."""
    words = [(16 + 8 * arg, 0 if value == NULL else value) for arg, value in conditions.items()]
    words += [(20 + 8 * arg, 0) for arg, value in conditions.items() if value == NULL]
    body = []
    for i, (offset, value) in enumerate(words):
        body += [(LOAD, 0, 0, offset), (EQUAL, 0, 2 * (len(words) - i) - 1, value)]
    return [*body, (LEAVE, 0, 0, ALLOW)]


def restrict_calls(libc: ctypes.CDLL) -> None:
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(f"seccomp: no table of system calls for {machine}")
    code = seccomp_filter(machine)
    program = ctypes.create_string_buffer(code)
    fprog = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
    check(libc.prctl(22, 2, fprog, 0, 0), "seccomp")  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
