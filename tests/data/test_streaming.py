"""Rows that are read as they come: all of them, once a pass, in an order that a resumed run goes on with."""

import gzip
import json
import random
from collections import Counter

import datasets
import inprocess
import pytest
from helpers import assert_close_metrics, metrics, run

import sft
from common.data import files, streaming
from common.data.rows import SFT_COLUMNS
from common.data.streaming import Stream
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model

main = inprocess.main


@pytest.fixture
def data(tmp_path):
    """Shards of three kinds, 30 rows in all."""
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = [dict(question=f"{i}?", answer="x" * (i % 7 + 1)) for i in range(30)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[7:18]))
    datasets.Dataset.from_list(rows[18:]).to_parquet(folder / "c.parquet")
    return folder


def a_stream(data, **flags) -> Stream:
    args = sft.Args(
        dataset=(str(data),),
        streaming=True,
        max_steps=1,
        eval_every=0,
        **dict(max_length=100, shuffle_buffer=4) | flags,
    )
    ((stream, _), held_out) = streaming.stream(sft.encode_rows, SFT_COLUMNS, load_tokenizer(tiny_model()), args)
    assert held_out == ([], Counter())
    return stream


def drawn(stream: Stream, count: int) -> list[str]:
    return [stream[i].row["_source"] for i in stream.draw(count)]


def test_each_pass_has_every_row_once_in_another_order(data):
    stream = a_stream(data)
    first, second = drawn(stream, 30), drawn(stream, 30)
    assert set(first) == {f"{name}:{i + 1}" for name, n in (("a.jsonl", 7), ("b.jsonl.gz", 11), ("c.parquet", 12))
                          for i in range(n)}  # fmt: skip
    assert sorted(first) == sorted(second) and first != second and stream.cursor["epoch"] == 1
    assert drawn(a_stream(data, seed=1), 30) != first == drawn(a_stream(data), 30)
    assert [place.split(":")[0] for place in first] != sorted(place.split(":")[0] for place in first)
    assert len(set(drawn(a_stream(data, shuffle_buffer=1000), 30)) & set(first)) == 30


@pytest.mark.parametrize("buffer", [1, 4, 1000])
def test_it_goes_on_at_the_same_row(data, buffer):
    """Wherever it stopped, also at the end of what was read ahead, of a shard and of a pass."""
    wanted = drawn(a_stream(data, shuffle_buffer=buffer), 75)
    stream = a_stream(data, shuffle_buffer=buffer)
    for count in range(65):
        if count not in (0, 1, 4, 7, 18, 27, 28, 29, 30, 31, 60, 64):
            assert drawn(stream, 1) == [wanted[count]]
            continue
        state = json.loads(json.dumps(stream.state_dict()))
        other = a_stream(data, shuffle_buffer=buffer)
        other.load_state_dict(state)
        assert other[0].row["_source"] == wanted[count]  # the look ahead draws nothing
        assert drawn(other, 10) == wanted[count : count + 10]
        assert drawn(stream, 1) == [wanted[count]]


def test_other_shards_are_refused(data):
    state = a_stream(data).state_dict()
    (data / "a.jsonl").unlink()
    with pytest.raises(ValueError, match="^the checkpoint is of 3 shards, now --dataset .* has 2: other data$"):
        a_stream(data).load_state_dict(state)


def test_samples_are_those_of_rows_in_memory(data):
    from common.data.encode import Encoder
    from common.data.rows import load_rows

    stream = a_stream(data)
    rows = load_rows("--dataset", str(data), "train")
    args = sft.Args(max_length=100)
    encoder = Encoder(load_tokenizer(tiny_model()), args)
    wanted = {s.row["_source"]: (s.ids, s.loss_mask) for s in sft.encode_rows(rows, SFT_COLUMNS[2], encoder, args)[0]}
    assert {stream[i].row["_source"]: (stream[i].ids, stream[i].loss_mask) for i in stream.draw(30)} == wanted


def test_what_was_done_to_rows_is_told_at_the_end_of_a_pass(data, capsys):
    lines = (data / "a.jsonl").read_text().splitlines()
    lines[2], lines[4] = "no JSON", json.dumps(dict(question="q", answer=4))
    (data / "a.jsonl").write_text("\n".join(lines))
    stream = a_stream(data, on_bad_row="skip", max_length=26)
    kept = len({*drawn(stream, 5)})
    assert kept == 5 and capsys.readouterr().out == ""
    drawn(stream, 40)
    said = capsys.readouterr().out
    assert f"--on_bad_row skip: 1 left out, such as --dataset {data}/a.jsonl: line 3 is not valid JSON" in said
    assert "--on_bad_row skip: 1 left out, such as a.jsonl:5: column answer is int" in said
    assert "training rows of pass 1 dropped as too long" in said
    with pytest.raises(ValueError, match=r"^--dataset .*: column answer is int|a.jsonl: line 3 is not valid JSON"):
        drawn(a_stream(data), 30)
    with pytest.raises(ValueError, match=r"^--dataset .*: no rows are left: 28 dropped as too long"):
        drawn(a_stream(data, on_bad_row="skip", max_length=3), 1)


def test_columns_are_renamed(data):
    stream = a_stream(data, columns=("prompt=question", "completion=answer"), prompt_format="plain")
    assert len(drawn(stream, 30)) == 30
    with pytest.raises(ValueError, match="^--columns prompt=nothing: no column nothing"):
        drawn(a_stream(data, columns=("prompt=nothing",)), 1)


def test_a_hub_data_set_is_read_by_its_shards(data, monkeypatch):
    """The library's own streams, of files in the place of a repository."""
    rows = [json.dumps(dict(question=str(i), answer="x")) for i in range(9)]
    names = [str(data / f"{name}.jsonl") for name in "xyz"]
    for i, name in enumerate(names):
        with open(name, "w") as file:
            file.write("\n".join(rows[3 * i : 3 * i + 3]))
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **options: load_dataset("json", data_files=names, **options)
    )
    files._from_hub.cache_clear()
    wanted = {f"some/data/train/{shard}:{row}" for shard in range(3) for row in (1, 2, 3)}
    assert set(drawn(a_stream("some/data"), 9)) == wanted
    behind = files.files_behind("--dataset", "some/data", "train", None)
    assert [file.suffix for file in behind] == [".arrow"] and len(
        files.read_hub("--dataset", "some/data", "train", None)
    ) == 9
    files._from_hub.cache_clear()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(), "--streaming needs --max_steps"),
        (dict(max_steps=3), "--streaming sets no rows aside: name an --eval_dataset, or --eval_every 0"),
        (dict(max_steps=3, eval_every=0, dataset=("a:1", "b:2")), "--streaming: --dataset a:1 b:2: .* without weights"),
    ],
)
def test_flags_that_do_not_go_together(flags, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        sft.Args(streaming=True, **flags)
    with pytest.raises(ValueError, match="^--shuffle_buffer 3 would not be read: there is no --streaming"):
        sft.Args(shuffle_buffer=3)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("arithmetic", "--dataset arithmetic: a built-in task is no stream"),
        ("nothing.jsonl", "--dataset nothing.jsonl: no such file"),
        ("empty", "--dataset .*: no .* files in it"),
    ],
)
def test_data_that_is_no_stream(dataset, words, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"^{words}"):
        a_stream(tmp_path / dataset if dataset == "empty" else dataset)


@pytest.mark.slow
def test_a_run_resumes_exactly_and_is_that_of_two_ranks(data, tmp_path, main):
    rng = random.Random(0)
    held_out = [dict(question=str(i), answer=str(rng.random())) for i in range(5)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    flags = ("--streaming", "true", "--dataset", data, "--eval_dataset", tmp_path / "held_out.jsonl", "--max_steps", 6,
             "--batch_size", 8, "--save_every", 3, "--shuffle_buffer", 10, "--eval_every", 4, "--lr", 1e-3)  # fmt: skip
    main("sft", *flags, "--output_dir", tmp_path / "run")
    inprocess.assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=6)
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "two")
    assert_close_metrics(tmp_path / "run", tmp_path / "two", ("loss", "eval_loss", "num_tokens", "epoch"), rel=1e-4)
    assert [line["epoch"] for line in metrics(tmp_path / "two")] == [0, 0, 0, 1, 1, 1]
