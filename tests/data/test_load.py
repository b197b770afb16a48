"""Samples are made on access, and a feature is loaded only with the data that needs it."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

from common.data.load import Samples
from common.data.sample import Sample

LOADED = """
import json, sys
import sft
from common.data.rows import SFT_COLUMNS
from common.data.load import load_samples
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
args = sft.Args(dataset=(sys.argv[1],), max_length=150, eval_size=2)
tokenizer = load_tokenizer(tiny_model(), args)
load_samples(sft.encode_rows, SFT_COLUMNS, tokenizer, args, ("max_length", "overlong", "train_on"))
print(json.dumps([name for name in sys.modules if name.startswith("common.data.")]))
"""
# tasks is missing: common/rollout/environments.py imports it
FEATURES = {
    "calls",
    "continued",
    "folders",
    "literals",
    "streaming",
    "tables",
    "token_cache",
    "tokenize",
}


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


def test_a_small_file_of_messages_loads_no_other_feature(tmp_path):
    question = dict(role="user", content="1+1=")
    row = dict(messages=[question, dict(role="assistant", content="2")])
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 9)
    command = [sys.executable, "-c", LOADED, str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.rpartition(".")[2] for name in json.loads(done.stdout.splitlines()[-1])}
    assert {"load", "encode", "turns"} <= loaded and not loaded & FEATURES
