"""The ranks share the encoding of the rows, and rows that do not fit are counted."""

import json
import re
from unittest import mock

import pytest
from helpers import write_rows
from processes import run

import dpo
import sft
from common.model.tiny import tiny_model
from common.text import load
from common.text.columns import PAIR_COLUMNS, SFT_COLUMNS
from common.text.encode import Encoder
from common.text.load import encode_all, load_samples
from common.text.tokenizer import load_tokenizer

RANK = """
import json, sys
from text.test_load import loaded
from common.parallel import distributed
distributed.setup(0)
with open(f"{sys.argv[2]}/{distributed.rank()}.json", "w") as file:
    json.dump(loaded(sys.argv[1]), file)
distributed.cleanup()
"""


def loaded(rows: str) -> list:
    """Return samples and counts of rows, three at a time, and the error of the first bad one."""
    tokenizer, found = load_tokenizer(tiny_model()), []
    for on_bad_row in ("skip", "error"):
        args = sft.Args(dataset=(rows,), max_length=20, eval_size=2, on_bad_row=on_bad_row)
        try:
            with mock.patch.object(load, "ROWS_AT_ONCE", 3):
                for part, counts in load.load_samples(sft.encode_row, SFT_COLUMNS, tokenizer, args):
                    found.append([[[*x.ids], [*x.loss_mask], x.row["_source"]] for [x] in part])
                    found.append(counts)
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_every_rank_gets_the_samples_that_one_rank_makes(tmp_path):
    """Blocks of three rows of each rank, a long row, special tokens, and two bad ones, of which one
    is reported on every rank."""
    rows = [dict(prompt=f"{i}+1=", completion=f"{i + 1}") for i in range(25)]
    rows[4]["completion"] = "x" * 40
    for number in (5, 14):
        rows[number]["prompt"] = f"<|eos|>{number}"
    for number in (11, 17):
        rows[number]["completion"] = 5
    write_rows(tmp_path / "rows.jsonl", rows)
    out = run(2, RANK, tmp_path / "rows.jsonl", tmp_path)
    assert "is read as this special token" in out.stdout
    alone = loaded(str(tmp_path / "rows.jsonl"))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == alone
    training, counts, held_out, _, error = alone
    assert counts == {"dropped as too long (--max_length)": 1}
    assert len(training) + len(held_out) == 22
    assert "column completion is int, expected a string" in error


def test_samples_are_made_on_access():
    """Those of all rows at once would not fit into memory."""
    made: list[int] = []
    groups = load.Samples([{}] * 3, lambda i: made.append(i) or [i])
    assert len(groups) == 3 and not made
    assert groups[-1] == [2] and made == [2]
    assert list(groups) == [[0], [1], [2]] and groups[1:] == [[1], [2]]
    with pytest.raises(IndexError):
        groups[3]


# ---- what becomes of a row ----


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_model())


def counts_of(script, rows: list[dict], columns: tuple[str, ...], tokenizer, **flags):
    args = script.Args(**dict(max_length=8) | flags)
    rows = [row | dict(_source=f"x:{i}") for i, row in enumerate(rows)]
    found, counts = encode_all(script.encode_row, rows, columns, Encoder(tokenizer, args), args)
    return [[len(sample.ids) for sample in group] for group in found], counts


CUT = {"truncated (--max_length)": 1}
LONG, PROMPT = "dropped as too long (--max_length)", "dropped because no token is trained"


@pytest.mark.parametrize(
    ("script", "row", "flags", "lengths", "counts"),
    [
        (sft, ("1+1=", "2"), {}, [[6]], {}),
        (sft, ("1+1=", "2222222"), {}, [], {LONG: 1}),
        (sft, ("1+1=", "2222222"), dict(overlong="error", on_bad_row="skip"), [], {LONG: 1}),
        (sft, ("1+1=", "2222222"), dict(overlong="truncate"), [[8]], CUT),
        (sft, ("1+1=1+1=", "2"), dict(overlong="truncate"), [], {PROMPT: 1}),
        (dpo, ("1+1=", "2", "3333333"), {}, [], {LONG: 1}),
        (dpo, ("1+1=", "2", "3333333"), dict(overlong="truncate"), [[6, 8]], CUT),
        (dpo, ("1+1=1+1=", "2", "3"), dict(overlong="truncate"), [], {PROMPT: 1}),
        (dpo, ("1+1=", "33333333", "33333334"), dict(overlong="truncate"), [],
         {"with chosen = rejected, dropped": 1}),
    ],
)  # fmt: skip
def test_rows_fit_or_are_counted(script, row, flags, lengths, counts, tokenizer):
    columns = ("prompt", "completion") if script is sft else ("prompt", "chosen", "rejected")
    row = dict(zip(columns, row, strict=True))
    assert counts_of(script, [row], columns, tokenizer, **flags) == (lengths, counts)


@pytest.mark.parametrize(
    ("unknown", "counts"),
    [("2", {"with characters that the tokenizer lacks": 1}), ("<|eos|>", {}), (None, {})],
)
def test_unknown_characters_are_counted_unless_every_text_ends_with_their_token(unknown, counts):
    tokenizer = load_tokenizer(tiny_model())
    tokenizer.unk_token = unknown
    row = dict(prompt="1+1=", completion="2")
    assert counts_of(sft, [row], ("prompt", "completion"), tokenizer)[1] == counts


def test_unread_columns_are_listed_and_conversations_are_messages(tokenizer, tmp_path, capsys):
    turns = [dict(role="user", content="1+1="), dict(role="assistant", content="2")]
    rows = [dict(conversations=turns, id=i, topic="", tools=None, _c="c") for i in range(4)]
    rows[2]["topic"] = "sums"
    for name in ("messages", "conversations"):
        text = json.dumps(rows).replace("conversations", name)
        (tmp_path / f"{name}.json").write_text(text)
    found = []
    for name in ("messages", "conversations"):
        args = sft.Args(dataset=str(tmp_path / f"{name}.json"), max_length=99, eval_every=0)
        (samples, _), _ = load_samples(sft.encode_row, SFT_COLUMNS, tokenizer, args)
        found.append([sample.ids for [sample] in samples])
    assert found[0] == found[1] and len(found[0]) == 4
    assert capsys.readouterr().out.splitlines() == ["not used in training: id, topic"] * 2


@pytest.mark.parametrize(
    ("rows", "notes"),
    [
        ([dict(prompt=f"{i}+1=", completion=f"{i}+1={i + 1}") for i in range(30)], 1),
        ([dict(prompt=f"{i}+1=", completion=f"{i + 1}") for i in range(30)], 0),
        ([dict(prompt=f"{i}+1=", chosen=f" {i}+1=2", rejected=f"{i}+1=3") for i in range(30)], 2),
        ([dict(prompt=f"{i}+1=", completion="1+1=2") for i in range(1, 30)], 0),
    ],
)
def test_answers_that_repeat_their_prompts_are_said(rows, notes, tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    script, columns = (dpo, PAIR_COLUMNS) if "chosen" in rows[0] else (sft, SFT_COLUMNS)
    args = script.Args(dataset=(str(path),), max_length=99, prompt_format="plain")
    load_samples(script.encode_row, columns, load_tokenizer(tiny_model()), args)
    found = re.findall("warning: column .* begins with column prompt", capsys.readouterr().out)
    assert len(found) == notes
