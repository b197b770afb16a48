"""wandb and tensorboard get the metrics; without a package or a key there is one line."""

import sys

import pytest

from common.config.groups import TrainArgs
from common.metrics.logger import RunLogger


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
