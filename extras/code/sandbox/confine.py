"""Confines the calling process for good. child.py does this before it runs untrusted source.

- limits on memory, file size and CPU time; no capabilities, no new privileges; the process dies
  with its parent;
- Landlock: the process may read the standard library and shared libraries. It may read and write
  regular files of its own directory, but not delete or rename them, so that the parent can count
  them. The *names* and sizes of other files are not hidden;
- seccomp: only the system calls in `ALLOWED`: no other process, no network, no signals, no change
  of metadata.

Only ctypes, no imports from `common`: the child runs without the project on its path.
"""

import ctypes
import os
import resource
import struct

MEMORY_MIB = 512  # address space; the interpreter takes 50
FILE_MIB = 16  # largest file
OPEN_FILES = 64
STACK_MIB = 512
# The parent kills a process with more threads. RLIMIT_NPROC would not do: it counts all processes
# of a user, and root is exempt.
THREADS = 64

try:
    seccomp = ctypes.CDLL("libseccomp.so.2")  # now: Landlock may hide it
except OSError:
    seccomp = None


def confine(parent: int, cpu_seconds: int, unsafe: bool) -> None:
    """Apply all layers. Afterwards the process may only write to its current directory. `parent`:
    its parent's process id.

    Raises `OSError` naming a layer that this machine lacks; with `unsafe` it is left out."""
    libc = ctypes.CDLL(None, use_errno=True)
    for apply, *arguments in (
        (limit_resources, cpu_seconds),
        (drop_privileges, libc, parent),
        (restrict_files, libc),
        (restrict_calls,),
    ):
        try:
            apply(*arguments)
        except (OSError, ValueError, AttributeError) as error:  # the last: no C library of Linux
            if not unsafe:
                raise OSError(str(error)) from error


# ---- limits and privileges ----


def limit_resources(cpu_seconds: int) -> None:
    """Limit address space, files and CPU time. The CPU limit backs up the parent's clock."""
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_MIB << 20),
        (resource.RLIMIT_FSIZE, FILE_MIB << 20),
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
# By ABI version: the rights on files (the last is IOCTL_DEV). Below, also on TCP (bind, connect),
# and scopes (abstract sockets, signals).
FILE_RIGHTS = {1: 1 << 13, 2: 1 << 14, 3: 1 << 15, 4: 1 << 15, 5: 1 << 16}
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")


def restrict_files(libc: ctypes.CDLL) -> None:
    """Take away every right that Landlock handles, except those that are granted here."""

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
    """Return the folders of the shared libraries of this process. They also have the extension
    modules that it may load later."""
    folders = set()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].rstrip("\n")
            if ".so" in path and path.startswith("/"):
                folders.add(os.path.dirname(os.path.realpath(path)))
    return folders - {"/"}


# ---- seccomp ----

# Python needs these to compute, to use files and to run threads. Names that the machine lacks are
# skipped.
ALLOWED = """
    read write readv writev pread64 pwrite64 close close_range lseek stat lstat fstat newfstatat
    fstatat64 statx access faccessat faccessat2 readlink readlinkat getdents64 getcwd chdir fchdir
    umask ftruncate dup dup2 dup3 poll ppoll select pselect6
    mmap munmap mprotect mremap brk madvise
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack pause alarm getitimer setitimer
    nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage
    futex set_robust_list rseq sched_yield sched_getaffinity restart_syscall
    getrandom uname sysinfo getpid getppid gettid getuid geteuid getgid getegid exit exit_group
"""
WORD = 0xFFFFFFFF  # the kernel reads the lower 32 bits of an int
ALL = 0xFFFFFFFFFFFFFFFF
# flags of open
O_TRUNC = 0o1000
O_TMPFILE = 0o20000000
# Landlock requires no right for access mode 3, nor for O_RDONLY | O_TRUNC before Linux 6.2; files
# of O_TMPFILE have no name, so the parent cannot count them.
OPEN = ((O_TMPFILE | O_TRUNC | 3, 0), (O_TMPFILE | 3, 1), (O_TMPFILE | 3, 2))
# name: alternatives, each of (argument, its bits that count, their value)
SOME = {
    # a thread, with exactly the flags of glibc or musl: never a process
    "clone": [[(0, WORD, 0x3D0F00)], [(0, WORD, 0x7D0F00)]],
    # reading limits, and setting RLIMIT_STACK, which contest programs often raise
    "prlimit64": [[(0, WORD, 0), (2, ALL, 0)], [(0, WORD, 0), (1, WORD, 3)]],
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl": [[(1, WORD, c)] for c in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
    # F_DUPFD, F_[GS]ETFD, F_[GS]ETFL, locks, F_DUPFD_CLOEXEC. Not F_SETOWN, F_SETSIG: they send
    # signals; no leases.
    "fcntl": [[(1, WORD, c)] for c in (0, 1, 2, 3, 4, 5, 6, 7, 1030)],
    "open": [[(1, *bits)] for bits in OPEN],
    "openat": [[(2, *bits)] for bits in OPEN],
}
CLONE3 = 435
ALLOW = 0x7FFF0000
KILL = 0x80000000
EPERM = 0x00050001
ENOSYS = 0x00050026
MASKED_EQUAL = 7
BAD_ARCHITECTURE = 2


def restrict_calls() -> None:
    """Allow the system calls above and refuse all others with EPERM. The numbers of another
    architecture (int 0x80, x32) have other meanings, so their use kills the process."""
    if seccomp is None:
        raise OSError("seccomp: the library libseccomp.so.2 is missing")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(EPERM))

    def call(function: str, *args: object) -> None:
        if (result := getattr(seccomp, function)(rules, *args)) < 0:
            raise OSError(-result, f"seccomp: {os.strerror(-result)}")

    for name, alternatives in (dict.fromkeys(ALLOWED.split(), [[]]) | SOME).items():
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            continue
        for conditions in alternatives:
            words = [(arg, MASKED_EQUAL, mask, value) for arg, mask, value in conditions]
            array = b"".join(struct.pack("IIQQ", *word) for word in words)
            call("seccomp_rule_add_array", ALLOW, number, len(words), array)
    # A filter cannot read the flags of clone3, which are in memory; the C library then uses clone.
    call("seccomp_rule_add_array", ENOSYS, CLONE3, 0, None)
    call("seccomp_attr_set", BAD_ARCHITECTURE, KILL)
    call("seccomp_load")
