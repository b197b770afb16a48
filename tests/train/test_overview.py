"""Lines of a run about its data and its evaluations."""

from types import SimpleNamespace

import pytest

import dpo
import grpo
import kto
from common.data.sample import Sample
from common.train.overview import fall, repetitions


@pytest.mark.parametrize(
    ("args", "rows", "line"),
    [
        (
            dpo.Args(batch_size=64),
            5,
            "--batch_size 64 exceeds the 5 training rows: each step draws every row 12.8 times",
        ),
        (grpo.Args(prompts_per_step=64), 63, "--prompts_per_step 64 exceeds the 63 training rows: each step draws"),
        (dpo.Args(batch_size=64), 64, None),
    ],
)
def test_steps_that_repeat_rows_are_reported(args, rows, line):
    lines = repetitions(args, range(rows))
    assert lines == [] if line is None else line in lines[0]


@pytest.mark.parametrize(
    ("solved", "reward", "logp", "referenced", "said"),
    [
        (0.41, 0.1, -2.0, True, ""),
        (0.36, -0.05, -3.0, True, ""),  # within two standard errors, half a nat
        (0.30, 0.1, -3.0, True, "eval/solved fell from 0.41 to 0.3"),
        (0.41, -0.2, -3.0, True, "the log-prob of chosen completions fell from -1 to -3"),
        (0.41, -0.2, -300.0, True, ""),  # of a long completion
        (0.41, -0.2, -3.0, False, ""),
    ],
)
def test_falls_of_good_answers_are_reported(solved, reward, logp, referenced, said):
    args = dpo.Args(eval_generate=256, beta=0.1)
    metrics = {"eval/solved": solved, "eval_rewards/chosen": reward, "eval_logps/chosen": logp}
    assert fall(args, {"eval/solved": 0.41}, metrics, referenced) == said
    without = {name: value for name, value in metrics.items() if name != "eval/solved"}
    assert "solved" not in fall(dpo.Args(), {}, without, referenced)


@pytest.mark.parametrize(
    ("counts", "flags", "line"),
    [
        ((50, 50), {}, None),
        ((3, 30), {}, "labels: 3 true, 30 false; --desirable_weight 10 would balance them"),
        ((30, 3), dict(undesirable_weight=2.0), "labels: 30 true, 3 false; --undesirable_weight 10 would balance them"),
        ((3, 30), dict(desirable_weight=10.0), None),
    ],
)
def test_unbalanced_labels_are_reported_with_their_weight(counts, flags, line):
    labels = [True] * counts[0] + [False] * counts[1]
    lines = kto.describe_labels([[Sample([0], [True], row=dict(label=x))] for x in labels], kto.Args(**flags))
    assert lines == [] if line is None else lines[0].startswith(line)
    assert kto.describe_labels([[SimpleNamespace(row=dict(label=x)) for x in (True, False)]], kto.Args()) == []


@pytest.mark.parametrize(("label", "value"), [("True", True), ("false", False), ("1", True), (0, False), (1, True)])
def test_labels_of_tables_are_read(label, value):
    assert kto.label_of(dict(label=label, _source="x:1")) is value
