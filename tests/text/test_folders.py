"""A folder has the same splits as in the library `datasets`, and no row is in two splits or read
twice."""

import gzip
import os
import textwrap

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


def ours(folder, split: str, **flags) -> list[str]:
    rows = load_rows("--dataset", str(folder), split, TrainArgs(**flags))
    assert [row["_source"] for row in rows or ()] == [f"{row['text']}:1" for row in rows or ()]
    return [row["text"] for row in rows or ()]


def theirs(folder) -> dict[str, list[str]]:
    """Return the files of each split in `datasets`, which lists some of them twice."""
    builder = datasets.load_dataset_builder(str(folder), cache_dir=f"{folder}_cache")
    files = builder.config.data_files
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


NAMES = ["a.jsonl", "b.jsonl", "data/train-1.jsonl", "data/c.jsonl", "other/a.jsonl", ".h.jsonl"]
CARDS = {  # of a folder with these files
    "no front matter": "# Data",
    "no configurations": "---\nlicense: mit\n---\n",
    "one file for each split": """
        configs:
        - config_name: default
          data_files: [{split: train, path: a.jsonl}, {split: test, path: b.jsonl}]""",
    "a text": "configs: [{config_name: default, data_files: b.jsonl}]",
    "a list": "configs: [{config_name: x, data_files: [b.jsonl, a.jsonl]}]",
    "patterns": """
        configs:
        - config_name: default
          data_files: [{split: train, path: "data/*.jsonl"}, {split: valid, path: "**/[ab]*"}]""",
    "lists of paths": """
        configs:
        - config_name: default
          data_files:
          - {split: dev, path: [other/a.jsonl, a.jsonl]}
          - {split: x.y, path: b.jsonl}""",
    "hidden file": "configs: [{config_name: default, data_files: .h.jsonl}]",
    "folder": "configs: [{config_name: default, data_dir: data}]",
    "files in a folder": "configs: [{config_name: default, data_dir: data, data_files: '*'}]",
    "no files": "configs: [{config_name: default}]",
    "a default of two": """
        configs:
        - {config_name: one, data_files: a.jsonl}
        - {config_name: two, data_files: b.jsonl, default: true}""",
    "two": """
        configs:
        - {config_name: one, data_files: a.jsonl}
        - {config_name: default, data_files: [{split: test, path: b.jsonl}]}""",
    "absent file": "configs: [{config_name: default, data_files: [a.jsonl, z.jsonl]}]",
    "no file of a pattern": "configs: [{config_name: default, data_files: [a.jsonl, z*]}]",
    "a folder above": "configs: [{config_name: default, data_files: [a.jsonl, ../above.jsonl]}]",
    "no kind": "configs: [{config_name: default, data_files: notes.txt}]",
    "two defaults": """
        configs:
        - {config_name: one, data_files: a.jsonl, default: true}
        - {config_name: default, data_files: b.jsonl}""",
    "no default": """
        configs:
        - {config_name: one, data_files: a.jsonl}
        - {config_name: two, data_files: b.jsonl}""",
    "parameters": "configs: [{config_name: default, data_files: a.jsonl, field: rows}]",
    "both splits": """
        configs:
        - config_name: default
          data_files: [{split: train, path: a.jsonl}, {split: test, path: "*.jsonl"}]""",
    "a split twice": """
        configs:
        - config_name: default
          data_files: [{split: train, path: a.jsonl}, {split: train, path: b.jsonl}]""",
    "no name": "configs: [{data_files: a.jsonl}]",
    "no list": "configs: {config_name: default}",
    "texts": "configs: [default]",
    "a number": "configs: [{config_name: default, data_files: 3}]",
    "a dict of files": "configs: [{config_name: default, data_files: {train: a.jsonl}}]",
    "no split name": "configs: [{config_name: d, data_files: [{split: 3, path: a.jsonl}]}]",
    "another disk": "configs: [{config_name: d, data_files: 'hf://datasets/x/y/a.jsonl'}]",
    "broken YAML": "configs: [",
    "no dict": "---\n- a\n---",
    ".huggingface.yaml": "configs: [{config_name: default, data_files: b.jsonl}]",
    "a name twice": "a: 1\na: 2",
}  # fmt: skip
REFUSED = {  # by us alone: a part of the data would be missing, be read twice or be on another disk
    "no file of a pattern": "README.md lists z*: no ",
    "a folder above": "README.md lists ../above.jsonl, which is outside of the folder",
    "no kind": "README.md lists notes.txt: no ",
    "both splits": "a.jsonl belongs to the splits train and test",
    "parameters": "README.md: the configuration default has field; ",
    "another disk": "README.md lists hf://datasets/x/y/a.jsonl: no ",
}


def with_card(folder, text: str) -> None:
    write(folder, [*NAMES, "../above.jsonl"])
    (folder / "notes.txt").write_text("x")
    if text[0] not in "-#":
        text = f"---\n{textwrap.dedent(text)}\n---\n"
    (folder / "README.md").write_text(text)


def library(folder: str, config: str | None = None):
    return datasets.load_dataset(folder, config, streaming=True, cache_dir=f"{folder}_cache")


@pytest.mark.parametrize(
    ("card", "config"),
    [(card, None) for card in CARDS] + [("two", "one"), ("two", "default"), ("no default", "two")],
)
def test_readme_decides_splits_as_in_datasets(card, config, tmp_path):
    """The same rows in the same order, or one line that names README.md."""
    tmp_path /= "folder"
    with_card(tmp_path, CARDS[card])
    if card == ".huggingface.yaml":
        (tmp_path / card).write_text(CARDS["patterns"])
    label = f"--dataset {tmp_path}"
    expected = {}
    if card not in REFUSED:
        try:
            found = library(str(tmp_path), config)
            expected = {str(name): [row["text"] for row in found[name]] for name in found}
        except Exception:
            pass
    if not expected:
        with pytest.raises(ValueError) as refusal:
            ours(tmp_path, "train", dataset_config=config)
        words = REFUSED.get(card, "README.md")
        assert str(refusal.value).startswith(f"{label}: {words}"), refusal.value
        assert len(str(refusal.value).splitlines()) == 1
        return
    assert splits_of(label, str(tmp_path), config) == [*expected]
    for split in {*expected, "train", "test"}:
        assert ours(tmp_path, split, dataset_config=config) == expected.get(split, [])


@pytest.mark.parametrize("configs", ["", "configs: [{config_name: default, data_files: a*}]"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"label": 1, "tags": [0]}\n{"label": 0, "tags": []}\n{"label": -1}'),
        ("a.csv", "label,tags\n1,\ngood,\n-1,\n"),
    ],
)
def test_readme_names_classes_as_in_datasets(configs, name, text, tmp_path):
    (tmp_path / name).write_text(text)
    names = "{class_label: {names: {'0': good, '1': bad}}}"
    label, tags = f"{{name: label, dtype: {names}}}", f"{{name: tags, list: {names}}}"
    if name == "a.csv":
        tags = "{name: tags, dtype: string}"
    info = f"dataset_info: {{features: [{label}, {tags}]}}"
    (tmp_path / "README.md").write_text(f"---\n{configs}\n{info}\n---\n")
    rows = load_rows("--dataset", str(tmp_path), "train", TrainArgs())
    theirs = library(str(tmp_path))["train"]
    kind = theirs.features["label"]
    assert [row["label"] for row in theirs] == [1, 0, -1]
    assert [row["label"] for row in rows] == [kind.int2str(1), kind.int2str(0), None]
    assert [row.get("tags") for row in rows][0] == (["good"] if name == "a.jsonl" else None)


def test_configurations_are_named_with_their_flag(tmp_path):
    tmp_path /= "folder"
    with_card(tmp_path, CARDS["two"])
    words = "README.md: has the configurations one, default; name one with --dataset_config"
    with pytest.raises(ValueError, match=words):
        ours(tmp_path, "train", dataset_config="absent")


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


def test_places_tell_files_of_one_name_apart(tmp_path):
    """`ours` compares the places of rows with the names of files in the folder."""
    folder, names = tmp_path / "folder", ["a/rows.jsonl", "b/rows.jsonl", "b/test/rows.jsonl.gz"]
    write(folder, names)
    (folder / names[2]).write_bytes(gzip.compress((folder / names[2]).read_bytes()))
    assert ours(folder, "train") == [] and ours(folder, "test") == names[2:]
    with_card(folder, "configs: [{config_name: default, data_files: '**/rows.*'}]")
    assert ours(folder, "train") == names
