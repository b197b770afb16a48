"""The training run around its steps: resume, save, stop, evaluate, log, and export."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers import metrics
from processes import Clock
from safetensors.torch import load_file

from common.config.extra import has_extra
from common.config.flags import better_end
from common.config.groups import TrainArgs
from common.metrics.logger import RunLogger
from common.model.loading import whole
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.packs.order import Order
from common.packs.sample import Sample
from common.parallel import process
from common.text.tokenizer import load_tokenizer
from common.train import run
from common.train.optim import adamw
from common.train.run import Run
from common.train.run_folder import begin_run, prepare_output_dir

TOTAL = 5


@pytest.fixture(scope="module")
def parts(small, device):
    """Return a shared model and optimizer; restored state is reset before each test."""
    args = TrainArgs(dtype="float32")
    model = load_policy(str(small[1]), args, device)
    return model, adamw(model, args)


@pytest.fixture(autouse=True)
def no_signals(monkeypatch):
    monkeypatch.setattr(process, "stop_signalled", False)
    monkeypatch.setattr(process, "note_signals", lambda: None)
    monkeypatch.setattr(RunLogger, "draw_curves", lambda _: None)  # tests/metrics draws


class Steps:
    """Run whose step n sets every weight to n and draws two of ten rows."""

    def __init__(self, parts, folder, total: int = TOTAL, **flags):
        self.model, optimizer = parts
        self.args = TrainArgs(output_dir=str(folder), **(dict(eval_every=0, save_every=2) | flags))
        prepare_output_dir(self.args)
        begin_run(self.args)
        self.order, self.begun, self.saves = Order({"": range(10)}, 0), [], []
        self.run = Run(
            self.args, self.model, optimizer, load_tokenizer(tiny_model()), total,
            show=("loss",), curves=("loss",), order=self.order,
        )  # fmt: skip
        save = self.run.checkpointer.save
        self.run.checkpointer.save = lambda step: (self.saves.append(step), save(step))

    def go(
        self, stop_in: int | None = None, break_off: int | None = None, scores: Sequence[float] = ()
    ) -> list[int]:
        """Return the finished steps. Step `stop_in` gets a stop request, step `break_off` breaks
        the loop. `scores[n]` is the evaluation after step n."""
        for step in self.run.steps():
            self.begun.append(step)
            if step == stop_in:
                process.stop_signalled = True
            if step == break_off:
                self.run.stop_requested = True
                break
            with torch.no_grad():
                self.order.draw(2)
                for parameter in self.model.parameters():
                    parameter.fill_(step + 1)
            self.run.meter.mean("loss", step + 1.0)
            known = self.run.reduce([Sample([0] * 4, [True] * 4)], lr=0.5)
            self.run.log(step + 1, known | (dict(eval_score=scores[step]) if scores else {}))
        self.run.end()
        return [line["step"] for line in metrics(self.folder)]

    @property
    def folder(self):
        return self.run.checkpointer.folder

    def value(self) -> float:
        return whole(next(self.model.parameters())).flatten()[0].item()


def exported(folder) -> float:
    """Return the single value that all weights of an export have."""
    tensors = load_file(folder / "model.safetensors").values()
    (value,) = {value for tensor in tensors for value in tensor.unique().tolist()}
    return value


def test_run_saves_evaluates_and_exports(parts, tmp_path, capsys):
    """A step that is due by `--save_every` and the last one is saved once."""
    for every, saves in ((1, [1, 2, 3, 4, 5]), (5, [5]), (100, [5])):
        steps = Steps(parts, tmp_path / str(every), save_every=every)
        steps.go()
        assert steps.saves == saves
    steps = Steps(parts, tmp_path / "run", lr=0.5, warmup_steps=2)
    assert [steps.run.learning_rate(step) for step in range(3)] == [0.25, 0.5, 0.5]
    assert steps.go() == [1, 2, 3, 4, 5] and steps.saves == [2, 4, 5]
    kept = sorted(p.name for p in (steps.folder / "checkpoints").iterdir())
    assert kept == ["step_000004", "step_000005"]  # --keep_last
    assert exported(steps.folder / "hf") == TOTAL
    printed = capsys.readouterr().out
    assert printed.count(" GB each, --keep_last 2 stay") == 4  # runs
    assert f"done: {steps.folder}/hf" in printed
    assert ("python extras/trace/doctor.py" in printed) == has_extra("trace")
    for n, line in enumerate(metrics(steps.folder), 1):
        known = dict(loss=n, lr=0.5, epoch=n / 5, num_tokens=3 * n)
        assert {name: line[name] for name in known} == known
        assert line["tokens_per_second"] == pytest.approx(3 / line["time/step"])
        assert ("time/save" in line) == (n in (3, 5))  # logged with the next step


def test_evaluations_follow_eval_every(parts, tmp_path):
    for every, expected in ((0, []), (2, [0, 2, 4, 5]), (5, [0, 5]), (100, [0, 5])):
        run = Steps(parts, tmp_path, eval_every=every).run
        assert [step for step in range(TOTAL + 1) if run.evaluates(step)] == expected


@pytest.mark.parametrize(("flags", "saves"), [({}, [2, 3, 5]), (dict(save_minutes=0), [3, 5])])
def test_step_that_ends_long_after_the_last_save_saves(flags, saves, parts, tmp_path, monkeypatch):
    """Steps of 16 minutes. The third one is due by `--save_every`, and the minutes begin anew."""
    clock = Clock(monkeypatch, run)
    steps = Steps(parts, tmp_path, save_every=3, **flags)
    draw = steps.order.draw
    monkeypatch.setattr(
        steps.order, "draw", lambda n: (setattr(clock, "ahead", clock.ahead + 960), draw(n))
    )
    steps.go()
    assert steps.saves == saves


@pytest.mark.slow
@pytest.mark.parametrize("stop_in", [1, 2, 4])
def test_stopped_run_finishes_the_step_saves_once_and_resumes(stop_in, parts, tmp_path, capsys):
    """Also at a regular save, and in the last step: the run is then complete."""
    stopped = Steps(parts, tmp_path)
    end = stop_in + 1
    assert stopped.go(stop_in=stop_in) == [*range(1, end + 1)]
    assert stopped.saves == sorted({*range(2, end + 1, 2), end})
    assert exported(tmp_path / "hf") == end
    stops = f"stopped after step {end}; the same command resumes from there"
    out = capsys.readouterr().out
    assert (stops in out, "done: " in out) == (end < 5, end == 5)
    process.stop_signalled = False
    again = Steps(parts, tmp_path)
    assert (again.run.first_step, again.value(), again.run.num_tokens) == (end, end, 3 * end)
    assert again.go() == [1, 2, 3, 4, 5] and again.begun == [*range(end, 5)]
    assert exported(tmp_path / "hf") == 5
    for n, line in enumerate(metrics(tmp_path), 1):
        assert (line["loss"], line["epoch"], line["num_tokens"]) == (n, n / 5, 3 * n)


def test_aborted_step_is_repeated_after_a_resume(parts, tmp_path):
    steps = Steps(parts, tmp_path, save_every=100)
    assert next(steps.run.steps()) == 0
    steps.run.stop_requested = True
    steps.run.end()  # nothing is trained
    assert steps.saves == [] and not (tmp_path / "hf").exists()
    steps = Steps(parts, tmp_path, save_every=100)
    assert steps.go(break_off=3) == [1, 2, 3] and steps.saves == [3]
    assert exported(tmp_path / "hf") == 3
    again = Steps(parts, tmp_path, save_every=100)
    assert again.run.first_step == 3 and again.go() == [1, 2, 3, 4, 5] and again.begun == [3, 4]


def test_finished_run_does_no_further_step(parts, tmp_path):
    Steps(parts, tmp_path).go()
    before = (tmp_path / "metrics.jsonl").read_text()
    again = Steps(parts, tmp_path)
    again.go()
    assert again.begun == again.saves == [] and (tmp_path / "metrics.jsonl").read_text() == before
    longer = Steps(parts, tmp_path, total=7)
    assert longer.go() == [1, 2, 3, 4, 5, 6, 7] and longer.begun == [5, 6] and longer.value() == 7


def test_another_length_of_a_decay_is_told(parts, tmp_path, capsys):
    cosine = dict(lr=0.5, lr_schedule="cosine", save_every=5)
    Steps(parts, tmp_path, **cosine).go()
    Steps(parts, tmp_path, **cosine)
    assert "--lr_schedule" not in capsys.readouterr().out
    longer = Steps(parts, tmp_path, total=10, **cosine)
    line = "--lr_schedule cosine: 5 steps are now 10: after lr 0.0477 the next step has 0.25"
    assert line in capsys.readouterr().out
    longer.go()
    Steps(parts, tmp_path / "b", save_every=5).go()
    Steps(parts, tmp_path / "b", total=10, save_every=5)
    assert "--lr_schedule" not in capsys.readouterr().out


# ---- --keep_best ----

BEST = dict(eval_every=1, keep_best="eval_score", save_every=100)


@pytest.mark.parametrize(
    ("flags", "scores", "best"),
    [
        ({}, [1, 3, 2, 3, 0], 2),  # the first of equal ones
        (dict(keep_best="loss"), [0] * 5, 1),  # the loss grows
        ({}, [math.nan, 1, math.nan, 0.5, 0.5], 2),
        (dict(eval_every=2), [9, 1, 9, 2, 1], 4),  # only evaluated steps
        (dict(keep_best="eval_score:lowest"), [3, 1, 2, 3, 4], 2),
    ],
)
def test_best_step_is_exported(flags, scores, best, parts, tmp_path, capsys):
    Steps(parts, tmp_path, **BEST | flags).go(scores=scores)
    assert exported(tmp_path / "best") == best and exported(tmp_path / "hf") == 5
    assert f"after step {best}, in {tmp_path}/best" in capsys.readouterr().out
    folders = ({p.name for p in (tmp_path / name).iterdir()} for name in ("best", "hf"))
    assert next(folders) == next(folders) and not list(tmp_path.glob("*.tmp"))


def test_lowest_loss_of_one_held_out_set_is_best(parts, tmp_path):
    """`loss` as the name of a set is no loss."""
    steps = Steps(parts, tmp_path, **BEST | dict(keep_best="eval_loss/hard"))
    for step, hard in enumerate((3, 1, 2), 1):
        steps.run.log(step, {"eval_loss": step, "eval_loss/hard": hard})
    assert steps.run.best == 1
    steps.run.args = replace(steps.run.args, keep_best="eval/solved/loss")
    steps.run.best = None
    for step, score in enumerate((3, 1, 4), 1):
        steps.run.log(step, {"eval/solved": 0, "eval/solved/loss": score})
    assert steps.run.best == 4


@pytest.mark.parametrize(
    ("metric", "end"),
    [
        ("eval/reverse_kl", "lowest"),
        ("eval_entropy", "lowest"),
        ("eval_kl", "lowest"),
        ("eval/error", "lowest"),
        ("eval_loss", "lowest"),
        ("eval/solved", "highest"),
        ("eval/pass_at_4", "highest"),
        ("eval/rewards/kl/mean", "highest"),
        ("eval_rewards/accuracies", "highest"),
        ("eval_mean_token_accuracy", "highest"),
        ("eval_rewards/rejected", None),
        ("completions/mean_length", None),
        ("eval/solved_stderr", None),
    ],
)
def test_better_end_of_a_metric(metric, end):
    assert better_end(metric) == end


def test_unknown_keep_best_metric_is_refused(parts, tmp_path):
    steps = Steps(parts, tmp_path, **BEST | dict(keep_best="eval/solved", eval_every=2))
    with pytest.raises(ValueError, match="^--keep_best eval/solved: no such metric.*: eval_score$"):
        steps.go(scores=[1] * 5)
    assert steps.begun == [0, 1]  # at the first evaluation


def test_best_value_survives_a_resume_with_the_same_metric(parts, tmp_path):
    scores = [1, 5, 2, 3, 4]
    assert Steps(parts, tmp_path, **BEST).go(stop_in=2, scores=scores) == [1, 2, 3]
    process.stop_signalled = False
    assert Steps(parts, tmp_path, **BEST | dict(keep_best="loss")).run.best is None
    assert Steps(parts, tmp_path, **BEST).go(scores=scores)[-1] == 5
    assert exported(tmp_path / "best") == 2
