"""The interpreter, a tool that is built in. It runs in the sandbox of extras/code; without that
folder these tests are skipped."""

import os
import signal
import tempfile
from importlib import import_module

import pytest
from processes import Clock

from extras.tools.tests.test_toolbox import begin
from extras.tools.toolbox import Outcome

pytest.importorskip("extras.code")
process = import_module("extras.code.sandbox.process")
program = import_module("extras.code.sandbox.program")
python_tool = import_module("extras.tools.python_tool")
confined = pytest.mark.skipif(program.problem() is not None, reason="programs are not confined")


@confined
def test_python_keeps_its_state_until_it_ends():
    toolbox = begin("python", seconds=5.0)

    def run(code):
        outcome = toolbox.call("python", dict(code=code))
        return outcome.text, outcome.problem

    assert run("x = 3\nprint('x')\nx * 2") == ("x\n6", "")
    assert run("def f():\n    return x + 1") == ("", "") and run("f()") == ("4", "")
    assert run("1 / 0") == ("ZeroDivisionError: division by zero", "")
    assert run("import os\nos.fork()")[0].startswith("PermissionError")
    assert run("x") == ("3", "")
    assert run("import os\nos._exit(3)") == (
        "error: RuntimeError: exit code 3; the interpreter was restarted without its state",
        "raised",
    )
    assert run("x") == ("NameError: name 'x' is not defined", "")
    folder = toolbox.owners["python"].object.program.child.folder
    toolbox.close()
    with pytest.raises(FileNotFoundError):
        open(folder)


SPOILED = dict(
    run=("import sys; sys._getframe(1).f_globals['run'] = None", ""),
    forged=("import os\nfor fd in range(3, 4000):\n    try:\n        "
            "os.write(fd, b'{\"value\":[9,\"x\"]}\\n')\n    except OSError: pass", "malformed"),
    memory=("x = []\nwhile True: x.append('x' * 10**7)", ""),
    time=("while True: pass", "0.3 s: time limit"),
    output=("for i in range(300): print('x' * 10**7)", "xxx"),
)  # fmt: skip


@confined
@pytest.mark.parametrize("kind", SPOILED)
def test_whatever_a_program_does_the_next_call_is_answered(kind, monkeypatch, tmp_path):
    """Afterwards no process and no folder is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    toolbox = begin("python")
    assert toolbox.call("python", dict(code="1")).text == "1"
    interpreter = toolbox.owners["python"].object
    if kind == "time":
        interpreter.seconds = 0.3
    code, said = SPOILED[kind]
    outcome = toolbox.call("python", dict(code=code))
    interpreter.seconds = 60.0
    assert said in outcome.text and (kind != "output" or outcome.cut)
    later = [toolbox.call("python", dict(code="6 * 7")).text for _ in range(2)]
    assert later[1] == "42", (outcome, later)
    assert len(list(tmp_path.glob("onefile-sandbox-*"))) <= 1
    toolbox.close()
    assert list(tmp_path.glob("onefile-sandbox-*")) == []


@confined
def test_an_interpreter_is_stopped_between_calls():
    code = """
import threading, time
done = []
def work():
    while True:
        time.sleep(0.001)
        done.append(1)
threading.Thread(target=work, daemon=True).start()
"""
    toolbox = begin("python")
    assert toolbox.call("python", dict(code=code)).text == ""
    pid = toolbox.owners["python"].object.program.child.process.pid
    assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT).si_status == signal.SIGSTOP
    assert int(toolbox.call("python", dict(code="time.sleep(0.1); len(done)")).text) > 0
    toolbox.close()


@confined
def test_python_that_starts_late_costs_one_call(monkeypatch):
    """The start counts to the time of the call, which is shorter than that of the process."""
    clock, start = Clock(monkeypatch, process, python_tool), process.Child._start
    delay = [70.0, 30.0]

    def start_slowly(*arguments):
        start(*arguments)
        clock.ahead += delay.pop()

    monkeypatch.setattr(process.Child, "_start", start_slowly)
    toolbox = begin("python", seconds=60.0)
    assert toolbox.call("python", dict(code="1")).text == "1"
    toolbox.owners["python"].object.close()
    outcome = toolbox.call("python", dict(code="1"))
    assert outcome == Outcome("error: 48 s: the interpreter did not start", "timed_out")
    toolbox.close()


def test_python_is_refused_where_it_cannot_be_confined(monkeypatch):
    monkeypatch.setattr(program, "problem", lambda: "this is plan9")
    with pytest.raises(ValueError, match="--tools python: this is plan9; --unsafe_code_execution"):
        python_tool.require_confinement(unsafe=False)
    python_tool.require_confinement(unsafe=True)
