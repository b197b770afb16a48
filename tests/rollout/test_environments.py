"""Environments, each in a process: answers, rewards and errors of an episode, and one that fails
does not affect the others. tests/workers/ has the processes themselves."""

import ast
import asyncio
import os
import re
from types import SimpleNamespace

import pytest
from helpers import ROOT
from in_process import Args
from processes import PATIENCE, alive, descendants, open_files, until

from common.model.tiny import tiny_model
from common.rollout.engine import empty_completion
from common.rollout.environments import Environments
from common.text.tokenizer import load_tokenizer

# The model's turns are Python code; its value is the environment's answer.
USER_FILE = """
import os, random, subprocess, sys, threading

import numpy.random

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
        if self.row.get("last"): open(self.row["last"], "w").close()
"""
FINE = "[dict(role='tool', content=str(self.said))], self.said, False"


@pytest.fixture
def doers(tmp_path):
    """Yield environments that evaluate the model's turns. Check that no process and no file is left
    open at the end."""
    (tmp_path / "doer.py").write_text(USER_FILE)
    before, files = set(descendants(os.getpid())), open_files()
    name = f"{tmp_path / 'doer.py'}:Doer"
    args = Args(environment=name, reward=("environment",), environment_timeout=PATIENCE)
    environments = Environments(args, SimpleNamespace(tokenizer=load_tokenizer(tiny_model())))
    yield environments
    environments.close()
    assert not set(descendants(os.getpid())) - before and open_files() <= files


def row(**columns) -> dict:
    return dict(prompt="?", _prompt=[dict(role="user", content="?")]) | columns


async def play(environments: Environments, row: dict, *turns: str):
    """Return the completion of an episode with these turns and the texts of the answers."""
    episode = environments.begin(row)
    completion, answers = empty_completion([5, 6]), []
    for number, turn in enumerate(turns, 1):
        completion.append_reply([7])
        completion.turns, completion.text, completion.finish_reason = number, turn, "stop"
        ids = await episode.answer(completion)
        if ids is None:
            break
        answers.append(environments.encoder.tokenizer.decode(ids))
    episode.end(completion)
    return completion, answers


def played(environments: Environments, *episodes) -> list:
    """Return what `play` returns of episodes that are played at a time: (row, turns)."""

    async def main() -> list:
        return await asyncio.gather(*(play(environments, each, *turns) for each, turns in episodes))

    return asyncio.run(main())


def rewards(completion) -> list[float]:
    return [reward for _, reward in completion.turn_rewards]


# ---- answers ----


ERRORS = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "sys.exit(5)": "SystemExit: 5",
    "os._exit(3)": "the process died",
    "'no tuple'": "ValueError: too many values to unpack (expected 3)",
    "([], 'x', False)": "ValueError: could not convert string to float: 'x'",
    "([dict(role=7)], 0, False)": "ValueError: ",
    "(7, 0, False)": "",
    "([threading.Lock()], 0, False)": "the result cannot be pickled: TypeError: ",
    "([Odd()], 0, False)": "the result cannot be unpickled: ValueError: ",
}


def test_error_ends_only_its_episode(doers, capfd):
    cases = [(row(), [FINE, do, FINE]) for do in ERRORS]
    cases += [(row(do=do), [FINE]) for do in list(ERRORS)[:3]]
    cases += [(row(_prompt=[]), [FINE]), (row(), [FINE, FINE, FINE])]
    *failed, (changed, _), (fine, said) = played(doers, *cases)
    for error, (completion, answers) in zip(ERRORS.values(), failed, strict=False):
        assert completion.error.startswith(f"step 2: {error}") and len(answers) == 1
        assert rewards(completion)[:1] == [1]
    for error, (completion, answers) in zip(ERRORS.values(), failed[len(ERRORS) :], strict=False):
        assert completion.error.startswith(f"reset: {error}") and not answers
    assert changed.error == "reset: ValueError: not the same messages as at the start of the run"
    assert rewards(fine) == [1, 2, 3] and not fine.error
    assert len(said) == 3 and all(str(n) in text for n, text in enumerate(said, 1))
    doers.close()
    assert capfd.readouterr().err == ""


def test_episodes_draw_different_random_numbers(doers):
    cases = [(row(), [f"[], {name}.random(), True"]) for name in ("random", "numpy.random") * 2]
    found = played(doers, *cases)
    assert len({completion.turn_rewards[0][1] for completion, _ in found}) == 4


@pytest.mark.slow
def test_only_a_hanging_environment_is_terminated(doers, tmp_path):
    """One hangs in its reset, one in a step; the third goes on."""
    object.__setattr__(doers.args, "environment_timeout", 2.0)
    hang = "[0 for _ in iter(int, 1)]"
    cases = [(row(), [hang]), (row(do=hang), [FINE]), (row(), [FINE] * 3)]
    (step, _), (reset, _), (fine, _) = played(doers, *cases)
    assert step.error == "step 1: no answer within 2 s"
    assert reset.error == "reset: no answer within 2 s"
    assert rewards(fine) == [1, 2, 3]


# ---- the end of an episode ----


def test_finished_episode_cleans_up_and_its_processes_end(doers, tmp_path):
    start = "subprocess.Popen(['sleep', '9999'], start_new_session=True).pid"
    last = tmp_path / "last"
    ((completion, _),) = played(doers, (row(last=str(last)), [f"[], {start}, True"]))
    until(lambda: last.exists() and not alive(int(rewards(completion)[0])))


# ---- the page ----

PAGE = (ROOT / "docs/environments.md").read_text(encoding="utf-8")
BLOCKS = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_class_of_the_page_is_an_environment(code):
    """The adapters need packages that are not here."""
    (found,) = (node for node in ast.parse(code).body if isinstance(node, ast.ClassDef))
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    assert [len(methods[name].args.args) for name in ("reset", "step")] == [2, 2]
    assert "__init__" not in methods  # objects are made without arguments
