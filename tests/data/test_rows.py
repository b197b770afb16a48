"""Every file format loads, held-out rows are never trained on, and errors name the file and the
row."""

import gzip
import json
import os

import pytest

from common.config.groups import TrainArgs
from common.config.specs import eval_sets_of, weights_of
from common.data import files, shards
from common.data.rows import (
    PROMPT_COLUMNS,
    SFT_COLUMNS,
    datasets_by_name,
    encode_each,
    load_rows,
    reasons,
    rename_columns,
    require_columns,
    require_held_out,
    rows_of_split,
    sources_of,
    train_and_eval_rows,
)

PAIR = ("prompt", "completion")

# ---- files ----


def load(path, split: str = "train") -> list[dict] | None:
    rows = load_rows("--dataset", str(path), split)
    return rows and [{k: v for k, v in row.items() if k[0] != "_"} for row in rows]


ROWS = [dict(prompt="a\u2028b", completion="c\x85d"), dict(prompt="\u00e9", completion="\n")]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_byte_order_mark_and_columns_of_ours_are_ignored(name, tmp_path):
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"prompt": "a", "_dataset": ["of a user"]}')
    assert load(tmp_path / name) == [dict(prompt="a")]


def test_jsonl_splits_lines_only_at_newlines(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert load(tmp_path / "rows.jsonl") == ROWS
    assert [
        row["_source"] for row in load_rows("--dataset", str(tmp_path / "rows.jsonl"), "train")
    ] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert load(tmp_path / "rows.jsonl", "test") is None


def test_json_parquet_and_csv_files_load(tmp_path):
    import datasets

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_csv(tmp_path / "rows.csv", index=False)
    for name in ("rows.json", "rows.parquet", "rows.csv"):
        assert load(tmp_path / name) == ROWS, name


def compressed(path, text: str) -> str:
    """Write a file with the compression that its suffix names."""
    import pyarrow

    with pyarrow.output_stream(str(path), compression="detect") as stream:
        stream.write(text.encode())
    return str(path)


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_compressed_files_load(end, tmp_path):
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    path = compressed(tmp_path / f"rows.jsonl.{end}", lines)
    assert (
        load(path) == ROWS
        and load(compressed(tmp_path / f"rows.json.{end}", json.dumps(ROWS))) == ROWS
    )
    assert [row["_source"] for row in load_rows("--dataset", path, "train")] == [
        f"rows.jsonl.{end}:1", f"rows.jsonl.{end}:3",
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=f"^--dataset .*broken.jsonl.{end}: line 2 is not valid JSON"
    ):
        load(compressed(tmp_path / f"broken.jsonl.{end}", '{"a": 1}\noops\n'))
    whole = (tmp_path / f"rows.jsonl.{end}").read_bytes()
    for name, content in (("cut", whole[:-3]), ("plain", lines.encode())):
        (tmp_path / f"{name}.jsonl.{end}").write_bytes(content)
        with pytest.raises(ValueError, match=f"^--dataset .*{name}.jsonl.{end}: "):
            load(tmp_path / f"{name}.jsonl.{end}")


def test_arrow_files_and_saved_datasets_load(tmp_path):
    import datasets

    parts = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[1:]),
    }
    parts["train"].save_to_disk(tmp_path / "one")
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    (arrow,) = (tmp_path / "one").glob("*.arrow")
    assert load(arrow) == load(tmp_path / "one") == load(tmp_path / "both") == ROWS
    assert load(tmp_path / "both", "test") == ROWS[1:] and load(tmp_path / "one", "test") is None
    assert [row["_source"] for row in load_rows("--dataset", str(arrow), "train")] == [
        f"{arrow.name}:{n}" for n in (1, 2)
    ]


def test_pattern_sorts_its_files_by_name(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("part-2", "part-10", "part-1", "other", "b/part-0"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(dict(text=name)) + "\n")
    compressed(tmp_path / "part-3.jsonl.gz", '{"text": "part-3"}')
    rows = load_rows("--dataset", str(tmp_path / "part-*"), "train")
    assert [row["text"] for row in rows] == ["part-1", "part-10", "part-2", "part-3"]
    assert rows[3]["_source"] == "part-3.jsonl.gz:1" and load(tmp_path / "part-*", "test") is None
    assert [row["text"] for row in load(tmp_path / "**" / "part-[01].jsonl")] == [
        "b/part-0",
        "part-1",
    ]
    with pytest.raises(ValueError, match="absent-.*: no such file"):
        load("absent-*.jsonl")
    (tmp_path / "part-4.txt").touch()
    with pytest.raises(ValueError, match="part-4.txt: expected a .jsonl"):
        load(tmp_path / "part-*")


# ---- bad rows ----


def test_bad_lines_raise_or_are_skipped_and_counted(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\noops\n[1]\n{"text": "b"}\n{"text"\nhm\n')
    with pytest.raises(ValueError, match="line 2 is not valid JSON"):
        load(path)
    rows = load_rows("--dataset", str(path), "train", on_bad_row="skip")
    assert [(row["text"], row["_source"]) for row in rows] == [
        ("a", "rows.jsonl:1"),
        ("b", "rows.jsonl:4"),
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"--on_bad_row skip: 2 left out, such as --dataset {path}: line 2 is not valid JSON: "
        "Expecting value",
        f"--on_bad_row skip: 1 left out, such as --dataset {path}: rows.jsonl:3 is not an object",
        f"--on_bad_row skip: 1 left out, such as --dataset {path}: line 5 is not valid JSON: "
        "Expecting ':' delimiter",
    ]
    path.write_text("oops\n")
    with pytest.raises(ValueError, match="rows.jsonl: every row was skipped"):
        load_rows("--dataset", str(path), "train", on_bad_row="skip")


def test_rows_without_an_encoding_raise_or_are_skipped(capsys):
    rows = [dict(n=n, _source=f"x:{n}") for n in range(6)]

    def encode(row: dict) -> int:
        if row["n"] % 2:
            raise ValueError(f"{row['_source']}: {row['n']} is odd")
        if row["n"] == 4:
            raise ValueError(f"{row['_source']}: four")
        return 10 * row["n"]

    with pytest.raises(ValueError, match="x:1: 1 is odd"):
        list(encode_each(rows, encode, "error"))
    assert list(encode_each(rows, encode, "skip")) == [(rows[0], 0), (rows[2], 20)]
    assert capsys.readouterr().out.splitlines() == [
        "--on_bad_row skip: 3 left out, such as x:1: 1 is odd",
        "--on_bad_row skip: 1 left out, such as x:4: four",
    ]

    def refuse(row: dict) -> int:
        raise ValueError("--system_prompt: not about a row")

    with pytest.raises(ValueError, match="--system_prompt"):
        list(encode_each(rows, refuse, "skip"))


# ---- folders ----


def test_folder_with_files_of_several_splits_loads_each_split(tmp_path):
    import datasets

    for name, row in (("train-00000-of-00002", 0), ("train-00001-of-00002", 1), ("test", 1)):
        datasets.Dataset.from_list([ROWS[row]]).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").touch()
    assert (
        load(tmp_path) == ROWS
        and load(tmp_path, "test") == [ROWS[1]]
        and load(tmp_path, "validation") is None
    )


def test_folder_without_splits_has_only_training_rows(tmp_path):
    for n, row in enumerate(ROWS):
        (tmp_path / f"part{n}.jsonl").write_text(json.dumps(row))
    assert load(tmp_path) == ROWS and load(tmp_path, "test") is None


def test_columns_are_recognised_or_refused():
    assert require_columns("--dataset", [dict(text="", messages=[], _source="")], SFT_COLUMNS) == (
        "messages",
    )
    assert require_columns(
        "--dataset", [dict(text="", messages=None, _source="")], SFT_COLUMNS
    ) == ("text",)
    assert (
        require_columns("--dataset", [dict(prompt="", completion="", answer="")], SFT_COLUMNS)
        == PAIR
    )
    assert require_columns("--dataset", [dict(question="", answer="")], PROMPT_COLUMNS) == (
        "question",
    )
    words = r"--dataset x has the columns foo \(x:1\); needed: messages, or prompt and completion"
    with pytest.raises(ValueError, match=words):
        require_columns("--dataset x", [dict(foo=1, _source="x:1")], SFT_COLUMNS)


def test_instruction_with_an_input_is_refused():
    row = dict(input="x", output="y", _source="x:1")
    assert require_columns("--dataset", [row], SFT_COLUMNS) == ("input", "output")
    assert require_columns("--dataset", [row], PROMPT_COLUMNS) == ("input",)
    with pytest.raises(
        ValueError, match="--dataset: columns instruction and input; join them in one column prompt"
    ):
        require_columns("--dataset", [row | dict(instruction="translate")], SFT_COLUMNS)


# ---- renamed columns ----


@pytest.mark.parametrize("eval_split", ["train", "test"])
def test_columns_are_renamed_in_every_split(tmp_path, eval_split):
    for split in ("train", "test"):
        rows = [dict(question=f"{split}{i}", answer="b", x=i) for i in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("prompt=question", "completion=answer")
    args = TrainArgs(dataset=str(tmp_path), columns=names, eval_split=eval_split, eval_size=2)
    for rows in train_and_eval_rows(args):
        assert all(
            sorted(row) == ["_folder", "_source", "completion", "prompt", "x"]
            and row["completion"] == "b"
            for row in rows
        )


def test_columns_can_be_swapped_and_copied():
    rows = [dict(a=1, b=2, _source="x:1"), dict(a=3, _source="x:2")]
    assert rename_columns("--dataset", rows, ("a=b", "b=a", "c=a")) == [
        dict(a=2, b=1, c=1, _source="x:1"), dict(b=3, c=3, _source="x:2")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (
            "prompt=problem",
            "--columns prompt=problem: no column problem; --dataset x has question, answer",
        ),
        (
            "answer=question",
            "--columns answer=question: --dataset x has a column answer already",
        ),
        (
            "_source=question",
            "--columns _source=question: --dataset x has a column _source already",
        ),
    ],
)
def test_invalid_column_names_are_refused(pair, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        rename_columns("--dataset x", [dict(question="a", answer="b", _source="x:1")], [pair])


def numbered(path, count: int, start: int = 0):
    path.write_text("".join(json.dumps(dict(text=str(start + n))) + "\n" for n in range(count)))
    return str(path)


def test_rows_set_aside_are_disjoint_and_do_not_depend_on_the_seed(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 50)
    train, held_out = train_and_eval_rows(TrainArgs(dataset=file, eval_size=8))
    assert len(train) == 42 and len(held_out) == 8
    assert {row["text"] for row in train + held_out} == {str(n) for n in range(50)}
    assert train_and_eval_rows(TrainArgs(dataset=file, eval_size=8, seed=1)) == (train, held_out)
    train, held_out = train_and_eval_rows(TrainArgs(dataset=file, eval_every=0))
    assert len(train) == 50 and held_out == []
    train, held_out = train_and_eval_rows(TrainArgs(dataset=file))  # by default a tenth
    assert len(train) == 45 and len(held_out) == 5
    with pytest.raises(ValueError, match="--eval_size 50: no training rows left of 50"):
        train_and_eval_rows(TrainArgs(dataset=file, eval_size=50))


def test_datasets_without_weights_are_concatenated(tmp_path):
    files = (numbered(tmp_path / "a.jsonl", 30), numbered(tmp_path / "b.jsonl", 20, start=30))
    both = numbered(tmp_path / "both.jsonl", 50)
    for rows, of_one in zip(
        *(train_and_eval_rows(TrainArgs(dataset=d, eval_size=8)) for d in (files, both)),
        strict=True,
    ):
        assert [row["text"] for row in rows] == [row["text"] for row in of_one]


def test_each_dataset_with_a_weight_has_its_own_held_out_rows(tmp_path):
    files = (
        numbered(tmp_path / "a.jsonl", 30) + ":3",
        numbered(tmp_path / "b.jsonl", 20, start=30) + ":1",
    )
    train, held_out = train_and_eval_rows(TrainArgs(dataset=files, eval_size=9))
    for rows, counts in ((train, (26, 16)), (held_out, (4, 4))):
        assert tuple([row["_dataset"] for row in rows].count(name) for name in "ab") == counts
        assert all((row["_dataset"] == "a") == (int(row["text"]) < 30) for row in rows)
    with pytest.raises(
        ValueError, match="--eval_size 1: less than one row for each of 2 datasets; raise it or"
    ):
        train_and_eval_rows(TrainArgs(dataset=files, eval_size=1))
    alone = train_and_eval_rows(TrainArgs(dataset=files[0], eval_size=4))
    assert [row["text"] for row in alone[0]] == [
        row["text"] for row in train if row["_dataset"] == "a"
    ]
    assert "_dataset" not in alone[0][0]
    named = train_and_eval_rows(
        TrainArgs(
            dataset=files, eval_dataset=str(tmp_path / "b.jsonl"), eval_size=9, eval_split="x"
        )
    )
    assert [len(rows) for rows in named] == [50, 9]


def test_several_held_out_sets_are_independent(tmp_path):
    """Each has at most `--eval_size` rows, independent of the other sets. A single unnamed set has
    no name."""
    a, b = numbered(tmp_path / "a.jsonl", 30), numbered(tmp_path / "b.jsonl", 3, start=30)
    flags = dict(dataset=numbered(tmp_path / "train.jsonl", 9, start=50), eval_size=4)
    train, held_out = train_and_eval_rows(
        TrainArgs(eval_dataset=(a, f"hard={b}", "arithmetic"), **flags)
    )
    assert len(train) == 9 and not any("_dataset" in row for row in train)
    assert [row["_dataset"] for row in held_out] == ["a"] * 4 + ["hard"] * 3 + ["arithmetic"] * 4
    alone = {
        name: train_and_eval_rows(TrainArgs(eval_dataset=name, **flags))[1]
        for name in (a, f"x={b}")
    }
    assert (
        held_out[:4] == [row | dict(_dataset="a") for row in alone[a]]
        and "_dataset" not in alone[a][0]
    )
    assert [row["_dataset"] for row in alone[f"x={b}"]] == ["x"] * 3
    assert datasets_by_name({"x/a.jsonl": None, "y/a.jsonl": None, "c": "d"}) == {
        "x/a.jsonl": "x/a.jsonl", "y/a.jsonl": "y/a.jsonl", "d": "c"
    }  # fmt: skip
    assert eval_sets_of(["./x=1.jsonl", "y=./x=2.jsonl"]) == {
        "./x=1.jsonl": None,
        "./x=2.jsonl": "y",
    }


@pytest.mark.parametrize(
    ("datasets", "words"),
    [
        ((), "--eval_dataset needs at least one value"),
        (("a", "a"), "--eval_dataset a: a is given twice"),
        (("x=a", "y=a"), "--eval_dataset y=a: a is given twice"),
        (("x=a", "x=b"), "--eval_dataset x=b: x is given twice"),
        (("a", "a=b"), "--eval_dataset a=b: a is given twice"),
        (("x=",), "--eval_dataset x=: expected name=dataset"),
        (("=x",), "--eval_dataset =x: expected name=dataset"),
    ],
)
def test_invalid_held_out_sets_are_refused(datasets, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        eval_sets_of(datasets)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ((), "--dataset needs at least one value"),
        (("a", "a"), "--dataset a: a is given twice"),
        (("a:1", "a:2"), "--dataset a:2: a is given twice"),
        (("a:1", "b"), "--dataset a:1 b: only some have a weight; give all of them one, or none"),
        (("a:0", "b:1"), "--dataset a:0: the weight must be greater than 0"),
        (("a:nan",), "--dataset a:nan: the weight must be greater than 0"),
        (("a:inf",), "--dataset a:inf: the weight must be greater than 0"),
    ],
)
def test_invalid_weights_are_refused(dataset, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        weights_of(dataset)


def test_dataset_names_are_unique():
    assert list(sources_of(("x/a.jsonl.gz:1", "b/c:2", "d/part-*.parquet:1"))) == [
        "a",
        "c",
        "part-*",
    ]
    assert list(sources_of(("x/a.jsonl:1", "y/a.jsonl:2"))) == ["x/a.jsonl", "y/a.jsonl"]
    assert sources_of(("a", "b")) == {"": (["a", "b"], 1.0)} and sources_of(("a:7",)) == {
        "": (["a"], 1.0)
    }


def test_required_columns_must_exist_in_every_dataset():
    a = dict(prompt="", completion="", _dataset="a", _source="a:1")
    rows = [a, dict(a, text="", _dataset="b", _source="b:1")]
    assert require_columns("--dataset", rows, (("text",), PAIR)) == PAIR
    with pytest.raises(
        ValueError, match=r"has the columns prompt, completion \(a:1, b:1\); needed: text"
    ):
        require_columns("--dataset", rows, (("text",),))


def test_first_row_may_lack_columns_of_other_rows():
    """Tables have None in the missing cells."""
    useless = [
        dict(note="x", _source="x:1"),
        dict(text=None, prompt="a", completion=None, _source="x:2"),
    ]
    rows = [
        *useless,
        dict(text="b", prompt=None, completion=None, _source="x:3"),
        dict(messages=[], _source="x:4"),
    ]
    with pytest.raises(
        ValueError, match=r"^--dataset has the columns note \(x:1\); needed: messages"
    ):
        require_columns("--dataset", rows, SFT_COLUMNS)
    assert require_columns("--dataset", rows, SFT_COLUMNS, "skip") == ("text",)
    with pytest.raises(
        ValueError, match=r"^--dataset has the columns note \(x:1\); needed: messages"
    ):
        require_columns("--dataset", useless, SFT_COLUMNS, "skip")
    of_two = [row | dict(_dataset=name) for name in "ab" for row in rows]
    assert require_columns("--dataset", of_two, SFT_COLUMNS, "skip") == ("text",)
    with pytest.raises(ValueError, match=r"has the columns  \(x:3, x:1\)"):
        require_columns("--dataset", of_two[:6], SFT_COLUMNS, "skip")


def test_weights_apply_only_to_training_rows():
    with pytest.raises(
        ValueError, match="--dataset a:1 b:2: only the --dataset of training scripts takes weights"
    ):
        rows_of_split("--dataset", ("a:1", "b:2"), "--dataset_split", "train", TrainArgs())


def test_held_out_split_or_file_is_used_and_capped(tmp_path):
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "train.jsonl", 5)
    numbered(tmp_path / "data" / "test.jsonl", 30, start=100)
    other = numbered(tmp_path / "other.jsonl", 30, start=200)
    for flags, first in ((dict(), 100), (dict(eval_dataset=other), 200)):
        train, held_out = train_and_eval_rows(
            TrainArgs(dataset=str(tmp_path / "data"), eval_size=7, **flags)
        )
        assert [row["text"] for row in train] == list("01234")
        assert len({row["text"] for row in held_out}) == 7 and all(
            int(row["text"]) >= first for row in held_out
        )


def test_missing_split_is_refused(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ValueError, match="no split 'other': see --dataset_split"):
        train_and_eval_rows(TrainArgs(dataset=file, dataset_split="other"))


def test_training_on_the_held_out_split_reserves_rows():
    train, held_out = train_and_eval_rows(TrainArgs(dataset_split="test"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_eval_dataset_without_the_split_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "validation.jsonl", 5)
    with pytest.raises(ValueError, match="--eval_split"):
        train_and_eval_rows(TrainArgs(eval_dataset=str(tmp_path / "data")))


# ---- errors ----


FILE_ERRORS = [
    ("empty.jsonl", "", "empty.jsonl: no rows in it"),
    ("blank.jsonl", "\n\n", "blank.jsonl: no rows in it"),
    ("broken.jsonl", '{"prompt": "a"}\n\n{"prompt": oops\n', "line 3 is not valid JSON"),
    ("broken.json", '[{"prompt": "a"},\n {"prompt":}]', "line 2 is not valid JSON"),
    (
        "deep.jsonl",
        '{"prompt": "a"}\n' + "[" * 100_000,
        "line 2 is not valid JSON: nested too deep",
    ),
    (
        "digits.jsonl",
        '{"prompt": ' + "1" * 5000 + "}",
        "line 1 is not valid JSON: Exceeds the limit",
    ),
    ("garbage.arrow", b"\x00\xff" * 999, "cannot be read"),
    ("list.jsonl", '{"prompt": "a"}\n[1, 2]\n', "list.jsonl:2 is not an object"),
    ("number.json", '[{"prompt": "a"}, 3]', "number.json:2 is not an object"),
    ("bytes.jsonl", b"\xff\xfe", "can't decode"),
    (
        "rows.txt",
        "a",
        "expected a .jsonl, .json (these also as .gz or .zst), .parquet, .arrow, .csv or .tsv file",
    ),
    ("rows.parquet", "not parquet", "cannot be read"),
    ("empty.csv", "", "cannot be read"),
]


@pytest.mark.parametrize(
    ("name", "text", "words"), FILE_ERRORS, ids=[name for name, _, _ in FILE_ERRORS]
)
def test_bad_data_file_is_refused_by_name(name, text, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        load_rows("--dataset", str(path), "train")
    assert str(error.value).startswith(f"--dataset {path}: ") and words in str(error.value)


def test_endless_line_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    """A few kilobytes of .gz may hold gigabytes; a whole .json file may be one long line."""
    monkeypatch.setattr(files, "LONGEST", 1000)
    text = json.dumps(dict(prompt="a")) + "\n" + json.dumps(dict(prompt="b" * 2000))
    (tmp_path / "long.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ValueError, match=r"long.jsonl.gz: line 2 has 1,000 characters or more$"):
        load_rows("--dataset", str(tmp_path / "long.jsonl.gz"), "train")
    (tmp_path / "long.json").write_text(json.dumps([dict(prompt="b" * 2000)]))
    assert len(load_rows("--dataset", str(tmp_path / "long.json"), "train")) == 1
    monkeypatch.setattr(files, "LARGEST", 1000)
    with pytest.raises(
        ValueError, match=r"long.json: convert it to .jsonl; it has 1,000 characters or more$"
    ):
        load_rows("--dataset", str(tmp_path / "long.json"), "train")


def fifo(path):
    os.mkfifo(path)


def broken_link(path):
    path.symlink_to("/absent")


def link_to_a_device(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, broken_link, link_to_a_device])
@pytest.mark.parametrize("pattern", ["", "/*.jsonl"])
def test_folder_with_another_thing_than_files_is_refused(make, pattern, tmp_path):
    """Reading it could block or never end; ignoring it could lose rows."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "folder.jsonl").mkdir()
    assert len(load_rows("--dataset", f"{tmp_path}{pattern}", "train")) == 1
    make(tmp_path / "b.jsonl")
    with pytest.raises(
        ValueError, match=r"--dataset .*/b.jsonl is a broken link or no regular file; delete it$"
    ):
        load_rows("--dataset", f"{tmp_path}{pattern}", "train")


def test_name_that_is_not_utf_8_is_refused(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff.jsonl", os.O_CREAT))
    with pytest.raises(ValueError, match="--dataset .*codec can't encode character"):
        load_rows("--dataset", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("/absent.jsonl", "no such file"),
        ("absent.csv", "no such file"),
        ("/x" * 2500 + ".jsonl", "no such file"),
        ("absent/absent", "no such file or folder, and not found on the hub"),
        ("a/b/c", "no such file or folder, and not found on the hub"),
    ],
)
def test_missing_dataset_is_refused_by_name(dataset, words, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        load_rows("--eval_dataset", dataset, "train")
    assert str(error.value).startswith(f"--eval_dataset {dataset}: ") and words in str(error.value)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="--dataset .*: no .jsonl, .json .*, .parquet, .arrow, .csv or .tsv files in it",
    ):
        load_rows("--dataset", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(dataset_split="validation"), "--dataset arithmetic has no split 'validation'"),
        (
            dict(eval_split="validation", eval_size=20000),
            "--eval_size 20000: no training rows left of 15952",
        ),
        (dict(eval_dataset="/absent.jsonl"), "--eval_dataset /absent.jsonl: no such file"),
    ],
)
def test_invalid_splits_are_refused(flags, words):
    with pytest.raises(ValueError) as error:
        train_and_eval_rows(TrainArgs(**flags))
    assert words in str(error.value)


@pytest.mark.parametrize("choices", [SFT_COLUMNS, PROMPT_COLUMNS])
def test_missing_columns_are_refused_by_name(choices):
    with pytest.raises(
        ValueError, match="--dataset x has the columns foo, bar .x:1.; needed: .*prompt"
    ):
        require_columns("--dataset x", [dict(foo="a", bar="b", _source="x:1")], choices)


def test_empty_held_out_set_is_refused():
    rows = [dict(_dataset=name) for name in "aabb"]
    require_held_out(rows, rows[1:3], "")
    require_held_out([], [], "")
    with pytest.raises(ValueError, match="^no held-out rows of b are left: all too long$"):
        require_held_out(rows, rows[:2], ": all too long")
    with pytest.raises(ValueError, match="^no held-out rows are left$"):
        require_held_out([dict(text="")], [], "")


def test_reasons_are_joined_with_their_counts():
    assert reasons({"dropped": 3, "truncated": 1}) == "3 dropped, 1 truncated" and reasons({}) == ""


def test_missing_columns_are_answered_with_the_flag_that_renames_others():
    for columns, hint in (
        (("instruction", "response"), "prompt=instruction completion=response"),
        (("prompt", "answer"), "completion=answer"),
        (("conversations",), "messages=conversations"),
        (("promt", "answer"), "prompt=promt completion=answer"),
    ):
        row = dict.fromkeys(columns, "") | dict(_source="")
        with pytest.raises(ValueError, match=f"needed: .*; with --columns {hint}$"):
            require_columns("--dataset", [row], SFT_COLUMNS)
        renamed = rename_columns("--dataset", [row], hint.split())
        assert require_columns("--dataset", renamed, SFT_COLUMNS) in SFT_COLUMNS
    with pytest.raises(ValueError, match="or input and output$"):
        require_columns("--dataset", [dict(other="", _source="")], SFT_COLUMNS)


# ---- types of tables ----

TEXTS = [
    "07",
    "NA",
    "None",
    "nan",
    "1.0",
    "",
    "True",
    " a ",
    'say "x"',
    "two\nlines",
    "a,b",
    "\u2028",
    "2",
]


@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("streaming", [False, True])
def test_values_of_a_text_table_are_the_text_in_the_file(kind, separator, streaming, tmp_path):
    """Also with an index, a byte order mark, Windows line ends and an empty line at the end."""
    import csv

    path = tmp_path / f"rows.{kind}"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows(
            [["", "prompt", "n"], *([i, text, 2 * i] for i, text in enumerate(TEXTS)), []]
        )
    (shard,) = shards.open_shards("--dataset", str(path), "train", None, streaming=streaming)
    assert list(shard.read(files.BadRows("error"))) == [
        dict(prompt=text or None, n=str(2 * i), _source=f"rows.{kind}:{i + 1}")
        for i, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n3\n", "rows.csv:2 has 1 values for 2 columns"),
        ("a,b\n1,2,3\n", "rows.csv:1 has 3 values for 2 columns"),
        ("a,b,a\n1,2,3\n", "two columns have the name a"),
        ('a,b\n1,"2\n', "cannot be read: unexpected end of data"),
        ('a,b\n1,"2"x\n', "cannot be read: ',' expected after '\"'"),
        ("\n\n", "cannot be read: it is empty"),
    ],
)
def test_bad_text_tables_are_refused(text, words, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError) as error:
        load(tmp_path / "rows.csv")
    assert str(error.value) == f"--dataset {tmp_path}/rows.csv: {words}"


def test_long_cell_is_read_and_bad_rows_are_skipped(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text(f"a,b\n{'x' * 200_000},1\nonly one\n2,3\n")
    rows = load_rows("--dataset", str(tmp_path / "rows.csv"), "train", on_bad_row="skip")
    assert [(len(row["a"]), row["b"]) for row in rows] == [(200_000, "1"), (1, "3")]
    assert "1 left out, such as" in capsys.readouterr().out


@pytest.mark.parametrize("streaming", [False, True])
def test_values_of_a_parquet_table_keep_their_types(streaming, tmp_path):
    import datasets

    rows = [
        dict(n=7, x=0.5, t="07", b=True, l=[1, 2]),
        dict(n=None, x=None, t=None, b=None, l=None),
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (shard,) = shards.open_shards(
        "--dataset", str(tmp_path / "rows.parquet"), "train", None, streaming=streaming
    )
    found = [
        {k: v for k, v in row.items() if k != "_source"}
        for row in shard.read(files.BadRows("error"))
    ]
    assert found == rows and type(found[0]["n"]) is int
