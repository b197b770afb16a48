"""A stream yields every row once per pass, in an order that a resumed run continues."""

import gzip
import json
import random
from collections import Counter

import datasets
import pytest
from helpers import assert_close_metrics, assert_resumes_exactly, metrics, run

import sft
from common.data import files, shards, tables
from common.data.load import load_samples
from common.data.rows import SFT_COLUMNS, load_rows
from common.model.hub import load_tokenizer
from common.model.tiny import tiny_model
from extras.streaming import streaming
from extras.streaming.streaming import StreamedSamples


@pytest.fixture
def data(tmp_path):
    """Shards of three formats with 30 rows in total."""
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = [dict(question=f"{i}?", answer="x" * (i % 7 + 1)) for i in range(30)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:7]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[7:18]))
    datasets.Dataset.from_list(rows[18:]).to_parquet(folder / "c.parquet")
    return folder


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 4)


def a_stream(data, **flags) -> StreamedSamples:
    flags = dict(max_length=100, max_steps=1, eval_every=0) | flags
    args = sft.Args(dataset=(str(data),), streaming=True, **flags)
    task = (sft.encode_rows, SFT_COLUMNS, load_tokenizer(tiny_model()), args)
    (stream, _), (held_out, counts) = load_samples(*task, streams=True)
    assert list(held_out) == [] and counts == Counter()
    return stream


def drawn(stream: StreamedSamples, count: int) -> list[str]:
    return [stream[i].row["_source"] for i in stream.draw(count)]


def test_each_pass_yields_every_row_once_in_a_new_order(data, monkeypatch):
    stream = a_stream(data)
    first, second = drawn(stream, 30), drawn(stream, 30)
    assert set(first) == {
        f"{name}:{i + 1}"
        for name, n in (("a.jsonl", 7), ("b.jsonl.gz", 11), ("c.parquet", 12))
        for i in range(n)
    }
    assert sorted(first) == sorted(second) and first != second and stream.cursor["epoch"] == 1
    assert drawn(a_stream(data, seed=1), 30) != first == drawn(a_stream(data), 30)
    assert [place.split(":")[0] for place in first] != sorted(
        place.split(":")[0] for place in first
    )
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 1000)
    assert len(set(drawn(a_stream(data), 30)) & set(first)) == 30


@pytest.mark.parametrize("buffer", [1, 4, 1000])
def test_stream_resumes_at_the_same_row(data, buffer, monkeypatch):
    """Positions include the end of a shuffle buffer, of a shard and of a pass."""
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", buffer)
    wanted = drawn(a_stream(data), 75)
    stream = a_stream(data)
    for count in range(65):
        if count not in (0, 1, 4, 7, 18, 27, 28, 29, 30, 31, 60, 64):
            assert drawn(stream, 1) == [wanted[count]]
            continue
        state = json.loads(json.dumps(stream.state_dict()))
        other = a_stream(data)
        other.load_state_dict(state)
        assert other[0].row["_source"] == wanted[count]  # before the first draw, this draws no row
        assert drawn(other, 10) == wanted[count : count + 10]
        assert drawn(stream, 1) == [wanted[count]]


def test_resume_with_another_number_of_shards_is_refused(data):
    state = a_stream(data).state_dict()
    (data / "a.jsonl").unlink()
    with pytest.raises(
        ValueError,
        match="^--dataset .* has 2 shards, the checkpoint is of 3: the data has changed$",
    ):
        a_stream(data).load_state_dict(state)


def test_streamed_samples_equal_samples_in_memory(data):
    from common.data.encode import Encoder
    from common.data.rows import load_rows

    stream = a_stream(data)
    rows = load_rows("--dataset", str(data), "train")
    args = sft.Args(max_length=100)
    encoder = Encoder(load_tokenizer(tiny_model()), args)
    wanted = {
        s.row["_source"]: (s.ids, s.loss_mask)
        for s in sft.encode_rows(rows, SFT_COLUMNS[2], encoder, args)[0]
    }
    assert {
        stream[i].row["_source"]: (stream[i].ids, stream[i].loss_mask) for i in stream.draw(30)
    } == wanted


def test_dropped_rows_are_reported_at_the_end_of_a_pass(data, capsys):
    lines = (data / "a.jsonl").read_text().splitlines()
    lines[2], lines[4] = "no JSON", json.dumps(dict(question="q", answer=4))
    (data / "a.jsonl").write_text("\n".join(lines))
    stream = a_stream(data, on_bad_row="skip", max_length=26)
    kept = len({*drawn(stream, 5)})
    assert kept == 5 and capsys.readouterr().out == ""
    drawn(stream, 40)
    messages = capsys.readouterr().out
    assert (
        f"--on_bad_row skip: 1 left out, such as --dataset {data}/a.jsonl: line 3 is not valid JSON"
        in messages
    )
    assert "--on_bad_row skip: 1 left out, such as a.jsonl:5: column answer is int" in messages
    assert "training rows of pass 1 dropped as too long" in messages
    with pytest.raises(
        ValueError, match=r"^--dataset .*: column answer is int|a.jsonl: line 3 is not valid JSON"
    ):
        drawn(a_stream(data), 30)
    with pytest.raises(
        ValueError, match=r"^--dataset .*: no rows are left: 28 dropped as too long"
    ):
        drawn(a_stream(data, on_bad_row="skip", max_length=3), 1)


def test_columns_are_renamed(data):
    stream = a_stream(data, columns=("prompt=question", "completion=answer"), prompt_format="plain")
    assert len(drawn(stream, 30)) == 30
    with pytest.raises(ValueError, match="^--columns prompt=nothing: no column nothing"):
        drawn(a_stream(data, columns=("prompt=nothing",)), 1)


def test_hub_dataset_is_read_by_shards(data, monkeypatch):
    """The streams are those of the library, over files instead of a repository."""
    rows = [json.dumps(dict(question=str(i), answer="x")) for i in range(9)]
    names = [str(data / f"{name}.jsonl") for name in "xyz"]
    for i, name in enumerate(names):
        with open(name, "w") as file:
            file.write("\n".join(rows[3 * i : 3 * i + 3]))
    load_dataset = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *_, **options: load_dataset("json", data_files=names, **options),
    )
    tables.hub_shards.cache_clear()
    wanted = {f"some/data/train/{shard}:{row}" for shard in range(3) for row in (1, 2, 3)}
    assert set(drawn(a_stream("some/data"), 9)) == wanted
    (shard,) = shards.open_shards("--dataset", "some/data", "train", None)
    assert [file.suffix for file in shard.files] == [".arrow"]
    assert (
        len(list(shard.read(files.BadRows("error"))))
        == len(list(shard.read(files.BadRows("error"))))
        == 9
    )
    tables.hub_shards.cache_clear()


def test_all_configurations_of_a_hub_dataset_are_read(monkeypatch):
    """In lukaemon/bbh, each task is a configuration."""
    tables_of = {
        name: datasets.Dataset.from_list([dict(input=f"{name}{i}", target="x") for i in range(2)])
        for name in ("dates", "snarks")
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda _, name, **__: tables_of[name])
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda _: list(tables_of))
    tables.hub_shards.cache_clear()
    rows = load_rows("--dataset", "some/tasks", "test", "*", ("answer=target",))
    assert [(row["input"], row["config"], row["_source"]) for row in rows] == [
        (f"{name}{i}", name, f"some/tasks/{name}/test:{i + 1}")
        for name in ("dates", "snarks")
        for i in (0, 1)
    ]
    tables.hub_shards.cache_clear()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(), "--streaming: the number of rows is unknown; set --max_steps"),
        (
            dict(max_steps=3),
            "--streaming sets no rows aside; name an --eval_dataset, or set --eval_every 0",
        ),
        (
            dict(max_steps=3, eval_every=0, dataset=("a:1", "b:2")),
            "--streaming --dataset a:1 b:2: .* omit the weights",
        ),
    ],
)
def test_invalid_flags_are_refused(flags, words):
    with pytest.raises(ValueError, match=words):
        sft.Args(streaming=True, **flags)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("arithmetic", "--dataset arithmetic: a built-in task cannot be streamed"),
        ("nothing.jsonl", "--dataset nothing.jsonl: no such file"),
        ("empty", "--dataset .*: no .* files in it"),
    ],
)
def test_data_without_streaming_support_is_refused(dataset, words, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=words):
        a_stream(tmp_path / dataset if dataset == "empty" else dataset)


@pytest.mark.slow
def test_run_resumes_exactly_and_equals_a_run_on_two_ranks(
    small, data, tmp_path, main, monkeypatch
):
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 10_000)  # as in the other processes
    rng = random.Random(0)
    held_out = [dict(question=str(i), answer=str(rng.random())) for i in range(5)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
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
