"""A stream yields every row once per pass, in an order that a resumed run continues."""

import gzip
import json
import random
from collections import Counter
from functools import partial

import datasets
import pytest
from helpers import assert_close_metrics, assert_resumes_exactly, metrics, write_rows
from processes import run

import sft
from common.model.tiny import tiny_model
from common.text.columns import SFT_COLUMNS
from common.text.files import BadRows, open_split
from common.text.load import load_samples
from common.text.rows import rows_of_eval_sets
from common.text.tokenizer import load_tokenizer
from extras.streaming import streaming
from extras.streaming.streaming import StreamedSamples

ROWS = [dict(question=f"{i}?", answer="x" * (i % 7 + 1), id=i) for i in range(30)]


@pytest.fixture
def data(tmp_path):
    """A pattern of shards in three formats."""
    folder = tmp_path / "shards"
    folder.mkdir()
    write_rows(folder / "a.jsonl", ROWS[:7])
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS[7:18]))
    datasets.Dataset.from_list(ROWS[18:]).to_parquet(folder / "c.parquet")
    return folder / "*"


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 4)


def samples_of(data, streams: bool = True, **flags):
    flags = dict(max_length=100, max_steps=1, eval_every=0, streaming=streams) | flags
    args = sft.Args(dataset=(str(data),), **flags)
    task = (sft.encode_row, SFT_COLUMNS, load_tokenizer(tiny_model()), args)
    (samples, counts), (held_out, _) = load_samples(*task, stream=streams)
    assert list(held_out) == [] and counts == Counter()
    return samples


def drawn(stream: StreamedSamples, count: int) -> list[str]:
    return [stream[i][0].row["_source"] for i in stream.draw(count)]


def test_each_pass_yields_every_row_once_in_a_new_order(data, monkeypatch):
    stream = samples_of(data)
    first, second = drawn(stream, 30), drawn(stream, 30)
    sizes = {"a.jsonl": 7, "b.jsonl.gz": 11, "c.parquet": 12}
    assert sorted(first) == sorted(f"{name}:{i + 1}" for name in sizes for i in range(sizes[name]))
    assert sorted(first) == sorted(second) and first != second
    assert stream.epochs() == dict(epoch=1)
    assert drawn(samples_of(data, seed=1), 30) != first == drawn(samples_of(data), 30)
    shards = [place.split(":")[0] for place in first]
    assert shards != sorted(shards)
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 1000)
    assert sorted(drawn(samples_of(data), 30)) == sorted(first)


@pytest.mark.parametrize("streams", [True, False])
def test_held_out_rows_that_train_nothing_are_known(data, streams):
    files = (str(data.parent / "a.jsonl"), str(data.parent / "c.parquet"))
    flags = dict(eval_dataset=files, max_length=9, prompt_format="plain", max_steps=1)
    args = sft.Args(dataset=(str(data),), streaming=streams, **flags)
    task = (sft.encode_row, SFT_COLUMNS, load_tokenizer(tiny_model()), args)
    _, (held_out, counts) = load_samples(*task, stream=streams)
    assert held_out.all_rows == rows_of_eval_sets(args) and len(held_out.all_rows) == 19
    assert len(held_out) == 19 - counts.total() < 19


def test_samples_equal_those_in_memory(data):
    stream = samples_of(data)
    found = {s.row["_source"]: (s.ids, s.loss_mask) for i in stream.draw(30) for s in stream[i]}
    rows = samples_of(data, streams=False)
    assert found == {s.row["_source"]: (s.ids, s.loss_mask) for group in rows for s in group}
    renamed = ("prompt=question", "completion=answer")
    assert len(drawn(samples_of(data, columns=renamed, prompt_format="plain"), 30)) == 30


@pytest.mark.parametrize("buffer", [1, 4, 1000])
def test_stream_resumes_at_the_same_row(data, buffer, monkeypatch):
    """Positions include the end of a shuffle buffer, of a shard and of a pass."""
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", buffer)
    wanted = drawn(samples_of(data), 75)
    stream = samples_of(data)
    for count in range(65):
        if count in (0, 1, 4, 7, 18, 27, 29, 30, 31, 60, 64):
            other = samples_of(data)
            other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
            assert drawn(other, 10) == wanted[count : count + 10]
        assert drawn(stream, 1) == [wanted[count]]
    file = data.parent / "a.jsonl"
    file.write_text(file.read_text().replace("3", "4"))
    with pytest.raises(
        ValueError, match="^--dataset .*a.jsonl is not as it was when the run began"
    ):
        samples_of(data).load_state_dict(stream.state_dict())
    file.unlink()
    with pytest.raises(ValueError, match="^--dataset .* has 2 shards, the checkpoint is of 3: the"):
        samples_of(data).load_state_dict(stream.state_dict())


def test_dropped_rows_are_reported_at_the_end_of_a_pass(data, capsys):
    file = data.parent / "a.jsonl"
    lines = file.read_text().splitlines()
    lines[2], lines[4] = "no JSON", json.dumps(dict(question="q", answer=4))
    file.write_text("\n".join(lines))
    stream = samples_of(data, on_bad_row="skip", max_length=26)
    drawn(stream, 5)
    assert capsys.readouterr().out == "not used in training: id\n"
    drawn(stream, 40)
    messages = capsys.readouterr().out
    assert f"1 left out, such as --dataset {file}: line 3 is not valid JSON" in messages
    assert "--on_bad_row skip: 1 left out, such as a.jsonl:5: column answer is int" in messages
    assert "training rows of pass 1 dropped as too long" in messages
    with pytest.raises(ValueError, match=r"column answer is int|a.jsonl: line 3 is not valid JSON"):
        drawn(samples_of(data), 30)
    with pytest.raises(ValueError, match=r"^--dataset .*: no rows are left: 28 dropped as too"):
        samples_of(data, on_bad_row="skip", max_length=3)


def lines(path, rows: list[dict]) -> str:
    write_rows(path, rows)
    return str(path)


MESSAGES = [dict(role="user", content="1+1="), dict(role="assistant", content="2")]


@pytest.mark.parametrize("bad", [0, 4, 9])
@pytest.mark.parametrize("more", [{}, dict(text="1+1=2")])
def test_unusable_row_decides_nothing_wherever_it_is(bad, more, tmp_path, capsys):
    """It is as in memory. Row 5 is the first one of the second buffer."""
    rows = [dict(messages=MESSAGES) | more for _ in range(12)]
    rows[bad] |= dict(messages=None)
    file = lines(tmp_path / "rows.jsonl", rows)
    flags = dict(prompt_format="chat", on_bad_row="skip")
    stream = samples_of(file, **flags)
    found = {s.row["_source"]: (s.ids, s.loss_mask) for i in stream.draw(11) for s in stream[i]}
    in_memory = samples_of(file, streams=False, **flags)
    assert found == {s.row["_source"]: (s.ids, s.loss_mask) for group in in_memory for s in group}
    assert len(found) == 11 and f"rows.jsonl:{bad + 1}" not in found
    for streams in (False, True):
        with pytest.raises(ValueError, match=f"rows.jsonl:{bad + 1}: column messages"):
            drawn(samples_of(file, streams=streams, prompt_format="chat"), 12)


def test_columns_of_later_rows_are_not_ignored(tmp_path):
    """The stream refuses a row that it would have read in another sense than the first rows."""
    text, both = dict(text="1+1=2"), dict(text="1+1=2", messages=MESSAGES)
    for name, late in (("messages", both), ("context", text | dict(context="Paris"))):
        file = lines(tmp_path / "rows.jsonl", [text] * 9 + [late])
        for streams in (False, True):
            flags = dict(streams=streams, prompt_format="chat")
            with pytest.raises(ValueError, match=rf"nothing reads {name} \(rows.jsonl:10\) beside"):
                drawn(samples_of(file, **flags), 10)


def test_columns_are_renamed_where_they_are(tmp_path):
    """The column is in only one of several files, or only in the held-out rows."""
    a = lines(tmp_path / "a.jsonl", [dict(problem=f"{i}?", completion="x") for i in range(9)])
    b = lines(tmp_path / "b.jsonl", [dict(prompt=f"{i}!", completion="x") for i in range(9)])
    for seed in range(3):
        stream = samples_of(f"{tmp_path}/[ab].jsonl", columns=("prompt=problem",), seed=seed)
        assert len({*drawn(stream, 18)}) == 18
    with pytest.raises(ValueError, match="^--columns prompt=problem: no column problem; --dataset"):
        samples_of(b, columns=("prompt=problem",))
    flags = dict(columns=("prompt=problem",), eval_dataset=(a,), eval_every=1)
    args = sft.Args(dataset=(b,), max_length=100, max_steps=1, streaming=True, **flags)
    tokenizer = load_tokenizer(tiny_model())
    (_, _), (held_out, _) = load_samples(sft.encode_row, SFT_COLUMNS, tokenizer, args, stream=True)
    assert len(held_out) == 9


def test_dropped_rows_are_reported_at_a_checkpoint(data, capsys):
    stream = samples_of(data, max_length=26, on_bad_row="skip")
    drawn(stream, 10)
    capsys.readouterr()
    stream.state_dict()
    said = capsys.readouterr().out
    assert "training rows of pass 1 so far dropped as too long (--max_length)" in said
    stream.state_dict()
    assert capsys.readouterr().out == ""


def test_rows_with_a_held_out_prompt_are_counted(data, tmp_path, capsys):
    held_out = lines(
        tmp_path / "held_out.jsonl", [ROWS[3], ROWS[20], dict(question="a", answer="b")]
    )
    flags = dict(eval_dataset=(held_out,), eval_every=1, streaming=True, max_steps=1)
    args = sft.Args(dataset=(str(data),), max_length=100, **flags)
    tokenizer = load_tokenizer(tiny_model())
    (stream, _), _ = load_samples(sft.encode_row, SFT_COLUMNS, tokenizer, args, stream=True)
    drawn(stream, 31)
    said = capsys.readouterr().out
    assert "2 training rows of pass 1 have the prompt of a held-out row" in said


def test_stream_of_the_hub_is_read_by_shards(tmp_path, monkeypatch):
    """The stream is the library's own, over files in place of a repository."""
    names = [lines(tmp_path / f"{i}.jsonl", ROWS[3 * i : 3 * i + 3]) for i in range(3)]
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **more: load_dataset("json", data_files=names, **more)
    )
    wanted = {f"some/data/train/{shard}:{row}" for shard in range(3) for row in (1, 2, 3)}
    assert {*drawn(samples_of("some/data"), 9)} == wanted


def test_data_without_streaming_support_is_refused():
    for dataset, words in (
        ("arithmetic", "--dataset arithmetic: a built-in task cannot be streamed"),
        ("nothing.jsonl", "--dataset nothing.jsonl: no such file"),
    ):
        with pytest.raises(ValueError, match=words):
            samples_of(dataset)


def test_a_stream_of_the_hub_reads_a_row_for_a_row(monkeypatch):
    """A column may be null in thousands of rows, and the library's `to_list` reads all of them."""
    read = []

    def rows():
        for i in range(3000):
            read.append(i)
            yield dict(question=f"{i}?", answer="x", note=None if i < 2000 else "a")

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    (shard,) = open_split("--dataset", "some/rows", "train", streaming=True)
    numbered = shard.rows(BadRows("error"))
    assert next(numbered)["_source"] == "some/rows/train:1" and read == [0]
    assert [row["note"] for row in numbered] == [None] * 1999 + ["a"] * 1000


@pytest.mark.parametrize("streams", [True, False])
def test_rows_of_the_hub_are_read_alike_in_memory_and_as_a_stream(data, streams, monkeypatch):
    """In place of a repository of two shards, the library opens a folder whose README names two
    files."""
    folder = str(data.parent)
    (data.parent / "README.md").write_text(
        "---\nconfigs: [{config_name: x, data_files: [a.jsonl, b.jsonl.gz]}]\n---\n"
    )
    library = partial(datasets.load_dataset, cache_dir=f"{folder}_cache")
    monkeypatch.setattr(datasets, "load_dataset", lambda _, *a, **k: library(folder, *a, **k))
    samples = samples_of("some/rows", streams=streams)
    groups = [samples[i] for i in (samples.draw(18) if streams else range(18))]
    found = {s.row["_source"]: (s.ids, s.loss_mask) for group in groups for s in group}
    files = samples_of(folder, streams=False)
    sizes = (
        {"some/rows/train/0": 7, "some/rows/train/1": 11} if streams else {"some/rows/train": 18}
    )
    places = [f"{place}:{i + 1}" for place, size in sizes.items() for i in range(size)]
    assert [found[place] for place in places] == [(s.ids, s.loss_mask) for [s] in files]


@pytest.mark.slow
def test_run_resumes_exactly_and_equals_a_run_on_two_ranks(
    small, data, tmp_path, main, monkeypatch
):
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 10_000)  # as in the other processes
    rng = random.Random(0)
    held_out = [dict(question=str(i), answer=str(rng.random())) for i in range(5)]
    write_rows(tmp_path / "held_out.jsonl", held_out)
    flags = (
        *small[:2], "--streaming", "true", "--dataset", data,
        "--eval_dataset", tmp_path / "held_out.jsonl", "--max_steps", 6, "--batch_size", 8,
        "--save_every", 3, "--eval_every", 4, "--lr", 1e-3,
    )  # fmt: skip
    main("sft", *flags, "--output_dir", tmp_path / "run")
    assert_resumes_exactly(main, "sft", *flags, folder=tmp_path / "run", finished=6)
    run(2, "sft.py", *flags, "--output_dir", tmp_path / "two")
    assert_close_metrics(
        tmp_path / "run", tmp_path / "two", ("loss", "eval_loss", "num_tokens", "epoch"), rel=1e-4
    )
    assert [line["epoch"] for line in metrics(tmp_path / "two")] == [0, 0, 0, 1, 1, 1]
