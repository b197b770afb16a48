"""wandb, tensorboard and a user's tracker get the metrics; without a package, a key or a method
there is one line."""

import json
import sys

import pytest
from helpers import write
from processes import run

from common.config.groups import TrainArgs
from common.metrics.logger import RunLogger
from common.parallel.process import RunError


def logger(folder, *names: str) -> RunLogger:
    args = TrainArgs(output_dir=str(folder), log_to=names)
    return RunLogger(args, 0, total_steps=4, show=("loss",), curves=("loss",))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_gives_a_one_line_error(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(
        ValueError, match=f"^--log_to {name} needs the Python package {name}, which is not"
    ):
        logger(tmp_path, name)


def test_tensorboard_receives_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = logger(tmp_path, "tensorboard")
    log.log(1, dict(loss=0.5))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(e.step, e.value) for e in events] == [(1, 0.5)]


@pytest.mark.parametrize("project", [None, "mine"])
def test_wandb_project_is_onefile_unless_the_environment_names_another(
    project, tmp_path, monkeypatch
):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    if project:
        monkeypatch.setenv("WANDB_PROJECT", project)
    given = {}
    monkeypatch.setattr(wandb, "init", lambda **flags: given.update(flags))
    folder = tmp_path / "lr=1e-5,beta: 'a' #1"  # wandb's ids have none of these marks
    folder.mkdir()
    logger(folder, "wandb")
    assert given["project"] == (project or "onefile") and given["dir"] == folder
    assert given["id"].startswith("lr=1e-5-beta- -a- -1-")


def test_wandb_without_a_key_is_one_line(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    with pytest.raises(
        ValueError, match="^--log_to wandb: no key; run `wandb login`, or set WANDB_A"
    ):
        logger(tmp_path, "wandb")


TRACKER = """
import json

class Tracker:
    def __init__(self, args, folder, first_step):
        self.file = (folder / "mine.jsonl").open("a")
        self.log(first_step, dict(lr=args.lr))

    def log(self, step, metrics):
        print(json.dumps([step, metrics]), file=self.file)

    def log_samples(self, step, lines):
        pass

    def close(self):
        self.file.close()
"""


def test_a_tracker_of_the_user_gets_the_metrics_and_goes_on_in_a_resumed_run(main, small, tmp_path):
    (tmp_path / "mine.py").write_text(TRACKER)
    flags = ("sft", *small, "--log_to", f"{tmp_path}/mine.py:Tracker", "--eval_every", 0)
    for steps in (1, 2):
        main(*flags, "--max_steps", steps, "--save_every", 1, "--output_dir", tmp_path / "run")
    lines = [*map(json.loads, (tmp_path / "run" / "mine.jsonl").read_text().splitlines())]
    begun, *_ = [metrics for _, metrics in lines]
    assert [step for step, _ in lines] == [0, 1, 1, 2] and [*begun] == ["lr"]
    logged = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [dict(step=step) | metrics for step, metrics in lines[1::2]] == logged


@pytest.mark.parametrize(("code", "problem"), [
    (None, "no file .*mine.py that ends in .py; the form is path/to/file.py:name"),
    ("import nothing_of_this_name", "fails to import: ModuleNotFoundError"),
    ("Other = 3", "has no function Tracker"),
    ("class Tracker:\n    def log(self, step, metrics): ...",
     "TypeError: Tracker.* takes no arguments"),
    (TRACKER.replace("log_samples", "samples"), "AttributeError: .* no attribute 'log_samples'"),
    (TRACKER.replace("self.log(", "1 / 0, self.log("), r"ZeroDivisionError: .* \(line 7\)"),
    (TRACKER.replace("print(", "print[0]("), r"TypeError: .* \(line 10\)"),
    (TRACKER.replace("(self, args, folder, first_step)", "(self)"), "TypeError: .*__init__"),
])  # fmt: skip
def test_what_is_wrong_with_a_tracker_of_the_user_is_one_line(code, problem, tmp_path):
    file = tmp_path / "mine.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises((ValueError, RunError), match=f"^--log_to {file}:Tracker: .*{problem}.*$"):
        logger(tmp_path, f"{file}:Tracker").log(1, dict(loss=0.5))


def test_what_a_tracker_raises_ends_all_ranks_with_one_line(small, tmp_path):
    file = write(
        tmp_path / "mine.py", TRACKER.replace("json.dumps([step", "step or json.dumps([lr")
    )
    flags = ("--log_to", f"{file}:Tracker", "--max_steps", 1, "--eval_every", 0)
    done = run(2, "sft.py", *small, *flags, "--output_dir", tmp_path / "run", code=1)
    problem = "NameError: name 'lr' is not defined (line 10)"
    assert done.stderr == f"error: --log_to {file}:Tracker: {problem}\n"
