"""Lines of a run about its data and its evaluations."""

import sys

import pytest

import dpo
import grpo
import kto
from common.packs.sample import Sample
from common.train.overview import cautions_about_data, dry_run, num_steps


def test_steps_that_repeat_rows_are_reported():
    words = "warning: --batch_size 64 exceeds the 5 training rows: each step draws every row 12.8"
    assert cautions_about_data(dpo.Args(batch_size=64), range(5))[0].startswith(words)
    assert (
        "--prompts_per_step 64" in cautions_about_data(grpo.Args(prompts_per_step=64), range(63))[0]
    )
    assert cautions_about_data(dpo.Args(batch_size=64), range(64)) == []


def test_held_out_data_that_is_not_read_is_a_line():
    flags = dict(batch_size=2, eval_dataset=("a.jsonl",))
    assert cautions_about_data(dpo.Args(**flags), range(9)) == []
    (line,) = cautions_about_data(dpo.Args(**flags, eval_every=0), range(9))
    assert line == "warning: --eval_dataset is not read: --eval_every is 0"


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"), [(1.1, 100, 11, 10), (0.1, 30, 1, 3), (1.0, 101, 10, 11)]
)
def test_steps_of_a_fraction_of_an_epoch_are_counted_exactly(epochs, rows, batch, steps):
    assert num_steps(dpo.Args(epochs=epochs, batch_size=batch), range(rows)) == steps


@pytest.mark.parametrize(
    ("trues", "falses", "flags", "line"),
    [
        (50, 50, {}, None),
        (1, 1, {}, None),
        (3, 30, {}, "labels: 3 true, 30 false; --desirable_weight 10 would balance them"),
        (30, 3, dict(undesirable_weight=2.0), "30 true, 3 false; --undesirable_weight 10 would"),
        (3, 30, dict(desirable_weight=10.0), None),
    ],
)
def test_unbalanced_labels_are_reported_with_their_weight(trues, falses, flags, line):
    rows = [dict(label=label) for label in [True] * trues + [False] * falses]
    lines = kto.describe_labels([[Sample([0], [True], row=row)] for row in rows], kto.Args(**flags))
    assert lines == [] if line is None else line in lines[0]


@pytest.mark.parametrize(
    ("label", "value"), [("True", True), ("false", False), ("1", True), (0, False), (1, True)]
)
def test_labels_of_tables_are_read(label, value):
    assert kto.label_of(dict(label=label, _source="x:1")) is value


def test_a_dry_run_without_its_folder_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "extras.plan.plan", None)
    with pytest.raises(ValueError, match="^--dry_run needs extras/plan, which is not here$"):
        dry_run(grpo.Args(dry_run=True), "", None, [], [])
