"""Results of prompts: counted from the rewards of a rollout, and read from a file of eval.py, which
selects training rows."""

import json

import pytest

from common.metrics.meter import Meter
from common.rollout.pass_rates import count_solved, with_pass_rates
from tests.rewards.test_total import ROW, groups, make, user_file

CODE = """
def amount(completion, row):
    if completion == "raise": raise KeyError("oops")
    return None if completion == "none" else float(completion)

def word(completion, row):
    return float(completion == "18")
"""
ROWS = [dict(prompt=f"{i}?", _source=f"rows.jsonl:{i}") for i in range(1, 5)]


def test_solved_completions_are_counted_by_the_first_reward(device, tmp_path):
    """Completions without a reward count as neither, and the rewards are still there."""
    file = user_file(tmp_path, CODE)
    rewards = make((f"{file}:amount", f"{file}:word"), max_errors=1.0)
    batch = groups(["1", "1.5", "0.9", "none"], ["18", "raise", "0", "-1"], ["none"] * 4)
    rewards.begin(batch)
    assert count_solved(rewards, batch).tolist() == [[2, 1], [1, 2], [0, 0]]
    assert rewards(batch, Meter()).rewards_PG.nansum() == 1 + 1.5 + 0.9 + 19 - 1
    assert count_solved(rewards, []).shape == (0, 2)


def test_by_row_counts_the_reward_of_each_row(device):
    rows = [ROW | dict(reward=name) for name in ("gsm8k", "exact_match")]
    rewards = make(("by_row",), rows=rows)
    batch = groups(["#### 18", "18"], ["#### 18", "18"])
    for group, row in zip(batch, rows, strict=True):
        for sample in group:
            sample.row = row
    rewards.begin(batch)
    assert count_solved(rewards, batch).tolist() == [[1, 1], [1, 1]]


# ---- a file of eval.py ----


def written(path, scores: dict[int, list], **changes) -> str:
    """Write a line for each row, with a greedy completion that is right and those of `scores`."""
    lines = []
    for i, row_scores in scores.items():
        completions = [dict(text="", greedy=True, score=1.0)]
        completions += [dict(text="", greedy=False, score=score) for score in row_scores]
        lines.append(dict(source=f"rows.jsonl:{i}", completions=completions) | changes)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_rows_within_the_pass_rates_are_kept(device, tmp_path, capsys):
    """Greedy completions and missing scores do not count; a row without a score is left out."""
    scores = {4: [None, None], 2: [1.0, 0.5, None], 1: [0.0] * 4, 3: [1.0, 2.0], 9: [1.0]}
    file = written(tmp_path / "completions.jsonl", scores)
    kept = with_pass_rates(ROWS, file, (0.1, 0.9))
    assert kept == [ROWS[1] | dict(_pass_counts=(1, 1))]
    assert f"--pass_rates {file}: 1 of 4 training rows are kept" in capsys.readouterr().out
    counts = {row["_source"]: row["_pass_counts"] for row in with_pass_rates(ROWS, file, None)}
    assert list(counts.values()) == [(0, 4), (1, 1), (2, 0), (0, 0)], "all rows without bounds"
    assert [row["_source"] for row in with_pass_rates(ROWS, file, (0.0, 0.5))] == [
        "rows.jsonl:1", "rows.jsonl:2",
    ]  # fmt: skip
    assert [row["_source"] for row in with_pass_rates(ROWS, file, (1.0, 1.0))] == ["rows.jsonl:3"]


def test_file_that_does_not_match_is_refused(device, tmp_path):
    def refused(file, bounds=(0.1, 0.9)) -> str:
        with pytest.raises(ValueError) as error:
            with_pass_rates(ROWS, str(file), bounds)
        text = str(error.value)
        assert "\n" not in text and text.startswith(f"--pass_rates {file}: ")
        return text.removeprefix(f"--pass_rates {file}: ")

    file = tmp_path / "completions.jsonl"
    prefix = "no completions.jsonl of eval.py ("
    assert refused(tmp_path / "none.jsonl").startswith(f"{prefix}[Errno 2] No such file")
    file.write_text('{"prompt": "1?"}\n')
    assert refused(file).startswith(prefix)
    written(file, {1: [1.0]}, source=3)
    assert refused(file).startswith(prefix)
    written(file, {1: [1.0], 2: [1.0]}, source="rows.jsonl:1")
    assert refused(file) == f"{prefix}two lines of rows.jsonl:1)"
    written(file, {1: [1.0], 3: [0.0]})
    missing = "2 of 4 training rows are not in it, such as rows.jsonl:2"
    assert refused(file) == f"{missing}; run eval.py on this --dataset and --dataset_split"
    written(file, {i: [1.0, 0.0] for i in range(1, 5)})
    assert refused(file, (0.0, 0.1)) == "no training row has a pass rate from 0 to 0.1"
    written(file, {i: [] for i in range(1, 5)})
    assert refused(file, None) == "no training row has a pass rate from 0 to 1"
