"""The ranks share the encoding of the rows, and rows that do not fit are counted."""

import json
from types import SimpleNamespace

import pytest
from helpers import ROOT, run

import dpo
import sft
from common.data.encode import Encoder
from common.data.load import encode_all, load_samples
from common.data.rows import SFT_COLUMNS
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model

RANK = """
import json, sys
sys.path.insert(0, {root!r})
import sft
from common.data import load
from common.data.rows import SFT_COLUMNS
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
from common.parallel import distributed
rows, folder = sys.argv[1:]
distributed.setup(0)
load.ROWS_AT_ONCE = 3
tokenizer = load_tokenizer(tiny_model())
found = []
for on_bad_row in ("skip", "error"):
    args = sft.Args(dataset=(rows,), max_length=20, eval_size=2, on_bad_row=on_bad_row)
    try:
        for part, counts in load.load_samples(sft.encode_row, SFT_COLUMNS, tokenizer, args):
            found.append([(x.ids, x.loss_mask, x.row["_source"]) for [x] in part] + [counts])
    except ValueError as error:
        found.append(str(error))
with open(f"{{folder}}/{{distributed.rank()}}.json", "w") as file:
    json.dump(found, file)
distributed.cleanup()
"""


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
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rank.py").write_text(RANK.format(root=str(ROOT)))
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        out = run(ranks, tmp_path / "rank.py", tmp_path / "rows.jsonl", folder)
        assert "is read as this special token" in out.stdout
        found += [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    assert len(found) == 3 and found[0] == found[1] == found[2]
    training, held_out, error = found[0]
    assert training[-1] == {"dropped as too long (--max_length)": 1}
    assert len(training) + len(held_out) == 24
    assert "column completion is int, expected a string" in error


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


def test_unknown_characters_are_counted_unless_every_text_ends_with_their_token(tokenizer):
    row = dict(prompt="1+1=", completion="2")
    encoder = Encoder(tokenizer, args := sft.Args(max_length=8))
    for unk, counts in (
        (encoder.tokenizer.eos_token_id, {}),
        (encoder.tokenizer("2")["input_ids"][0], {"with characters that the tokenizer lacks": 1}),
        (None, {}),
    ):
        encoder.tokenizer = SimpleNamespace(unk_token_id=unk, eos_token_id=tokenizer.eos_token_id)

        def encode_row(row, *_):
            return [Encoder(tokenizer, args).sft(row, ("prompt", "completion"))]

        assert encode_all(encode_row, [row | dict(_source="x:1")], (), encoder, args)[1] == counts


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
