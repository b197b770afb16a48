"""metrics.jsonl has every step once, also after a resume; console output, curves and trackers."""

import json
import sys

import torch

from common.config.groups import TrainArgs
from common.metrics.curves import draw_curves, read_metrics
from common.metrics.logger import RunLogger
from common.packs.sample import Completion, Sample

# ---- RunLogger ----


def logger(folder, first_step: int = 0, **flags) -> RunLogger:
    args = TrainArgs(output_dir=str(folder), **flags)
    return RunLogger(args, first_step, total_steps=4, show=("loss",), curves=("loss", "reward"))


def completion(text: str) -> Completion:
    known = dict(finish_reason="length", versions=[-1, 0])
    return Completion([1, 2], [False, True], row=dict(prompt="p"), text=text, **known)


ONE = torch.ones(1, 1)


def log_steps(folder, first: int, last: int, run: int) -> None:
    log = logger(folder, first)
    for step in range(first + 1, last + 1):
        log.log(step, dict(loss=1.0 / step, run=run))
        log.samples(step, [[completion("x\ny")]], [0], ONE, ONE)
    log.close()


def steps(path) -> list[tuple[int, int]]:
    return [(line["step"], line.get("run", 0)) for line in read_metrics(path)]


def test_resume_removes_steps_that_will_be_logged_again(tmp_path, capsys):
    log_steps(tmp_path, 0, 3, run=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    log_steps(tmp_path, 2, 4, run=2)
    assert steps(tmp_path / "metrics.jsonl") == [(1, 1), (2, 1), (3, 2), (4, 2)]
    assert [step for step, _ in steps(tmp_path / "samples.jsonl")] == [1, 2, 3, 4]
    assert "step 4/4  loss 1 -> 0.25" in capsys.readouterr().out


def test_samples_are_written_in_full_and_survive_a_resume(tmp_path):
    log, text = logger(tmp_path), "caf\u00e9\n[bold]not markup[/bold]\u2028\x85 " + "x" * 500
    rewards, advantages = torch.tensor([[0.25, 0.0]]), torch.tensor([[0.5, -0.5]])
    log.samples(3, [[completion(text), completion("y")]], [0], rewards, advantages)
    logger(tmp_path, first_step=3)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
    first, second = map(json.loads, lines)
    known = dict(step=3, prompt="p", finish_reason="length", version=0)
    assert first == dict(completion=text, reward=0.25, advantage=0.5) | known
    assert second == dict(completion="y", reward=0.0, advantage=-0.5) | known


def test_preview_marks_the_trained_tokens(tmp_path, capsys):
    from helpers import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ids = tokenizer("1+1=2[b]", add_special_tokens=False)["input_ids"]
    sample = Sample(ids=ids, loss_mask=[i >= 4 for i in range(len(ids))])
    logger(tmp_path).preview(sample, tokenizer)
    assert "1+1=\u27e62[b]\u27e7" in capsys.readouterr().out


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e"


def test_console_shows_control_characters_and_the_disk_has_the_exact_text(tmp_path, capsys):
    """The text comes from models, from data, and from users, who choose names of metrics."""
    from helpers import tiny_tokenizer

    tokenizer, log = tiny_tokenizer(), logger(tmp_path)
    ids = tokenizer(HOSTILE, add_special_tokens=False)["input_ids"]
    log.show = ("loss\x1b[1m",)
    log.preview(Sample(ids=ids, loss_mask=[True] * len(ids)), tokenizer)
    log.samples(1, [[completion(HOSTILE)]], [0], ONE, ONE)
    log.log(4, {log.show[0]: 1.0})
    log.message(HOSTILE)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert shown.count(r"\x1b]0;title\x07\x1b[2J\u202e") == 3 and r"loss\x1b[1m 1" in shown
    assert read_metrics(tmp_path / "samples.jsonl")[0]["completion"] == HOSTILE


def test_curves_are_drawn_and_other_ranks_write_nothing(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    logger(tmp_path / "run").draw_curves()  # no metric to draw yet
    assert not (tmp_path / "run" / "curves.png").exists()
    log_steps(tmp_path / "run", 0, 4, run=1)
    logger(tmp_path / "run", first_step=4).draw_curves()
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    runs = [tmp_path / "run" / "metrics.jsonl"] * 2
    draw_curves(runs, ("loss",), tmp_path / "both.png", labels=("a", "b"))
    assert (tmp_path / "both.png").stat().st_size > 5000
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "other").mkdir()
    log_steps(tmp_path / "other", 0, 2, run=1)
    logger(tmp_path / "other").draw_curves()
    assert not list((tmp_path / "other").iterdir())


def test_run_without_matplotlib_says_once_that_nothing_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log_steps(tmp_path, 0, 4, run=1)
    capsys.readouterr()
    log = logger(tmp_path, first_step=4)
    log.draw_curves()
    log.draw_curves()
    said = "is not drawn: matplotlib is not installed; pip install '.[plots]'\n"
    assert capsys.readouterr().out == f"{tmp_path}/curves.png {said}"
    assert not (tmp_path / "curves.png").exists() and len(steps(tmp_path / "metrics.jsonl")) == 4


def test_console_and_summary_show_the_change_since_the_first_step_also_after_a_resume(
    tmp_path, capsys
):
    log = logger(tmp_path)
    log.log(1, dict(loss=2.0))
    log.log(2, dict(loss=1.0))
    assert "step 2/4  loss 2 -> 1" in capsys.readouterr().out and log.summary() == "loss 2 -> 1"
    resumed = logger(tmp_path, 2)
    resumed.log(3, dict(other=1.0))
    resumed.log(4, dict(loss=0.5))
    assert "step 4/4  loss 2 -> 0.5" in capsys.readouterr().out
    assert resumed.summary() == "loss 2 -> 0.5"


def test_console_shows_values_only_on_the_lines_where_they_were_measured(tmp_path, capsys):
    """Every evaluation has a line; of 100 other steps, 20 have one."""
    log = RunLogger(TrainArgs(output_dir=str(tmp_path)), 0, 100, ("eval_loss", "loss"), ())
    for step in range(1, 101):
        log.log(step, dict(loss=1 / step) | (dict(eval_loss=0.5) if step % 33 == 0 else {}))
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    evaluations = [line[0] for line in lines if "eval_loss 0.5" in line]
    assert evaluations == [f"step {step}/100" for step in (33, 66, 99)]
    assert len(lines) == 23 and all(line[-1].startswith("loss 1") for line in lines)


def test_console_shows_the_interval_of_an_evaluation(tmp_path, capsys):
    """12 held-out rows: 0.583 -> 0.333 alone looks like a loss."""
    log = RunLogger(TrainArgs(output_dir=str(tmp_path)), 0, 4, ("eval/solved", "loss"), ())
    log.log(0, {"eval/solved": 0.5833, "eval/solved_stderr": 0.1423})
    log.log(4, {"eval/solved": 0.3333, "eval/solved_stderr": 0.1361, "loss": 1.0})
    shown = ["eval/solved 0.583 ±0.28", "eval/solved 0.583 -> 0.333 ±0.27  loss 1"]
    assert [x.partition("  ")[2] for x in capsys.readouterr().out.splitlines()] == shown
    resumed = RunLogger(TrainArgs(output_dir=str(tmp_path)), 4, 4, ("eval/solved",), ())
    assert resumed.summary() == "eval/solved 0.583 -> 0.333 ±0.27"
