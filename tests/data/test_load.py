"""Samples are made on access, and the ranks share the encoding of the rows."""

import json

import pytest
from helpers import ROOT, run

from common.data.load import Samples
from common.data.sample import Sample

RANK = """
import json, sys
sys.path.insert(0, {root!r})
import sft
from common.data import load
from common.data.rows import SFT_COLUMNS
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
from common.parallel import distributed
rows, folder, on_bad_row = sys.argv[1:]
distributed.setup(0)
load.ROWS_AT_ONCE = 3
args = sft.Args(dataset=(rows,), max_length=20, eval_size=2, on_bad_row=on_bad_row)
task = load.load_samples, sft.encode_rows, SFT_COLUMNS, load_tokenizer(tiny_model(), args), args
try:
    found = [[sample.ids for sample in part] + [counts] for part, counts in task[0](*task[1:])]
except ValueError as error:
    found = str(error)
with open(f"{{folder}}/{{distributed.rank()}}.json", "w") as file:
    json.dump(found, file)
distributed.cleanup()
"""


def test_samples_are_made_on_access():
    made = []

    def make(i: int) -> list[Sample]:
        made.append(i)
        return [Sample([i], [True])]

    groups = Samples([{}] * 3, make)
    assert len(groups) == 3 and not made
    assert groups[-1][0].ids == [2] and made == [2]
    assert [group[0].ids for group in groups] == [[0], [1], [2]]
    with pytest.raises(IndexError):
        groups[3]


@pytest.mark.slow
@pytest.mark.parametrize("on_bad_row", ["skip", "error"])
def test_every_rank_gets_the_samples_that_one_rank_makes(on_bad_row, tmp_path):
    """Blocks of three rows of each rank, a long row, and two bad ones, of which one is reported on
    every rank."""
    rows = [dict(prompt=f"{i}+1=", completion=f"{i + 1}") for i in range(25)]
    rows[4]["completion"] = "x" * 40
    for number in (11, 17):
        rows[number]["completion"] = 5
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rank.py").write_text(RANK.format(root=str(ROOT)))
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run(ranks, tmp_path / "rank.py", tmp_path / "rows.jsonl", folder, on_bad_row)
        found += [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    assert len(found) == 3 and found[0] == found[1] == found[2]
    if on_bad_row == "error":
        assert "column completion is int, expected a string" in found[0]
    else:
        training, held_out = found[0]
        assert training[-1] == {"dropped as too long": 1} and len(training) + len(held_out) == 24
