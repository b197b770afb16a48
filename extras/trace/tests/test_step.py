"""A packed step is computed again without its run: equal bit for bit, and each planted difference
is named. A hostile file runs nothing."""

import importlib
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT
from in_process import call_main
from processes import run

from common.parallel import distributed
from extras.trace import replay, step, view
from extras.trace.tests.test_trace import flags

REWARDS = ("--model", "tiny-sft", "--prompt_format", "plain", "--reward", "exact_match", "format")
SCRIPTS = {
    "grpo": (2, *REWARDS, "--beta", 0.1, "--entropy_coef", 0.01, "--missing_eos_penalty", 0.5),
    "dapo": (1, "--overlong_buffer", 0.5),
}


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Give the other tests of this process their old modules back."""
    for script in step.SCRIPTS:
        known = sys.modules.get(script) or importlib.import_module(script)
        monkeypatch.setitem(sys.modules, script, known)


@pytest.fixture(scope="module")
def packed(small, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that trains, packs the first step, and returns the file."""

    def forked(ranks, log, *words):
        run(ranks, replay.__file__, "--work", *words)

    @cache
    def pack(script: str) -> Path:
        folder = tmp_path_factory.mktemp(script)
        ranks, *more = SCRIPTS[script]
        given = flags(small, "reinforce", folder / "run", "--max_steps", 1, *more)
        run(ranks, ROOT / f"{script}.py", *given)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "launch", forked)
            replay.replay(folder / "run", 1, [], folder / "step.zip")
        return folder / "step.zip"

    return pack


@pytest.fixture
def opened(device, monkeypatch, capsys) -> Callable[[Path], dict[str, str]]:
    """Return a function that computes a step again; it returns the lines by quantity."""
    monkeypatch.setattr(distributed, "setup", lambda *_, **__: (device, 0, 1))

    def compute(path: Path, status: int = 0) -> dict[str, str]:
        out, _ = call_main(replay.main, ("replay.py", path), status, monkeypatch, capsys)
        return dict(line.split(": ", 1) for line in out.splitlines())

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_is_equal_bit_for_bit(script, packed, opened, capsys):
    path = packed(script)
    capsys.readouterr()
    lines = opened(path)
    rewards = {"exact_match", "format", "reward"} if "exact_match" in SCRIPTS[script] else set()
    assert {"share", "logprobs_gradient", "logprobs", "gradient", *rewards} < {*lines}
    assert [name for name, line in lines.items() if "DIFFER" in line or "rounding" in line] == []


def parts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def changed(path: Path, change: Callable[[dict, list], object], name: str = "changed") -> Path:
    """Write a copy after `change(step.json, groups)`."""
    parts = parts_of(path)
    about = json.loads(parts["step.json"])
    header, *groups = map(json.loads, parts["trace.jsonl"].splitlines())
    change(about, groups)
    parts["step.json"] = json.dumps(about).encode()
    parts["trace.jsonl"] = "\n".join(map(json.dumps, [header, *groups])).encode()
    return zipped(path.with_stem(name), parts)


def zipped(path: Path, parts: dict[str, bytes | str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return path


def plant(completion: dict, name: str, t: int | None = None) -> None:
    if t is None:
        completion[name] += 0.5
    else:
        completion["updates"][0][name][t] += 0.5


@pytest.mark.slow
def test_each_planted_difference_is_named(packed, tmp_path, opened, monkeypatch, capsys):
    path = Path(shutil.copy(packed("grpo"), tmp_path))
    capsys.readouterr()

    def first(change: Callable[[dict, list], object]) -> dict[str, str]:
        lines = opened(changed(path, change), status=1)
        return {name: line for name, line in lines.items() if "DIFFER" in line}

    completion = "group 0, completion 1"
    position = [json.loads(line) for line in parts_of(path)["trace.jsonl"].splitlines()[1:]]
    k = next(k for k, group in enumerate(position) if group["group"] == 0)
    found = first(lambda _, groups: plant(groups[k]["completions"][1], "reward"))
    assert f"1 of 12 DIFFER by up to 0.5; first {completion}: " in found["reward"]
    found = first(lambda _, groups: plant(groups[k]["completions"][1], "advantage"))
    assert f"1 of 12 DIFFER by up to 0.5; first {completion}: " in found["advantage"]
    assert "reward" not in found and f"first {completion}, update 0, token 0" in found["share"]
    found = first(lambda _, groups: plant(groups[k]["completions"][1], "logprobs", 3))
    assert f"first {completion}, update 0, token 3: " in found["logprobs"]
    assert {"exact_match", "reward", "advantage", "gradient"}.isdisjoint(found)
    found = first(lambda about, _: about["flags"].update(loss="reinforce"))
    assert {"share", "logprobs_gradient"} < {*found} and "ratio" not in found

    # ---- without weights; the viewer ----
    light = {name: x for name, x in parts_of(path).items() if not name.startswith("hf/")}
    lines = opened(zipped(tmp_path / "light.zip", light))
    assert lines["not checked, because the file has no weights"] == "log-probs, gradient"
    assert "share" in lines and "gradient" not in lines
    call_main(view.main, ("view.py", path), 0, monkeypatch, capsys)
    assert '"step":1,"gzip":"' in path.with_suffix(".html").read_text()


class Evil:
    def __reduce__(self):
        return exec, ("open('ran', 'w').close()",)


@pytest.mark.slow
def test_a_hostile_file_runs_nothing(packed, tmp_path, opened, monkeypatch, capsys):
    path = Path(shutil.copy(packed("grpo"), tmp_path))
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\ndef f(completion, row): return 1")
    parts = parts_of(path)
    config = json.loads(parts["hf/config.json"])
    huge = config | dict(num_hidden_layers=10**6)

    def refused(name: str, file: Path) -> None:
        out, error = call_main(replay.main, ("replay.py", file), 2, monkeypatch, capsys)
        assert out == "" and error.startswith(f"error: {file}: no packed step: "), name
        assert error.count("\n") == 1 and len(error) < 300, name

    for name, content in {
        "../evil.txt": "x", "/tmp/evil.txt": "x", "hf/../../evil.txt": "x", "evil.pkl": "x",
        "hf/model.safetensors": pickle.dumps(Evil()), "trace.jsonl": pickle.dumps(Evil()),
        "hf/config.json": json.dumps(huge), "step.json": "[" * 10**5,
    }.items():  # fmt: skip
        refused(name, zipped(tmp_path / "evil.zip", parts | {name: content}))
    for name in ("step.json", "trace.jsonl", "hf/config.json"):
        rest = {key: x for key, x in parts.items() if key != name}
        refused(name, zipped(tmp_path / "evil.zip", rest))
    monkeypatch.setattr(step, "LARGEST", 10**7)
    refused("bomb", zipped(tmp_path / "evil.zip", parts | {"metrics.jsonl": bytes(10**7)}))
    (tmp_path / "evil.zip").write_bytes(path.read_bytes()[:-100])
    refused("truncated", tmp_path / "evil.zip")
    for wrong in (dict(script="evil"), dict(script=["grpo"]), dict(flags=3), dict(packs=[3])):
        refused(str(wrong), changed(path, lambda about, _, wrong=wrong: about.update(wrong)))

    def names_files(about: dict, groups: list[dict]) -> None:
        about["flags"] |= dict(reward=["exact_match", "evil.py:f", "code"], judge_prompt="evil.py")
        about["flags"] |= dict(adapter="evil", tools=["evil.py"], agent="evil.py:f")
        about["__reduce__"] = groups[0]["__reduce__"] = "exec"

    lines = opened(changed(path, names_files))
    assert (
        lines["not run, but taken as recorded"] == "reward evil.py:f, code"
        and "reward" not in lines
    )
    assert not (tmp_path / "ran").exists() and not (tmp_path.parent / "evil.txt").exists()


def test_only_steps_of_some_scripts_are_packed_to_new_files(tmp_path, monkeypatch, capsys):
    """The refusal comes before anything is run again."""
    (tmp_path / "metrics.jsonl").write_text("")
    for script, file, problem in (
        ("sft", "x.zip", f"--pack: {ROOT}/sft.py is none of grpo, dapo"),
        ("grpo", "args.yaml", f"--pack {tmp_path}/args.yaml: name a new file that ends in .zip"),
        ("grpo", "old.zip", f"--pack {tmp_path}/old.zip: name a new file that ends in .zip"),
    ):
        (tmp_path / "args.yaml").write_text(f"# {ROOT}/{script}.py\n")
        (tmp_path / "old.zip").write_text("")
        words = ("replay.py", tmp_path, "--step", 1, "--pack", tmp_path / file)
        _, error = call_main(replay.main, words, 2, monkeypatch, capsys)
        assert error == f"error: {problem}\n"
    _, error = call_main(replay.main, ("replay.py", "x.zip", "--lr", 1), 2, monkeypatch, capsys)
    assert error == "error: x.zip: a packed step is computed as it is, without flags\n"
    for tool in (replay, view):
        _, error = call_main(tool.main, ("x.py", tmp_path / "old.zip"), 2, monkeypatch, capsys)
        assert error == f"error: {tmp_path}/old.zip: no packed step: File is not a zip file\n"
