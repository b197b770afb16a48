"""Confinement: system calls and files that a confined process may use, and missing layers. Hostile
programs are in hostile.py and test_program.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE

from extras.code.sandbox import confine, process, program
from extras.code.sandbox.program import Limits, run_program

confined = pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))
LIMITS = Limits(seconds=PATIENCE)


@confined
def test_privileges_are_dropped(monkeypatch):
    """The child reads its own status before it loses access."""
    look = "print(open('/proc/self/status').read(), 'dumpable', libc.prctl(3), flush=True)"
    start = process.START.replace(
        "child.main", f"confine.restrict_files = lambda libc: {look}; child.main"
    )
    monkeypatch.setattr(process, "START", start)
    seen = run_program("", "", LIMITS).stdout
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert f"{name}:\t0000000000000000\n" in seen
    assert "NoNewPrivs:\t1\n" in seen and "dumpable 0" in seen


@pytest.mark.slow
@confined
def test_standard_library_can_be_imported():
    """The test imports every available module, except those with side effects at import."""
    skip = {
        "antigravity",
        "this",
        "idlelib",
        "turtledemo",
        "test",
        "lib2to3",
        "msilib",
        "nt",
        "tkinter",
        "turtle",
    }
    names = sorted(name for name in sys.stdlib_module_names - skip if not name.startswith("_"))
    source = (
        f"import importlib\nfailed = {{}}\nfor name in {names!r}:\n"
        "    try: importlib.import_module(name)\n"
        "    except BaseException as e: failed[name] = repr(e)\nprint(failed)"
    )
    python = getattr(sys, "_base_executable", sys.executable)
    free = subprocess.run(
        [python, "-I", "-S", "-B", "-X", "utf8", "-W", "ignore", "-c", source],
        capture_output=True,
        text=True,
    )
    outcome = run_program(source, "", LIMITS)
    assert outcome.status == "ok" and outcome.stdout == free.stdout


@confined
@pytest.mark.parametrize("layer", ["restrict_files", "restrict_calls"])
def test_problem_detects_a_missing_layer(monkeypatch, layer):
    """The layer is skipped silently, or refused by the kernel."""
    with monkeypatch.context() as patch:
        skip = f"confine.{layer} = lambda libc: None; child.main"
        patch.setattr(process, "START", process.START.replace("child.main", skip))
        name = "Landlock" if layer == "restrict_files" else "seccomp"
        assert name in program.problem.__wrapped__()
    with monkeypatch.context() as patch:
        refuse = f"confine.{layer} = lambda libc: confine.check(-1, 'no such layer'); child.main"
        patch.setattr(process, "START", process.START.replace("child.main", refuse))
        assert "no such layer" in program.problem.__wrapped__()
        with pytest.raises(RuntimeError, match="could not be confined: .*no such layer"):
            run_program("print(1)")
        assert run_program("print(1)", "", LIMITS, unsafe=True).stdout == "1\n"
        left = "import os; os.fork()" if layer == "restrict_files" else "open('/etc/passwd')"
        assert run_program(left, "", LIMITS, unsafe=True).status == "exit code 1", (
            "the other layers still hold"
        )


# ---- the filter of system calls ----

HEADERS = {
    0: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    1: "/usr/include/asm-generic/unistd.h",
}


@pytest.mark.parametrize("column", HEADERS)
def test_system_call_numbers_equal_the_kernel_headers(column):
    """aarch64 uses the generic numbers; some names differ there."""
    if not Path(HEADERS[column]).exists():
        pytest.skip(f"no {HEADERS[column]}")
    text = Path(HEADERS[column]).read_text()
    found = dict(re.findall(r"#define (__NR(?:3264)?_\w+) (\d+)\b", text))
    numbers = {
        name.removeprefix("__NR3264_").removeprefix("__NR_"): int(number)
        for name, number in found.items()
    }
    renamed = {"newfstatat": "fstatat"} if column == 1 else {}
    some = {name: row for name, (row, _) in (confine.SOME | confine.OPEN).items()}
    tables = confine.ALLOWED | some | {"clone3": confine.CLONE3}
    for name, row in tables.items():
        if row[column] is not None:
            assert numbers[renamed.get(name, name)] == row[column], name
        else:
            assert name not in numbers, f"{name} is missing"


def test_filter_of_the_other_architecture_is_valid():
    """The jumps stay inside the filter, and every path ends in a verdict."""
    for machine in confine.ARCHITECTURES:
        code = confine.seccomp_filter(machine)
        steps = [
            (code[i] | code[i + 1] << 8, code[i + 2], code[i + 3]) for i in range(0, len(code), 8)
        ]
        for i, (operation, yes, no) in enumerate(steps):
            if operation & 7 == 5:
                assert i + 1 + max(yes, no) < len(steps)
        assert steps[-1][0] == 6 and len(steps) < 4096
