"""A folder has the same splits as in the library `datasets`, and no row is in two splits or read
twice."""

import os

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config.groups import TrainArgs
from common.text.files import splits_of
from common.text.rows import load_rows

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


def ours(folder, split: str) -> list[str]:
    rows = load_rows("--dataset", str(folder), split, TrainArgs())
    return [row["text"] for row in rows or ()]


def theirs(folder) -> dict[str, list[str]]:
    """Return the files of each split in `datasets`, which lists some of them twice."""
    files = datasets.load_dataset_builder(str(folder)).config.data_files
    return {
        str(s): sorted({os.path.relpath(f, folder) for f in found}) for s, found in files.items()
    }


@given(layout=LAYOUTS)
def test_splits_equal_those_of_datasets(layout, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    write(folder, [f"{place}{stem}.jsonl" for place, stem in layout])
    try:
        expected = theirs(folder)
    except FileNotFoundError:
        expected = {}
    for split in ("train", "test", "validation", "extra"):
        own = {*expected.get(split, [])}
        others = [name for name in expected if name != split and own & {*expected[name]}]
        if others or not expected:
            problem = rf"belongs to the splits {split} and ({'|'.join(others)});"
            with pytest.raises(ValueError, match=problem if others else "files with a split in it"):
                ours(folder, split)
        else:
            assert ours(folder, split) == sorted(own)


def test_files_of_other_kinds_do_not_matter(tmp_path):
    """Notes, and more pictures than rows: `datasets` would take the folder for one of images."""
    write(tmp_path, ["dev.jsonl", "train_a.jsonl", "train_b.jsonl", "x.png", "y.png", "test_x.txt"])
    assert ours(tmp_path, "train") == ["train_a.jsonl", "train_b.jsonl"]
    assert ours(tmp_path, "dev") == ours(tmp_path, "validation") == ["dev.jsonl"]
    assert ours(tmp_path, "test") == []


def test_files_of_two_kinds_are_refused(tmp_path):
    """Most often the second has the rows of the first."""
    write(tmp_path, ["train/a.jsonl", "train/b.jsonl", "test/a.csv"])
    assert len(ours(tmp_path, "train")) == 2
    (tmp_path / "train/a.csv").write_text("text\nx\n")
    with pytest.raises(ValueError, match="--dataset .*: .csv and .jsonl files; name one kind by"):
        ours(tmp_path, "train")


def test_configurations_of_the_hub_are_refused(tmp_path):
    """Their rows would be mixed. A single one has the names of splits."""
    write(tmp_path, ["data/train-0.jsonl", "data/test-0.jsonl"])
    card = "---\nconfigs:\n- config_name: one\n"
    (tmp_path / "README.md").write_text(f"{card}---\n")
    assert ours(tmp_path, "test") == ["data/test-0.jsonl"]
    (tmp_path / "README.md").write_text(f"{card}- config_name: two\n---\n")
    with pytest.raises(ValueError, match="README.md has the configurations one, two; name"):
        ours(tmp_path, "train")


def test_splits_are_named_whatever_holds_them(tmp_path):
    table = datasets.Dataset.from_list([dict(text="a")])
    datasets.DatasetDict(train=table, dev=table).save_to_disk(tmp_path / "saved")
    write(tmp_path, ["folder/train.jsonl", "folder/valid.jsonl", "rows.jsonl"])
    for name, splits in (
        ("arithmetic", ["train", "test"]),
        (tmp_path / "saved", ["train", "dev"]),
        (tmp_path / "folder", ["train", "validation"]),
        (tmp_path / "rows.jsonl", ["train"]),
        (tmp_path / "*.jsonl", ["train"]),
    ):
        assert splits_of("--dataset", str(name)) == splits
