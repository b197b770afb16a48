"""The training run around its steps: resume, save, stop, evaluate, log, and export."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers import metrics
from model.test_policy import whole
from safetensors.torch import load_file

from common.config.extra import has_extra
from common.config.groups import TrainArgs
from common.data.order import Order
from common.data.sample import Sample
from common.model.hub import load_tokenizer
from common.model.policy import load_policy
from common.model.tiny import tiny_model
from common.parallel import durable, process
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


class Steps:
    """Run whose step n sets every weight to n and draws two of ten rows."""

    def __init__(self, parts, folder, total: int = TOTAL, **flags):
        self.model, optimizer = parts
        self.args = TrainArgs(output_dir=str(folder), **(dict(eval_every=0, save_every=2) | flags))
        prepare_output_dir(self.args)
        begin_run(self.args)
        self.order, self.begun, self.saves = Order({"": range(10)}, 0), [], []
        self.run = Run(
            self.args, self.model, optimizer, load_tokenizer(tiny_model()), total, show=("loss",),
            curves=("loss",), order=self.order,
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
    (value,) = {
        value
        for tensor in load_file(folder / "model.safetensors").values()
        for value in tensor.unique().tolist()
    }
    return value


def test_run_saves_at_save_every_and_at_the_end_and_exports(parts, tmp_path, capsys):
    steps = Steps(parts, tmp_path)
    assert (
        steps.go() == [1, 2, 3, 4, 5]
        and steps.begun == [0, 1, 2, 3, 4]
        and steps.saves == [2, 4, 5]
    )
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step_000004",
        "step_000005",
    ]  # --keep_last
    assert exported(tmp_path / "hf") == TOTAL
    printed = capsys.readouterr().out
    assert (tmp_path / "curves.png").is_file() and f"done: {tmp_path}/hf" in printed
    assert ("python extras/trace/doctor.py" in printed) == has_extra("trace")
    assert f"upload: hf upload USER/NAME {tmp_path}/hf --private" in printed


def test_state_has_step_data_and_totals(parts, tmp_path):
    Steps(parts, tmp_path).go()
    state = json.loads((tmp_path / "checkpoints" / "step_000005" / "state.json").read_text())
    metrics = tmp_path / "metrics.jsonl"
    assert state == dict(
        step=5,
        totals=dict(num_tokens=15, history=durable.fingerprint(metrics), total_steps=5, ranks=1),
        order=dict(sources={"": [10, 10]}),
    )


def test_longer_run_says_that_its_learning_rate_changes(parts, tmp_path, capsys):
    change = "was planned for 5 steps, continues as if for 7 from the start"
    for total, schedule, said in (
        (5, "linear", 0),
        (7, "linear", 1),
        (7, "linear", 0),
        (8, "constant", 0),
    ):
        resume = "never" if schedule == "constant" else "auto"
        Steps(parts, tmp_path, total, lr_schedule=schedule, resume=resume).go()
        assert capsys.readouterr().out.count(change) == said
    Steps(parts, tmp_path, 9, lr_schedule="constant").go()
    assert "was planned for" not in capsys.readouterr().out


@pytest.mark.parametrize("every", [1, 3, 5, 100])
def test_step_is_saved_only_once(every, parts, tmp_path):
    steps = Steps(parts, tmp_path, save_every=every)
    steps.go()
    assert steps.saves == [step for step in range(1, 6) if step % every == 0 or step == 5]


@pytest.mark.slow
def test_stopped_run_finishes_the_step_saves_once_and_resumes(parts, tmp_path, capsys):
    whole_run = Steps(parts, tmp_path / "whole")
    whole_run.go()
    stopped = Steps(parts, tmp_path / "stopped")
    assert stopped.go(stop_in=2) == [1, 2, 3] and stopped.saves == [2, 3]
    assert exported(tmp_path / "stopped" / "hf") == 3
    assert "stopped after step 3; the same command resumes from there" in capsys.readouterr().out
    process.stop_signalled = False
    again = Steps(parts, tmp_path / "stopped")
    assert again.run.first_step == 3 and again.value() == 3 and again.run.num_tokens == 9
    assert again.go() == [1, 2, 3, 4, 5] and again.begun == [3, 4] and again.saves == [4, 5]
    assert (tmp_path / "stopped" / "hf").is_dir()
    for a, b in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "stopped"), strict=True):
        assert {k: a[k] for k in ("loss", "epoch", "num_tokens")} == {
            k: b[k] for k in ("loss", "epoch", "num_tokens")
        }


@pytest.mark.slow
@pytest.mark.parametrize("stop_in", [1, 4])
def test_stop_at_a_regular_save_saves_once(stop_in, parts, tmp_path):
    """This includes the last step; the run is then complete when it is started again."""
    steps = Steps(parts, tmp_path)
    steps.go(stop_in=stop_in)
    assert steps.saves[-1] == stop_in + 1 and len(set(steps.saves)) == len(steps.saves)
    assert exported(tmp_path / "hf") == stop_in + 1
    process.stop_signalled = False
    assert Steps(parts, tmp_path).go() == [1, 2, 3, 4, 5] and exported(tmp_path / "hf") == 5


def test_aborted_step_is_repeated_after_a_resume(parts, tmp_path):
    steps = Steps(parts, tmp_path, save_every=100)
    assert steps.go(break_off=3) == [1, 2, 3] and steps.saves == [3]
    assert exported(tmp_path / "hf") == 3
    again = Steps(parts, tmp_path, save_every=100)
    assert again.run.first_step == 3 and again.go() == [1, 2, 3, 4, 5] and again.begun == [3, 4]


def test_aborted_first_step_saves_nothing(parts, tmp_path):
    steps = Steps(parts, tmp_path)
    assert next(steps.run.steps()) == 0
    steps.run.stop_requested = True
    steps.run.end()
    assert steps.saves == [] and not (tmp_path / "hf").exists()
    assert Steps(parts, tmp_path).run.first_step == 0


def test_finished_run_does_no_further_step(parts, tmp_path):
    Steps(parts, tmp_path).go()
    before = (tmp_path / "metrics.jsonl").read_text()
    again = Steps(parts, tmp_path)
    again.go()
    assert again.begun == again.saves == [] and (tmp_path / "metrics.jsonl").read_text() == before
    longer = Steps(parts, tmp_path, total=7)
    assert longer.go() == [1, 2, 3, 4, 5, 6, 7] and longer.begun == [5, 6] and longer.value() == 7


def test_resume_with_other_data_is_refused(parts, tmp_path):
    Steps(parts, tmp_path).go()
    args = TrainArgs(output_dir=str(tmp_path), eval_every=0, save_every=2)
    with pytest.raises(ValueError, match="--dataset: 11 training rows, but 10 in the checkpoint"):
        Run(
            args,
            *parts,
            load_tokenizer(tiny_model()),
            TOTAL,
            show=(),
            curves=(),
            order=Order({"": range(11)}, 0),
        )


def test_evaluations_follow_eval_every(parts, tmp_path):
    def schedule(every: int) -> list[int]:
        run = Steps(parts, tmp_path, eval_every=every).run
        return [finished for finished in range(TOTAL + 1) if run.evaluates(finished)]

    assert (
        schedule(0) == []
        and schedule(2) == [0, 2, 4, 5]
        and schedule(5) == [0, 5]
        and schedule(100) == [0, 5]
    )


def test_step_logs_its_metrics(parts, tmp_path):
    steps = Steps(parts, tmp_path, lr=0.5, warmup_steps=2)
    assert [steps.run.learning_rate(step) for step in range(3)] == [0.25, 0.5, 0.5]
    steps.go()
    for n, line in enumerate(metrics(tmp_path), 1):
        assert line.keys() >= {
            "step",
            "loss",
            "lr",
            "epoch",
            "num_tokens",
            "tokens_per_second",
            "time/step",
        }
        assert (line["loss"], line["lr"], line["epoch"], line["num_tokens"]) == (
            n,
            0.5,
            n / 5,
            3 * n,
        )
        assert line["tokens_per_second"] == pytest.approx(3 / line["time/step"])
    assert "time/save" in metrics(tmp_path)[2] and "time/save" not in metrics(tmp_path)[1]
    assert steps.run.latest == {k: v for k, v in line.items() if k != "step"}


# ---- --keep_best ----

BEST = dict(eval_every=1, keep_best="eval_score", save_every=100)


def test_best_checkpoint_is_kept_and_exported(parts, tmp_path, capsys):
    """The first of equal ones is kept; the export is of that step, whatever is trained later."""
    steps = Steps(parts, tmp_path, **BEST)
    steps.go(scores=[1, 3, 2, 3, 0])
    assert (
        exported(tmp_path / "best") == 2
        and exported(tmp_path / "hf") == 5
        and not list(tmp_path.glob("*.tmp"))
    )
    best, last = ({p.name for p in (tmp_path / name).iterdir()} for name in ("best", "hf"))
    assert best == last
    said = capsys.readouterr().out
    assert (
        f"best eval_score so far: 3 after step 2, in {tmp_path}/best" in said
        and said.count("so far") == 2
    )


def test_lowest_loss_is_best(parts, tmp_path):
    Steps(parts, tmp_path, **BEST | dict(keep_best="loss")).go(scores=[0] * 5)  # the loss grows
    assert exported(tmp_path / "best") == 1


def test_lowest_loss_of_one_held_out_set_is_best(parts, tmp_path):
    steps = Steps(parts, tmp_path, **BEST | dict(keep_best="eval_loss/hard"))
    for step, hard in enumerate((3, 1, 2), 1):
        steps.run.log(step, {"eval_loss": step, "eval_loss/hard": hard})
    assert steps.run.best == 1
    # the set's name, not the metric's
    steps.run.args = replace(steps.run.args, keep_best="eval/solved/loss")
    steps.run.best = None
    for step, score in enumerate((3, 1, 4), 1):
        steps.run.log(step, {"eval/solved": 0, "eval/solved/loss": score})
    assert steps.run.best == 4


def test_nan_is_no_improvement(parts, tmp_path):
    steps = Steps(parts, tmp_path, **BEST)
    steps.go(scores=[math.nan, 1, math.nan, 0.5, 0.5])
    assert exported(tmp_path / "best") == 2


def test_only_evaluated_steps_can_be_best(parts, tmp_path):
    Steps(parts, tmp_path, **BEST | dict(eval_every=2)).go(scores=[9, 1, 9, 2, 1])
    assert exported(tmp_path / "best") == 4


def test_unknown_keep_best_metric_is_refused(parts, tmp_path):
    steps = Steps(parts, tmp_path, **BEST | dict(keep_best="eval/solved", eval_every=2))
    with pytest.raises(
        ValueError, match="^--keep_best eval/solved: no such metric; choose .*: eval_score$"
    ):
        steps.go(scores=[1] * 5)
    assert steps.begun == [0, 1]  # the first of them
    with pytest.raises(ValueError, match="no such metric; choose one of the evaluation: none$"):
        Steps(parts, tmp_path / "none", **BEST).go()


def test_best_value_survives_a_resume(parts, tmp_path):
    scores = [1, 5, 2, 3, 4]
    assert Steps(parts, tmp_path, **BEST).go(stop_in=2, scores=scores) == [1, 2, 3]
    process.stop_signalled = False
    assert Steps(parts, tmp_path, **BEST).go(scores=scores)[-1] == 5
    assert exported(tmp_path / "best") == 2


def test_another_keep_best_metric_resets_the_best(parts, tmp_path):
    Steps(parts, tmp_path, **BEST).go(stop_in=1, scores=[3, 4, 5, 6, 7])
    process.stop_signalled = False
    steps = Steps(parts, tmp_path, **BEST | dict(keep_best="loss"))
    assert steps.run.best is None and steps.go(scores=[0] * 5)[-1] == 5
    assert exported(tmp_path / "best") == 3  # best of the later evaluations


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            dict(keep_best="loss", eval_every=0),
            "--keep_best loss has no effect with --eval_every 0",
        ),
    ],
)
def test_flags_without_their_required_flags_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        TrainArgs(**flags)
