"""Every kind of file loads, held-out rows are held out, and what cannot be read is named."""

import json

import pytest

from common.config import TrainArgs
from common.rows import (
    PROMPT_COLUMNS,
    SFT_COLUMNS,
    load_rows,
    reasons,
    renamed,
    require_columns,
    train_and_eval_rows,
)

PAIR = ("prompt", "completion")

# ---- files ----


def load(path, split: str = "train") -> list[dict] | None:
    rows = load_rows("--dataset", str(path), split)
    return rows and [{k: v for k, v in row.items() if k != "_source"} for row in rows]


ROWS = [dict(prompt="a\u2028b", completion="c\x85d"), dict(prompt="\u00e9", completion="\n")]


def test_jsonl_breaks_lines_at_newlines_only(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    assert load(tmp_path / "rows.jsonl") == ROWS
    assert [row["_source"] for row in load_rows("--dataset", str(tmp_path / "rows.jsonl"), "train")] == [
        "rows.jsonl:1", "rows.jsonl:3",
    ]  # fmt: skip
    assert load(tmp_path / "rows.jsonl", "test") is None


def test_json_parquet_and_csv(tmp_path):
    import datasets

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_csv(tmp_path / "rows.csv", index=False)
    for name in ("rows.json", "rows.parquet", "rows.csv"):
        assert load(tmp_path / name) == ROWS, name


def test_a_folder_with_files_of_several_splits(tmp_path):
    import datasets

    for name, row in (("train-00000-of-00002", 0), ("train-00001-of-00002", 1), ("test", 1)):
        datasets.Dataset.from_list([ROWS[row]]).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").touch()
    assert load(tmp_path) == ROWS and load(tmp_path, "test") == [ROWS[1]] and load(tmp_path, "validation") is None


def test_a_folder_without_splits_is_all_training(tmp_path):
    for n, row in enumerate(ROWS):
        (tmp_path / f"part{n}.jsonl").write_text(json.dumps(row))
    assert load(tmp_path) == ROWS and load(tmp_path, "test") is None


def test_columns_are_recognised_or_refused():
    assert require_columns("--dataset", [dict(text="", messages=[], _source="")], SFT_COLUMNS) == ("messages",)
    assert require_columns("--dataset", [dict(prompt="", completion="", answer="")], SFT_COLUMNS) == PAIR
    assert require_columns("--dataset", [dict(question="", answer="")], PROMPT_COLUMNS) == ("question",)
    with pytest.raises(ValueError, match="--dataset x has the columns foo; needed: messages, or prompt and completion"):
        require_columns("--dataset x", [dict(foo=1, _source="")], SFT_COLUMNS)


def test_an_instruction_is_not_lost_beside_its_input():
    row = dict(input="x", output="y", _source="x:1")
    assert require_columns("--dataset", [row], SFT_COLUMNS) == ("input", "output")
    assert require_columns("--dataset", [row], PROMPT_COLUMNS) == ("input",)
    with pytest.raises(ValueError, match="--dataset would lose its instruction beside input"):
        require_columns("--dataset", [row | dict(instruction="translate")], SFT_COLUMNS)


# ---- other names ----


@pytest.mark.parametrize("eval_split", ["train", "test"])
def test_columns_get_other_names_in_every_split(tmp_path, eval_split):
    for split in ("train", "test"):
        rows = [dict(question=f"{split}{i}", answer="b", x=i) for i in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("prompt=question", "completion=answer")
    args = TrainArgs(dataset=str(tmp_path), columns=names, eval_split=eval_split, eval_size=2)
    for rows in train_and_eval_rows(args):
        assert all(sorted(row) == ["_source", "completion", "prompt", "x"] and row["completion"] == "b" for row in rows)


def test_names_may_be_swapped_and_given_twice():
    rows = [dict(a=1, b=2, _source="x:1"), dict(a=3, _source="x:2")]
    assert renamed("--dataset", rows, dict(a="b", b="a", c="a")) == [
        dict(a=2, b=1, c=1, _source="x:1"), dict(b=3, c=3, _source="x:2")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (dict(prompt="problem"), "--columns prompt=problem: no column problem, --dataset x has question, answer"),
        (dict(answer="question"), "--columns answer=question: --dataset x has a column answer already"),
        (dict(_source="question"), "--columns _source=question: --dataset x has a column _source already"),
    ],
)
def test_names_that_do_not_fit_the_data(columns, words):
    with pytest.raises(ValueError, match=f"^{words}$"):
        renamed("--dataset x", [dict(question="a", answer="b", _source="x:1")], columns)


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
    with pytest.raises(ValueError, match="--eval_size 50 leaves no training rows"):
        train_and_eval_rows(TrainArgs(dataset=file, eval_size=50))


def test_a_held_out_split_or_file_is_used_and_capped(tmp_path):
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "train.jsonl", 5)
    numbered(tmp_path / "data" / "test.jsonl", 30, start=100)
    other = numbered(tmp_path / "other.jsonl", 30, start=200)
    for flags, first in ((dict(), 100), (dict(eval_dataset=other), 200)):
        train, held_out = train_and_eval_rows(TrainArgs(dataset=str(tmp_path / "data"), eval_size=7, **flags))
        assert [row["text"] for row in train] == list("01234")
        assert len({row["text"] for row in held_out}) == 7 and all(int(row["text"]) >= first for row in held_out)


def test_a_split_that_is_not_there_is_refused(tmp_path):
    file = numbered(tmp_path / "rows.jsonl", 5)
    with pytest.raises(ValueError, match="no split 'other': see --dataset_split"):
        train_and_eval_rows(TrainArgs(dataset=file, dataset_split="other"))


def test_training_on_the_held_out_split_sets_rows_aside():
    train, held_out = train_and_eval_rows(TrainArgs(dataset_split="test"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_an_eval_dataset_without_the_split_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    numbered(tmp_path / "data" / "validation.jsonl", 5)
    with pytest.raises(ValueError, match="--eval_split"):
        train_and_eval_rows(TrainArgs(eval_dataset=str(tmp_path / "data")))


# ---- what is wrong with them ----


FILE_ERRORS = [
    ("empty.jsonl", "", "empty.jsonl is empty"),
    ("blank.jsonl", "\n\n", "blank.jsonl is empty"),
    ("broken.jsonl", '{"prompt": "a"}\n\n{"prompt": oops\n', "line 3 is not valid JSON"),
    ("broken.json", '[{"prompt": "a"},\n {"prompt":}]', "line 2 is not valid JSON"),
    ("list.jsonl", '{"prompt": "a"}\n[1, 2]\n', "list.jsonl:2 is not an object"),
    ("number.json", '[{"prompt": "a"}, 3]', "number.json:2 is not an object"),
    ("bytes.jsonl", b"\xff\xfe", "can't decode"),
    ("rows.txt", "a", "expected a .jsonl, .json, .parquet or .csv file"),
    ("rows.parquet", "not parquet", "cannot be read"),
    ("empty.csv", "", "cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "words"), FILE_ERRORS, ids=[name for name, _, _ in FILE_ERRORS])
def test_data_file(name, text, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as error:
        load_rows("--dataset", str(path), "train")
    assert str(error.value).startswith(f"--dataset {path}: ") and words in str(error.value)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("/absent.jsonl", "no such file"),
        ("absent.csv", "no such file"),
        ("nobody/nothing", "no such file or folder, and not found on the hub"),
        ("a/b/c", "no such file or folder, and not found on the hub"),
    ],
)
def test_dataset_not_found(dataset, words, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        load_rows("--eval_dataset", dataset, "train")
    assert str(error.value).startswith(f"--eval_dataset {dataset}: ") and words in str(error.value)


def test_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="--dataset .*: no .jsonl, .json, .parquet or .csv files in it"):
        load_rows("--dataset", str(tmp_path), "train")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(dataset_split="validation"), "--dataset arithmetic has no split 'validation'"),
        (dict(eval_split="validation", eval_size=20000), "--eval_size 20000 leaves no training rows of 15952"),
        (dict(eval_dataset="/absent.jsonl"), "--eval_dataset /absent.jsonl: no such file"),
    ],
)
def test_splits(flags, words):
    with pytest.raises(ValueError) as error:
        train_and_eval_rows(TrainArgs(**flags))
    assert words in str(error.value)


@pytest.mark.parametrize("choices", [SFT_COLUMNS, PROMPT_COLUMNS])
def test_columns(choices):
    with pytest.raises(ValueError, match="--dataset x has the columns foo, bar; needed: .*prompt"):
        require_columns("--dataset x", [dict(foo="a", bar="b", _source="x:1")], choices)


def test_reasons():
    assert reasons({"dropped": 3, "truncated": 1}) == "3 dropped, 1 truncated" and reasons({}) == ""
