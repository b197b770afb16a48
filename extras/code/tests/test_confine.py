"""Confinement: system calls and files that a confined process may use, and missing layers. Hostile
programs are in hostile.py and test_program.py."""

import subprocess
import sys

import pytest
from helpers import PATIENCE

from extras.code.sandbox import process, program
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
        skip = f"confine.{layer} = lambda *libc: None; child.main"
        patch.setattr(process, "START", process.START.replace("child.main", skip))
        name = "Landlock" if layer == "restrict_files" else "seccomp"
        assert name in program.problem.__wrapped__()
    with monkeypatch.context() as patch:
        refuse = f"confine.{layer} = lambda *libc: confine.check(-1, 'no such layer'); child.main"
        patch.setattr(process, "START", process.START.replace("child.main", refuse))
        assert "no such layer" in program.problem.__wrapped__()
        with pytest.raises(RuntimeError, match="could not be confined: .*no such layer"):
            run_program("print(1)")
        assert run_program("print(1)", "", LIMITS, unsafe=True).stdout == "1\n"
        left = "import os; os.fork()" if layer == "restrict_files" else "open('/etc/passwd')"
        assert run_program(left, "", LIMITS, unsafe=True).status == "exit code 1", (
            "the other layers still hold"
        )
