"""A folder has the same splits as in the library `datasets`, and no row is in two splits or read
twice."""

import os

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.rows import load_rows
from common.data.shards import open_shards

FOLDERS = """
    train/ test/ math_train/ math_test/ training/ testing/ val/ a/b/ dev-1/ data/ data/train/
    latest/ train_test_split/ .ipynb_checkpoints/ __pycache__/""".split()
STEMS = """
    train test train_2 test.v2 rows part-0 my-eval validation contest .hidden train-00000-of-00002
    extra-00001-of-00002""".split()
LAYOUTS = st.lists(
    st.tuples(st.sampled_from(["", *FOLDERS]), st.sampled_from(STEMS)),
    min_size=1,
    max_size=6,
    unique=True,
)


def write(folder, names) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"text": "{name}"}}\n')


def ours(folder, split: str, config: str | None = None) -> list[str]:
    return [row["text"] for row in load_rows("--dataset", str(folder), split, config) or ()]


def theirs(folder, config: str | None = None) -> dict[str, list[str]]:
    """Return the files of each split in `datasets`, which lists some of them twice."""
    files = datasets.load_dataset_builder(str(folder), config).config.data_files
    return {
        str(s): sorted({os.path.relpath(f, folder) for f in found}) for s, found in files.items()
    }


@settings(max_examples=40, deadline=None)
@given(layout=LAYOUTS)
def test_splits_equal_those_of_datasets(layout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    write(folder, [f"{place}{stem}.jsonl" for place, stem in layout])
    try:
        expected = theirs(folder)
    except FileNotFoundError:
        with pytest.raises(ValueError, match="files in it$"):
            ours(folder, "train")
        return
    for split in ("train", "test", "validation", "extra"):
        files = expected.get(split, [])
        if other := [
            name for name in expected if name != split and set(expected[name]) & set(files)
        ]:
            with pytest.raises(
                ValueError,
                match=rf"belongs to the splits {split} and ({'|'.join(other)}) by its name;",
            ):
                ours(folder, split)
        else:
            assert sorted(ours(folder, split)) == files


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (["math_train/a.jsonl", "train/a.jsonl"], ["math_test/a.jsonl", "test/a.jsonl"]),
        (["train.jsonl", "train_2.jsonl", "x/train-3.jsonl"], ["eval.jsonl", "test.2.jsonl"]),
        (["data/train-00000-of-00001.jsonl"], ["data/test-00000-of-00001.jsonl"]),
        (["latest/contest.jsonl", "rows.jsonl"], []),
    ],
)
def test_rows_equal_those_of_datasets(train, test, tmp_path):
    write(
        tmp_path,
        [*train, *test, ".ipynb_checkpoints/train-checkpoint.jsonl", "train/__old__/train.jsonl"],
    )
    (tmp_path / "test_notes.txt").write_text("of another kind")
    assert ours(tmp_path, "train") == train and ours(tmp_path, "test") == test == ours(
        tmp_path, "evaluation"
    )
    (tmp_path / "test_notes.txt").unlink()
    found = datasets.load_dataset(str(tmp_path))
    assert {split: sorted(rows["text"]) for split, rows in found.items()} == (
        dict(train=train) | (dict(test=test) if test else {})
    )


CARD = """---
configs:
- config_name: plain
  default: true
  data_files:
  - {split: train, path: "a/*.jsonl"}
  - {split: test, path: [b/test.jsonl, ./b/more.jsonl]}
- config_name: few
  data_files:
  - {split: dev, path: "a/1.jsonl"}
  - {split: validation, path: "a/2.jsonl"}
- config_name: deep
  data_dir: b
- config_name: all
  data_files: "**/*.jsonl"
---
"""


def test_readme_lists_the_files_of_splits(tmp_path):
    write(
        tmp_path,
        ["a/1.jsonl", "a/2.jsonl", "b/test.jsonl", "b/more.jsonl", "b/train.jsonl", "test.jsonl"],
    )
    (tmp_path / "README.md").write_text(CARD)
    for config in (None, "plain", "few", "deep", "all"):
        expected = theirs(tmp_path, config)
        assert {split: sorted(ours(tmp_path, split, config)) for split in expected} == expected
    assert (
        ours(tmp_path, "test") == ["b/more.jsonl", "b/test.jsonl"]
        and ours(tmp_path, "validation") == []
    )
    with pytest.raises(
        ValueError,
        match="README.md has the configurations plain, few, deep, all; name one in --dataset_conf",
    ):
        ours(tmp_path, "train", "absent")
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(ValueError, match=r"^--dataset .*: README.md: "):
        ours(tmp_path, "train")


@pytest.mark.parametrize(
    "lost", ["absent.jsonl", "../outside.jsonl", ".hidden/b.jsonl", "b.csv.gz"]
)
def test_file_of_a_readme_that_cannot_be_read_is_named(lost, tmp_path):
    write(
        tmp_path, ["folder/a.jsonl", "folder/.hidden/b.jsonl", "folder/b.csv.gz", "outside.jsonl"]
    )
    card = (
        "---\nconfigs:\n- config_name: x\n  data_files:\n"
        f"  - {{split: train, path: [a.jsonl, {lost}]}}\n---\n"
    )
    (tmp_path / "folder" / "README.md").write_text(card)
    with pytest.raises(
        ValueError, match=f"^--dataset .*: README.md lists {lost}: no readable file"
    ):
        ours(tmp_path / "folder", "train", "x")


def test_one_name_in_two_kinds_is_refused(tmp_path):
    """Most often the second file has the rows of the first."""
    for name in ("train/a.jsonl", "train/b.csv", "train/a.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "x"}' if name.endswith("jsonl") else "text\nx\n")
    with pytest.raises(
        ValueError, match="--dataset .*: train/a.csv and train/a.jsonl have one name; delete one"
    ):
        open_shards("--dataset", str(tmp_path), "train", None)
    (tmp_path / "train" / "a.csv").unlink()
    assert len(open_shards("--dataset", str(tmp_path), "train", None)) == 2
