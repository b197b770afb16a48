"""Environments in processes: they answer like built-in ones, and a failing one does not affect the
others."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import PATIENCE, PIPE, ROOT, Clock, alive, descendants, kill, open_files, until

from common.rewards import old_processes as processes
from common.rollout import environment_pool, environments
from common.rollout.environment_pool import Answer, Environments

# The model's turns are Python code; its value is the environment's answer.
USER_FILE = """
import os, random, signal, subprocess, sys, threading, time

import numpy.random

def touch(path): open(path, "w").close()

def wait_for(path):
    while not os.path.exists(path): time.sleep(0.01)

class Odd:
    def __reduce__(self): return (int, ("odd",))

class Doer:
    def reset(self, example):
        self.said, self.row = 0, example
        if example.get("do"): eval(example["do"])
        return [{"role": "user", "content": example["prompt"]}]

    def step(self, completion):
        self.said += 1
        return eval(completion)

    def __del__(self):
        if self.row.get("last"): touch(self.row["last"])

class Quiet(Exception):
    pass
"""
FINE = "[dict(role='tool', content=str(self.said))], self.said, False"


def fine(turn: int) -> Answer:
    return Answer([dict(role="tool", content=str(turn))], float(turn), False)


@pytest.fixture
def doers(tmp_path):
    """Yield environments that evaluate the model's turns. Check that no process and no file is left
    open at the end."""
    (tmp_path / "doer.py").write_text(USER_FILE)
    before, files = set(descendants(os.getpid())), open_files()
    environments = Environments(f"{tmp_path / 'doer.py'}:Doer", 10.0, start_timeout=PATIENCE)
    yield environments
    environments.close()
    assert not set(descendants(os.getpid())) - before and open_files() <= files


def row(**columns) -> dict:
    return dict(prompt="?", _prompt=[dict(role="user", content="?")]) | columns


def all_answers(environments: Environments) -> dict[int, list[Answer]]:
    found = {}
    while environments.outstanding:
        for number, answer in environments.answers(PATIENCE):
            found.setdefault(number, []).append(answer)
    return found


def pid_of(environments: Environments, number: int) -> int:
    """Return the process id of an episode; other episodes may hang."""
    environments.step(number, "[], os.getpid(), False")
    while not (found := environments.answers(PATIENCE)):
        pass
    assert [which for which, _ in found] == [number]
    return int(found[0][1].reward)


# ---- answers ----


def test_pooled_environment_answers_like_a_built_in_one(tmp_path):
    made = [inspect.getsource(thing) for thing in (environments.asked, environments.GuessNumber)]
    (tmp_path / "guess.py").write_text("\n".join(["import re", "Message = dict", *made]))
    asked = [dict(role="user", content="guess")]
    rows = [
        dict(prompt="guess", number=37, _prompt=asked),
        dict(prompt="guess", number=5, _prompt=asked),
        dict(prompt="guess", _prompt=asked),
        dict(prompt="other", number=1, _prompt=asked),
    ]
    turns = [["50", "20", "?", "37"], ["5"], ["1", "2"], ["1"]]
    said = []
    for name in ("guess_number", f"{tmp_path / 'guess.py'}:GuessNumber"):
        here_or_there = Environments(name, PATIENCE)
        for number, (example, of_episode) in enumerate(zip(rows, turns, strict=True)):
            here_or_there.reset(number, example)
            for turn in of_episode:
                here_or_there.step(number, turn)
        assert here_or_there.outstanding == 4 + 8
        said.append(all_answers(here_or_there))
        assert here_or_there.outstanding == 0 and here_or_there.answers(PATIENCE) == []
        here_or_there.close()
    (failed,) = said[1][2]  # its error names a line of the user's file
    assert failed.error.startswith("reset: KeyError: 'number' (line ")
    said[1][2] = [failed._replace(error=failed.error.partition(" (line")[0])]
    assert (
        said[0] == said[1]
        and [a.reward for a in said[0][0]] == [0, 0, 0, 1]
        and said[0][1] == [Answer([], 1, True)]
    )
    assert [a.messages for a in said[0][0][:3]] == [
        [dict(role="user", content=c)] for c in ("lower", "higher", "a number!")
    ]
    assert said[0][2] == [Answer([], 0.0, True, "reset: KeyError: 'number'")]
    assert (
        said[0][3][0].error == "reset: ValueError: not the same messages as at the start of the run"
    )


@pytest.mark.parametrize("name", ["guess_number", "guess.py:GuessNumber"])
def test_states_are_those_before_each_turn(tmp_path, name):
    """No state follows the last turn; an answer comes with the state after it."""
    made = [inspect.getsource(thing) for thing in (environments.asked, environments.GuessNumber)]
    (tmp_path / "guess.py").write_text("\n".join(["import re", "Message = dict", *made]))
    name = f"{tmp_path / name}" if ".py" in name else name
    played = Environments(name, PATIENCE, records_states=True)
    played.reset(0, row(number=37))
    for turn in ("20", "?", "60", "37"):
        played.step(0, turn)
        ((_, answer),) = played.answers(PATIENCE)
        assert answer.done or len(played.episodes[0].states) == played.episodes[0].turn
    assert answer == Answer([], 1.0, True)
    expected = ["0 to inf", "21 to inf", "21 to inf", "21 to 59"]
    assert played.episodes[0].states == expected
    played.close()


def test_state_that_is_no_text_is_an_error(tmp_path):
    code = USER_FILE.replace("class Quiet", "Doer.state = lambda self: [self.said]\nclass Quiet")
    (tmp_path / "doer.py").write_text(code)
    doers = Environments(f"{tmp_path / 'doer.py'}:Doer", PATIENCE, records_states=True)
    doers.reset(0, row())
    doers.step(0, FINE)
    error = "state after reset: TypeError: returned [0], not a text"
    assert all_answers(doers)[0] == [Answer([], 0.0, True, error)]
    doers.close()


RAISE_OR_DIE = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "sys.exit(5)": "SystemExit: 5",
    "os._exit(3)": "the process died (exit 3)",
    "os.kill(os.getpid(), signal.SIGSEGV)": "the process died (SIGSEGV)",
    "os.kill(os.getpid(), 40)": "the process died (signal 40)",
    "os.closerange(3, 99)": "the process died (it closed a file that it had not opened)",
    "bytearray(5 * 2**30)": "MemoryError",
}
RETURN = {
    "'no tuple'": "ValueError: too many values to unpack (expected 3)",
    "([], 'x', False)": "ValueError: could not convert string to float: 'x'",
    "([threading.Lock()], 0, False)": "the result cannot be pickled: TypeError: "
    "cannot pickle '_thread.lock' object",
    "([Odd()], 0, False)": "the result cannot be unpickled: ValueError: "
    "invalid literal for int() with base 10: 'odd'",
}


def where(error: str, code: str) -> str:
    """Return the end of an error that the user's file raised in the line that begins with
    `code`."""
    lines = [
        number
        for number, line in enumerate(USER_FILE.splitlines(), 1)
        if line.strip().startswith(code)
    ]
    return (
        f" (line {lines[0]})"
        if error in RAISE_OR_DIE.values() and not error.startswith("the process")
        else ""
    )


def test_error_ends_only_its_episode(doers, capfd):
    for number, do in enumerate(RAISE_OR_DIE | RETURN):
        doers.reset(number, row())
        for turn in (FINE, do, FINE):
            doers.step(number, turn)
    for number, do in enumerate(RAISE_OR_DIE, 100):
        doers.reset(number, row(do=do))
        doers.step(number, FINE)
    doers.reset(200, row(odd=threading.Lock()))
    doers.reset(201, row())
    for _ in range(3):
        doers.step(201, FINE)
    found = all_answers(doers)
    for number, error in enumerate((RAISE_OR_DIE | RETURN).values()):
        assert found[number] == [
            fine(1),
            Answer([], 0.0, True, f"step 2: {error}{where(error, 'return eval(')}"),
        ]
        doers.step(number, FINE)  # is not answered any more
    for number, error in enumerate(RAISE_OR_DIE.values(), 100):
        assert found[number] == [
            Answer([], 0.0, True, f"reset: {error}{where(error, 'if example.get(')}")
        ]
    assert [answer.error for answer in found[200]] == [
        "reset: ValueError: the call cannot be pickled: TypeError: "
        "cannot pickle '_thread.lock' object"
    ]
    assert found[201] == [fine(1), fine(2), fine(3)] and doers.outstanding == 0
    doers.close()
    assert capfd.readouterr().err == ""


def test_process_that_dies_after_its_answer_is_the_error_of_the_next_step(doers):
    doers.reset(0, row())
    pid = pid_of(doers, 0)
    doers.step(0, f"(threading.Timer(0.01, os._exit, [7]).start(), {FINE})[1:]")
    until(lambda: not alive(pid))
    assert all_answers(doers)[0] == [fine(2)]  # comes with the report of the death
    doers.step(0, FINE)
    assert all_answers(doers)[0] == [Answer([], 0.0, True, "step 3: the process died (exit 7)")]


def test_output_and_forks_do_not_affect_answers(doers, capfd):
    doers.reset(
        0, row(do="print('hello'), os.write(1, b'directly'), subprocess.run(['echo', 'far'])")
    )
    doers.step(0, f"(os.fork(), {FINE})[1:]")
    assert all_answers(doers) == {0: [fine(1)]}
    doers.close()
    out, err = capfd.readouterr()
    assert out == "" and err.count("hello") == err.count("directly") == err.count("far") == 1


def test_episodes_draw_different_random_numbers(doers):
    for number in range(4):
        doers.reset(number, row())
        doers.step(number, f"[], {'random' if number % 2 else 'numpy.random'}.random(), True")
    assert len({answer.reward for [answer] in all_answers(doers).values()}) == 4


@pytest.mark.slow  # the second of them needs to clean up
def test_only_a_hanging_environment_is_terminated(doers, monkeypatch, tmp_path):
    clock = Clock(monkeypatch, environment_pool, processes)
    hang = "(touch(self.row['here']), [0 for _ in iter(int, 1)])"
    for number in range(2):
        doers.reset(number, row(here=str(tmp_path / str(number)), do=hang if number else None))
        doers.step(number, hang)
    doers.reset(2, row())
    pid = pid_of(doers, 2)
    until(lambda: all((tmp_path / str(number)).exists() for number in range(2)))
    assert doers.answers() == [] and doers.outstanding == 3
    hanging = set(descendants(doers.server.process.pid)) - {pid}
    assert len(hanging) == 2
    clock.ahead += 11
    assert {number: answer.error for number, answer in doers.answers(PATIENCE)} == {
        0: "step 1: no answer within 10 s",
        1: "reset: no answer within 10 s",
    }
    assert pid_of(doers, 2) == pid
    until(lambda: not any(map(alive, hanging)))


def test_slow_parent_loses_no_answer(doers, monkeypatch, tmp_path):
    """An answer that arrived before the parent polls is valid; the time limit of the next turn
    starts then."""
    clock, here, there = (
        Clock(monkeypatch, environment_pool, processes),
        tmp_path / "here",
        tmp_path / "there",
    )
    doers.reset(0, row())
    pid_of(doers, 0)
    doers.step(0, FINE)
    doers.step(0, f"(touch({str(here)!r}), wait_for({str(there)!r}), ({FINE}))[2]")
    until(here.exists)
    clock.ahead += 100
    assert doers.answers() == [(0, fine(2))]
    there.touch()
    assert all_answers(doers) == {0: [fine(3)]}


def test_environments_run_concurrently(doers, tmp_path):
    for number in range(2):
        doers.reset(
            number, row(here=str(tmp_path / f"{number}"), there=str(tmp_path / f"{1 - number}"))
        )
        doers.step(number, f"(touch(self.row['here']), wait_for(self.row['there']), ({FINE}))[2]")
    assert all_answers(doers) == {0: [fine(1)], 1: [fine(1)]}


@pytest.mark.slow
def test_environment_that_does_not_read_blocks_no_other(doers, monkeypatch, tmp_path):
    clock, spaces = Clock(monkeypatch, environment_pool, processes), " " * 4_000_000
    doers.reset(0, row(do=f"(touch({str(tmp_path / 'here')!r}), time.sleep(9999))"))
    until((tmp_path / "here").exists)
    doers.reset(1, row())
    for number in range(2):
        doers.step(number, f"[completion], len(completion), True{spaces}")
    ((number, answer),) = doers.answers(PATIENCE)
    assert (
        number == 1
        and answer.messages[0].endswith(spaces)
        and answer.reward == len(answer.messages[0])
    )
    clock.ahead += 11
    assert doers.answers(PATIENCE) == [(0, Answer([], 0.0, True, "reset: no answer within 10 s"))]


# ---- the end of an episode ----


def test_finished_episode_gives_no_answer_and_cleans_up(doers, tmp_path):
    doers.reset(7, row(last=str(tmp_path / "last")))
    pid_of(doers, 7)
    doers.step(7, FINE)
    doers.end(7)
    assert doers.outstanding == 0 and doers.answers(PATIENCE) == []
    doers.reset(7, row())  # the number is free
    doers.step(7, FINE)
    assert all_answers(doers) == {7: [fine(1)]}
    until((tmp_path / "last").exists)


def test_processes_of_an_environment_end_with_it(doers, tmp_path):
    for number, then in enumerate(("([], 0, True)", "os._exit(0)", "([], 0, True)")):
        doers.reset(number, row(pid=str(tmp_path / str(number))))
        start = (
            "open(self.row['pid'], 'w').write(str(subprocess.Popen(['sleep', '9999'], "
            "start_new_session=True).pid))"
        )
        doers.step(number, f"({start}, {then})[1]")
    all_answers(doers)
    pids = [int((tmp_path / str(number)).read_text()) for number in range(3)]
    doers.end(0)
    until(lambda: not any(map(alive, pids[:2])))
    assert alive(pids[2])
    doers.close()
    until(lambda: not alive(pids[2]))


@pytest.mark.slow
def test_pool_runs_hundreds_of_episodes(doers):
    for number in range(200):
        doers.reset(number, row(at=number))
    for number in range(200):
        doers.step(number, "[], os.getpid(), False")
    pids = [int(answer.reward) for [answer] in all_answers(doers).values()]
    assert len(set(pids)) == 200 and all(map(alive, pids))
    for number in range(200):
        doers.step(number, f"[], {number}, True")
    assert {number: answer.reward for number, [answer] in all_answers(doers).items()} == {
        n: n for n in range(200)
    }
    for number in range(200):
        doers.end(number)
    until(lambda: not any(map(alive, pids)))


# ---- the server ----


def test_dead_server_is_replaced(doers):
    doers.reset(0, row())
    pids = [doers.server.process.pid, pid_of(doers, 0)]
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))
    doers.step(0, FINE)
    assert all_answers(doers) == {0: [Answer([], 0.0, True, "step 2: the process died")]}
    doers.reset(1, row())
    doers.step(1, FINE)
    assert all_answers(doers) == {1: [fine(1)]}


@pytest.mark.parametrize(
    "code, error",
    [
        (
            "import nothing_of_this_name",
            "doer.py:Doer cannot be loaded: ModuleNotFoundError: No module named",
        ),
        ("raise SystemExit('stop')", "doer.py:Doer cannot be loaded: SystemExit: stop"),
        ("x = 1", "AttributeError"),
        ("import os; os._exit(4)", "the process died"),
        ("while True: pass", "not loaded within 60 s"),
    ],
)
def test_file_that_fails_to_reload_gives_errors(doers, monkeypatch, tmp_path, code, error):
    (tmp_path / "doer.py").write_text(code)
    doers.start_timeout, clock = 60, Clock(monkeypatch, environment_pool, processes)
    for number in range(3):
        doers.reset(number, row())
    clock.ahead += 61 if "while" in code else 0
    found = all_answers(doers)
    assert error in found[0][0].error and all(
        found[n][0].error.startswith("reset: ") for n in range(3)
    )
    (tmp_path / "doer.py").write_text(USER_FILE)
    doers.server.close()
    doers.reset(3, row())
    doers.step(3, FINE)
    assert all_answers(doers) == {3: [fine(1)]}


@pytest.mark.slow
def test_processes_end_after_their_parent_is_killed(tmp_path):
    """Processes are idle or in an endless loop and have children; a fork of the parent may
    survive."""
    (tmp_path / "doer.py").write_text(USER_FILE)
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from common.rollout.environment_pool import Environments
doers = Environments({str(tmp_path / "doer.py")!r} + ":Doer", 9999.0)
actions = ("1", "[0 for _ in iter(int, 1)]", "subprocess.Popen(['sleep', '9999'])")
for number, do in enumerate(actions):
    doers.reset(number, dict(prompt="?", _prompt=[dict(role="user", content="?")], do=do))
if os.fork() == 0: time.sleep(9999)
print("begun", flush=True)
while True: doers.answers(9999)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=PIPE) as parent:
        assert parent.stdout.readline() == b"begun\n"
        children = until(lambda: len(found := descendants(parent.pid)) == 6 and found)
        [other] = [p for p in children if code.encode() in Path(f"/proc/{p}/cmdline").read_bytes()]
        parent.kill()
        try:
            until(lambda: not any(alive(p) for p in children if p != other))
        finally:
            kill(*children)
