"""Every file format loads, held-out rows are never trained on, and errors name the file and the
row."""

import csv
import json
import math
import os
import random
import re
import socket
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import permutations
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.config.flags import datasets_by_name, eval_sets_of, sources_of
from common.config.groups import TrainArgs
from common.text import files
from common.text.columns import (
    KTO_COLUMNS,
    PAIR_COLUMNS,
    PROMPT_COLUMNS,
    SFT_COLUMNS,
    prompt_digest,
    rename_columns,
    require_columns,
    require_old_names,
)
from common.text.files import BadRows, open_split
from common.text.rows import (
    encode_each,
    load_rows,
    require_held_out,
    rows_of_split,
    train_and_eval_rows,
)


def said(*texts: str) -> list[dict]:
    """Return a message of the user, and of the model."""
    return [dict(role=r, content=x) for r, x in zip(("user", "assistant"), texts, strict=False)]


# ---- files ----


def load(path, split: str = "train", **flags) -> list[dict] | None:
    """Return the rows without our columns."""
    rows = load_rows("--dataset", str(path), split, TrainArgs(**flags))
    return rows and [{k: v for k, v in row.items() if k[0] != "_"} for row in rows]


def sources(path, **flags) -> list[str]:
    return [
        row["_source"] for row in load_rows("--dataset", str(path), "train", TrainArgs(**flags))
    ]


ROWS = [dict(prompt="a\u2028b", completion="c\x85d"), dict(prompt="\u00e9", completion="\n")]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def write(path, text: str | bytes):
    """Write a file with the compression that its suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.output_stream(str(path), compression="detect") as stream:
        stream.write(text if isinstance(text, bytes) else text.encode())
    return path


TEXTS = {
    "lines": (LINES, [1, 2]),
    "blank lines": (f"\n{LINES}\n".replace("\n", "\n\n"), [3, 5]),
    "byte order mark": (f"\ufeff{LINES}", [1, 2]),
    "list": (json.dumps(ROWS), [1, 2]),
    "list over several lines": (f"\n{json.dumps(ROWS, indent=1, ensure_ascii=False)}", [1, 2]),
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json.zst"])
@pytest.mark.parametrize("form", TEXTS)
def test_json_loads_whatever_its_form(name, form, tmp_path):
    """Lines end at line feeds only. Columns with our names are ignored."""
    text, lines = TEXTS[form]
    path = write(tmp_path / name, text.replace('"prompt"', '"_dataset": ["x"], "prompt"'))
    assert load(path) == ROWS and load(path, "test") is None
    assert sources(path) == [f"{name}:{line}" for line in lines]


@pytest.mark.parametrize(
    "row",
    [
        dict(prompt="a", n=1, answer=dict(x=[dict(y=1)])),
        dict(messages=[dict(role="user", content="a")], tools=[dict(type="function")]),
        dict(prompt=[dict(role="user", content="a")], tests=[]),
    ],
)
@pytest.mark.parametrize("indent", [None, 0, 2])
def test_one_object_of_a_json_file_is_a_row_over_any_number_of_lines(row, indent, tmp_path):
    path = write(tmp_path / "rows.json", "\n" + json.dumps(row, indent=indent) + "\n")
    assert load(path) == [row] and sources(path) == ["rows.json:1"]


UNDER = "one object, with objects under data; if these are the rows, write one a line; if it is"
BY_COLUMNS = r"a table by columns, as to_json\(\) of pandas writes it; use to_json\(orient="


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (dict(version="1.0", data=[dict(prompt="a"), dict(prompt="b")]), UNDER),
        (dict(prompt={"0": "a", "1": "b"}, answer={"0": "c", "1": "d"}), BY_COLUMNS),
        ({"0": dict(prompt="a"), "1": dict(prompt="b")}, BY_COLUMNS),
        (dict(columns=["prompt"], index=[0], data=[["a"]]), BY_COLUMNS),
    ],
)
def test_json_file_that_is_not_rows_is_refused_with_a_way(value, words, indent, tmp_path):
    path = write(tmp_path / "rows.json.gz", json.dumps(value, indent=indent))
    with pytest.raises(ValueError, match=f"^--dataset {path}: {words}"):
        load(path)


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_truncated_or_plain_content_of_a_compressed_file_is_refused(end, tmp_path):
    whole = write(tmp_path / f"rows.jsonl.{end}", LINES).read_bytes()
    for content in (whole[:-3], LINES.encode()):
        (tmp_path / f"rows.jsonl.{end}").write_bytes(content)
        with pytest.raises(ValueError, match=f"^--dataset .*rows.jsonl.{end}: cannot be read: "):
            load(tmp_path / f"rows.jsonl.{end}")


def test_tables_load_with_their_types(tmp_path):
    rows = [
        dict(prompt="a", n=7, x=0.5, t="07", b=True, l=[1, 2]),
        dict(prompt="b", n=None, x=None, t=None, b=None, l=None),
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(tmp_path / "both")
    for name in ("rows.parquet", "one", "both"):
        assert load(tmp_path / name) == rows, name
    assert sources(tmp_path / "rows.parquet") == ["rows.parquet:1", "rows.parquet:2"]
    assert load(tmp_path / "both", "test") == rows[1:] and load(tmp_path / "one", "test") is None
    assert sources(tmp_path / "one") == [f"{tmp_path}/one/train:1", f"{tmp_path}/one/train:2"]


TYPED = {  # type in pyarrow or `datasets` -> stored values, and those of the rows
    "float32": (pa.float32(), [0.1, None, 3.0], [0.1, None, 3.0]),
    "float16": (pa.float16(), [np.float16(0.1), None, np.float16("inf")], [0.1, None, math.inf]),
    "floats": (pa.list_(pa.float32()), [[0.1, None], None, []], [[0.1, None], None, []]),
    "inner": (
        pa.struct({"a": pa.float32(), "d": pa.list_(pa.date32())}),
        [dict(a=0.7, d=[date(2024, 2, 20)]), None, dict(a=None, d=None)],
        [dict(a=0.7, d=["2024-02-20"]), None, dict(a=None, d=None)],
    ),
    "day": (pa.date32(), [date(2024, 2, 20)] * 3, ["2024-02-20"] * 3),
    "moment": (
        pa.timestamp("ns"),
        [datetime(2024, 2, 20, 1, 2, 3)] * 3,
        ["2024-02-20 01:02:03"] * 3,
    ),
    "zone": (
        pa.timestamp("us", tz="Europe/Berlin"),
        [datetime(2024, 2, 20, 1, 2, 3, tzinfo=UTC)] * 3,
        ["2024-02-20 02:02:03+01:00"] * 3,
    ),
    "hour": (pa.time64("us"), [time(1, 2)] * 3, ["01:02:00"] * 3),
    "while": (pa.duration("s"), [timedelta(hours=30)] * 3, ["1 day, 6:00:00"] * 3),
    "price": (pa.decimal128(5, 2), [Decimal("1.50")] * 3, ["1.50"] * 3),
    "category": (pa.dictionary(pa.int8(), pa.string()), ["b", "a", None], ["b", "a", None]),
    "count": (pa.int8(), [1, None, -1], [1, None, -1]),
    "picture": (pa.binary(), [b"a", None, b""], [b"a", None, b""]),
}
CLASSES = datasets.ClassLabel(names=["good", "bad"])


def typed_table() -> datasets.Dataset:
    columns = {name: pa.array(x, kind) for name, (kind, x, _) in TYPED.items()}
    columns["category"] = columns["category"].cast(pa.string())  # a Dataset has no categories
    table = datasets.Dataset(pa.table(columns))
    classes = dict(label=CLASSES, tags=datasets.List(CLASSES), other=datasets.Json())
    values = dict(label=[1, 0, -1], tags=[[0, 1], [], None], other=[[1, "a"], dict(b=2), None])
    extra = datasets.Dataset.from_dict(values, features=datasets.Features(classes))
    return datasets.concatenate_datasets([table, extra], axis=1)


def typed_rows() -> list[dict]:
    shown = {name: values for name, (_, _, values) in TYPED.items()}
    shown |= dict(label=["bad", "good", None], tags=[["good", "bad"], [], None])
    shown |= dict(other=[[1, "a"], dict(b=2), None])
    return [{name: shown[name][i] for name in shown} for i in range(3)]


@pytest.mark.parametrize("place", ["parquet", "disk", "hub", "stream"])
def test_stored_types_survive(place, tmp_path, monkeypatch):
    """Names of classes, the width of a float, dates: rows have what their author sees."""
    table = typed_table()
    dataset = str(tmp_path / "rows.parquet")
    streaming = place == "stream"
    if place == "parquet":
        table.to_parquet(dataset)
    elif place == "disk":
        dataset = str(tmp_path / "disk")
        table.save_to_disk(dataset)
    else:
        dataset = "some/rows"
        found = table.to_iterable_dataset() if streaming else table
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    (shard,) = open_split("--dataset", dataset, "train", streaming=streaming)
    rows = [{k: v for k, v in row.items() if k[0] != "_"} for row in shard.rows(BadRows("error"))]
    assert rows == typed_rows()
    for row in rows:
        json.dumps(row | dict(picture=None))


def test_types_of_a_parquet_file_of_others_survive(tmp_path):
    """pandas writes categories, and only pyarrow maps, which are objects."""
    columns = {name: pa.array(x, kind) for name, (kind, x, _) in TYPED.items()}
    rows = [{name: TYPED[name][2][i] for name in TYPED} for i in range(3)]
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet") == rows
    columns["map"] = pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    maps = dict(a=1), {}, None
    assert load(tmp_path / "rows.parquet") == [
        row | dict(map=m) for row, m in zip(rows, maps, strict=True)
    ]


CELLS = '07|NA|None|nan|1.0||True| a |say "x"|two\nlines|a,b|\u2028|2|' + "x" * 200_000


@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("tsv", "\t")])
def test_values_of_a_text_table_are_the_text_in_the_file(kind, separator, tmp_path):
    """Also with an index, a byte order mark, Windows line ends and empty lines."""
    texts = CELLS.split("|")
    with (tmp_path / f"rows.{kind}").open("w", newline="", encoding="utf-8-sig") as file:
        index = [[i, text, 2 * i] for i, text in enumerate(texts)]
        csv.writer(file, delimiter=separator).writerows([[], ["", "prompt", "n"], *index, []])
    assert load(tmp_path / f"rows.{kind}") == [
        dict(prompt=text or None, n=str(2 * i)) for i, text in enumerate(texts)
    ]


def test_table_may_have_many_columns(tmp_path):
    """A square of their number would take minutes."""
    names = [f"c{i}" for i in range(50_000)]
    path = write(tmp_path / "rows.csv", "\n".join([",".join(names)] * 2))
    assert load(path) == [dict(zip(names, names, strict=True))]


def test_pattern_sorts_its_files_and_tells_them_apart(tmp_path):
    for name in ("part-2", "part-10", "part-1", "other", "b/part-1"):
        write(tmp_path / f"{name}.jsonl", json.dumps(dict(text=name)))
    write(tmp_path / "part-3.jsonl.gz", '{"text": "part-3"}')
    pattern = tmp_path / "part-*"
    assert [row["text"] for row in load(pattern)] == ["part-1", "part-10", "part-2", "part-3"]
    assert sources(pattern)[3] == "part-3.jsonl.gz:1" and load(pattern, "test") is None
    nested = tmp_path / "**" / "part-[01].jsonl"
    assert [row["text"] for row in load(nested)] == ["b/part-1", "part-1"]
    assert sources(nested) == [f"{tmp_path}/{name}.jsonl:1" for name in ("b/part-1", "part-1")]


# ---- the hub, with files in place of repositories ----


def test_all_configurations_of_a_hub_dataset_are_read(monkeypatch):
    """In lukaemon/bbh, each task is a configuration; `main` is the default one of openai/gsm8k."""

    def load_dataset(_, name, split, **__):
        if name is None:
            raise ValueError("Config name is missing.\nPick one of ['main', 'socratic']")
        if split == "absent":
            raise ValueError('Unknown split "absent"')
        rows = [dict(input=f"{name}{i}", target="x") for i in range(2)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda _: ["dates", "snarks"])
    args = TrainArgs(dataset_config="*", columns=("answer=target",))
    rows = rows_of_split("--dataset", ["some/tasks"], "--dataset_split", "test", args)
    assert [(row["input"], row["config"], row["_source"]) for row in rows] == [
        (f"{name}{i}", name, f"some/tasks/{name}/test:{i + 1}")
        for name in ("dates", "snarks")
        for i in (0, 1)
    ]
    assert [row["input"] for row in load("some/tasks")] == ["main0", "main1"]
    assert load("some/tasks", "absent") is None


def test_what_the_library_cannot_read_is_said(tmp_path, monkeypatch):
    """Its error says only that one occurred. The library opens a folder in place of the hub."""
    write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": oops}\n')
    library = partial(datasets.load_dataset, cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda _, *a, **k: library(str(tmp_path), *a, **k)
    )
    with pytest.raises(ValueError, match="^--dataset some/rows: .*JSON"):
        load("some/rows")


# ---- bad data ----


BAD_LINES = """{"n": 0}
oops
[1]
{"n": 4}
{"n": 1, "n": 2}
hm
{"n": 7}
{"n": 9}
"""


def test_bad_rows_raise_or_are_skipped_and_counted_by_kind(tmp_path, capsys):
    """In a file, and those that have no encoding."""

    def encode(row: dict) -> int:
        if row["n"] % 2:
            raise ValueError(f"{row['_source']}: {row['n']} is odd")
        return 10 * row["n"]

    path = write(tmp_path / "rows.jsonl", BAD_LINES)
    with pytest.raises(ValueError, match="line 2 is not valid JSON"):
        load(path)
    rows = load_rows("--dataset", str(path), "train", TrainArgs(on_bad_row="skip"))
    with pytest.raises(ValueError, match="rows.jsonl:7: 7 is odd"):
        list(encode_each(rows[2:], encode, "error"))
    assert list(encode_each(rows, encode, "skip")) == [(rows[0], 0), (rows[1], 40)]
    assert capsys.readouterr().out.splitlines() == [
        f"--on_bad_row skip: {count} left out, such as {problem}"
        for count, problem in (
            (2, f"--dataset {path}: line 2 is not valid JSON: Expecting value"),
            (1, f"--dataset {path}: rows.jsonl:3 is not an object"),
            (1, f"--dataset {path}: line 5 is not valid JSON: an object has the key n twice"),
            (2, "rows.jsonl:7: 7 is odd"),
        )
    ]
    with pytest.raises(ValueError, match="--system_prompt"):  # not about a row
        list(encode_each(rows, lambda row: int("--system_prompt"), "skip"))
    write(path, "oops\n")
    with pytest.raises(ValueError, match="rows.jsonl: every row was skipped"):
        load(path, on_bad_row="skip")
    write(tmp_path / "rows.csv", "a,b\n1,2\nonly one\n3,4\n")
    assert [row["b"] for row in load(tmp_path / "rows.csv", on_bad_row="skip")] == ["2", "4"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", "", "no rows in it"),
        ("a.jsonl", '{"a": "a"}\n\n{"a": oops\n', "line 3 is not valid JSON: Expecting value"),
        ("empty.json", "", "no rows in it"),
        ("empty.json", "[]", "no rows in it"),
        ("a.json", '[{"a": "a"},\n {"a":}]', "line 2 is not valid JSON: Expecting value"),
        ("a.json", '{\n"a":\n "a" "b"}', "line 3 is not valid JSON: Expecting ',' delimiter"),
        ("a.json", '{\n"a": 1\n}\n{\n"a": 1\n}', "line 4 is not .* than one value; write one"),
        ("a.jsonl", '{\n"a": 1\n}', "line 1 is not .* double quotes; write one object a line"),
        ("a.json", '{"a": 1}\n{"a":\n', "line 2 is not valid JSON: Expecting value"),
        ("a.json", "5", "a.json:1 is not an object"),
        ("a.jsonl", '{"a": [{"b": 1, "b": 1}]}', "line 1 is not .* object has the key b twice"),
        ("a.jsonl", '{"a": "a"}\n[1, 2]\n', "a.jsonl:2 is not an object"),
        ("a.json", '[{"a": "a"}, 3]', "a.json:2 is not an object"),
        ("a.jsonl", '{"a": 1}\n' + "[" * 100_000, "line 2 is not valid JSON: maximum recursion"),
        ("a.json", '{"a":' * 100_000, "line 1 is not valid JSON: maximum recursion"),
        ("a.jsonl", '{"a": ' + "1" * 5000 + "}", "line 1 is not valid JSON: Exceeds the limit"),
        ("a.jsonl", b"\xff\xfe", "can't decode"),
        ("a.parquet", "not parquet", "cannot be read"),
        ("a.txt", "a", "expected a .jsonl, .json .these also as .gz or .zst., .parquet, .csv"),
        ("a.csv", "\n\n", "cannot be read: it is empty"),
        ("a.csv", 'a,b\n1,"2"x\n', "cannot be read: ',' expected after"),
        ("a.csv", "a,b\n1,2\n3\n", "row 2 has 1 values for 2 columns"),
        ("a.csv", "a,b,a\n1,2,3\n", "two columns have the name a"),
        ("a.csv", 'a,b\n1,"2\n', "cannot be read: unexpected end of data"),
    ],
)
def test_bad_data_file_is_refused_by_name(name, content, words, tmp_path):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=f"^--dataset {path}: .*{words}"):
        load(path)


def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    """By name, by a pattern, and in a folder, where a link that is broken would be left out. A
    folder may have the name of a file."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short

    def listen(path: Path) -> None:
        socket.socket(socket.AF_UNIX).bind(str(path.relative_to(tmp_path)))

    for name, make in (
        ("pipe.jsonl", os.mkfifo),
        ("device.jsonl.gz", lambda path: path.symlink_to("/dev/zero")),
        ("broken.parquet", lambda path: path.symlink_to("absent")),
        ("socket.csv", listen),
        ("folder.json", Path.mkdir),
    ):
        folder = tmp_path / name.partition(".")[0]
        write(folder / "train.jsonl", '{"text": "a"}')
        make(folder / name)
        (folder / f".#{name}").symlink_to("absent")  # of an editor
        (folder / ".old").mkdir()
        (folder / ".old" / name).symlink_to("absent")
        of_folder = f"{folder}: {name}"
        for dataset, place in (
            (folder / name, folder / name),
            (folder / "*", folder / name),
            (folder, of_folder),
        ):
            if name == "folder.json" and dataset != folder / "*":
                continue
            with pytest.raises(ValueError, match=re.escape(f"--dataset {place}: not a regular")):
                load(dataset)
    rows = write(tmp_path / "rows.jsonl" / "part-0.jsonl", '{"text": "a"}')
    assert load(rows.parent) == [dict(text="a")]
    (tmp_path / "link.jsonl").symlink_to(rows)
    assert load(tmp_path / "link.jsonl") == [dict(text="a")]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl.zst", b"\0" * 200, "line 1 has more than 100 characters"),
        ("a.json.gz", b"\0" * 200, "line 1 has more than 100 characters"),
        ("a.jsonl", '{"a": 1}\n' + " " * 200, "line 2 has more than 100 characters"),
        ("a.csv", "a,b\n1," + "x" * 200, "line 2 has more than 100 characters"),
        ("a.csv.", 'a,b\n1,"' + 9 * "xxxxxxxxxxxxxxxxxxxx\n", "field larger than field limit"),
    ],
)
def test_line_without_an_end_is_refused(name, content, problem, tmp_path, monkeypatch):
    """Also unpacked: a small file may become any amount of text."""
    monkeypatch.setattr(files, "LONGEST_LINE", 100)
    path = write(tmp_path / name.rstrip("."), content)
    with pytest.raises(ValueError, match=f"^--dataset {path}: cannot be read: {problem}"):
        load(path, on_bad_row="skip")
    if ".json" in name:
        rows = write(tmp_path / "list.json", json.dumps([dict(text="x" * 200)]))
        assert load(rows) == [dict(text="x" * 200)]  # one line of many rows
        monkeypatch.setattr(files, "LARGEST_FILE", 100)
        words = "one value of more than 100 characters; write one object a line"
        with pytest.raises(ValueError, match=f"^--dataset {rows}: {words}"):
            load(rows)


def test_name_of_a_file_that_is_not_utf_8_is_refused(tmp_path):
    os.close(os.open(os.fsencode(tmp_path) + b"/\xff.jsonl", os.O_CREAT))
    with pytest.raises(ValueError, match="^--dataset .*codec can't encode character"):
        load(tmp_path)


def test_lack_of_memory_is_named(tmp_path, monkeypatch):
    def lines(path):
        raise MemoryError

    monkeypatch.setattr(files, "_lines", lines)
    path = write(tmp_path / "a.jsonl", "{}")
    with pytest.raises(ValueError, match=f"^--dataset {path}: cannot be read: out of memory$"):
        load(path)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("/absent.jsonl", "no such file"),
        ("~nobody_1/x.jsonl", "no such file"),
        ("~nobody_1/x", "no such file"),
        ("absent-*.jsonl", "no such file"),
        ("/x" * 2500 + ".jsonl", "no such file"),
        ("absent/absent", "no such file or folder, and the hub cannot be reached: Couldn't"),
    ],
)
def test_missing_dataset_is_refused_by_name(dataset, words, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError) as error:
        open_split("--eval_dataset", dataset, "train")
    assert str(error.value).startswith(f"--eval_dataset {dataset}: {words}")


# ---- several datasets ----


def test_dataset_names_are_unique():
    names = ["a", "c", "part-*"]
    assert list(sources_of(("x/a.jsonl.gz:1", "b/c:2", "d/part-*.parquet:1"))) == names
    assert list(sources_of(("x/a.jsonl:1", "y/a.jsonl:2"))) == ["x/a.jsonl", "y/a.jsonl"]
    assert sources_of(("a", "b")) == {"": (["a", "b"], 1.0)}
    assert sources_of(("a:7",)) == {"": (["a"], 1.0)}
    assert datasets_by_name({"x/a.jsonl": None, "y/a.jsonl": None, "c": "d"}) == {
        "x/a.jsonl": "x/a.jsonl", "y/a.jsonl": "y/a.jsonl", "d": "c"
    }  # fmt: skip
    sets = eval_sets_of(["./x=1.jsonl", "y=./x=2.jsonl"])
    assert sets == {"./x=1.jsonl": None, "./x=2.jsonl": "y"}


# ---- training and held-out rows ----


def numbered(path, count: int, start: int = 0) -> str:
    lines = (json.dumps(dict(text=str(start + n))) + "\n" for n in range(count))
    return str(write(path, "".join(lines)))


def numbers(rows: list[dict]) -> list[int]:
    return [int(row["text"]) for row in rows]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        (dict(eval_size=8), (42, 8)),
        (dict(), (45, 5)),  # by default a tenth
        (dict(eval_every=0), (50, 0)),
    ],
)
def test_rows_set_aside_are_disjoint_and_do_not_depend_on_the_seed(flags, sizes, tmp_path):
    """Nor on the number of files that have them, whose rows have different places."""
    file = numbered(tmp_path / "rows.jsonl", 50)
    train, held_out = train_and_eval_rows(TrainArgs(dataset=file, **flags))
    assert (len(train), len(held_out)) == sizes
    assert sorted(numbers(train + held_out)) == [*range(50)]
    assert train_and_eval_rows(TrainArgs(dataset=file, seed=1, **flags)) == (train, held_out)
    two = numbered(tmp_path / "a/x.jsonl", 30), numbered(tmp_path / "b/x.jsonl", 20, start=30)
    of_two = train_and_eval_rows(TrainArgs(dataset=two, **flags))
    assert [numbers(rows) for rows in of_two] == [numbers(train), numbers(held_out)]
    sizes = [len({row["_source"] for row in rows}) for rows in of_two]
    assert sizes == [len(train), len(held_out)]


@pytest.mark.parametrize(
    ("of_each", "size", "count", "words"),
    [
        (1, 6, 6, None),
        (4, 8, 8, None),
        (4, 6, 4, None),  # a second prompt would be too much
        (4, 3, 3, "of 3 held-out rows have a prompt that is trained too, such as rows.jsonl:"),
        (40, 8, 8, "8 of 8 held-out rows have a prompt that is trained too"),
    ],
)
def test_rows_of_a_prompt_are_on_one_side(of_each, size, count, words, tmp_path, capsys):
    rows = [dict(prompt=f"{n // of_each}?", completion=str(n)) for n in range(40)]
    path = write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = train_and_eval_rows(TrainArgs(dataset=str(path), eval_size=size))
    assert len(held_out) == count and len(train) == 40 - count
    shared = {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert bool(shared) == (words is not None)
    assert (words or "") in capsys.readouterr().out
    if of_each == 1:  # as before
        drawn = [*range(40)]
        random.Random(0).shuffle(drawn)
        assert [int(row["completion"]) for row in held_out + train] == drawn


@pytest.mark.parametrize("own", ["split", "set"])
def test_held_out_rows_that_are_trained_are_counted(own, tmp_path, capsys):
    """A prompt is the same as a text or as a message; the answer does not matter."""
    train = [dict(messages=said(f" {n}?", "a")) for n in range(10)]
    train[9]["messages"] = [*train[9]["messages"], *said("and?", "b")]
    held_out = [dict(prompt=f"{n}?", completion="c") for n in (3, 8, 9, 11)]
    for name, rows in (("train", train), ("test", held_out)):
        write(tmp_path / "d" / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    more = dict(eval_dataset=str(tmp_path / "d" / "test.jsonl")) if own == "set" else {}
    train_and_eval_rows(TrainArgs(dataset=str(tmp_path / "d"), **more))
    words = "2 of 4 held-out rows have a prompt that is trained too, such as test.jsonl:"
    assert words in capsys.readouterr().out
    if own == "set":
        flags = dict(dataset=more["eval_dataset"], eval_dataset=more["eval_dataset"])
        train_and_eval_rows(TrainArgs(**flags))
        assert "4 of 4 held-out rows" in capsys.readouterr().out


def test_prompts_of_rows_are_told_apart_by_every_part():
    same = [
        dict(prompt="a", chosen="b", rejected="c"),
        dict(question="a ", answer="d"),
        dict(messages=said("a", "e")),
        dict(conversations=[{"from": "human", "value": "a"}, {"from": "gpt", "value": "f"}]),
        dict(chosen=said("a", "b"), rejected=said("a", "c")),
        dict(text="a"),
    ]
    assert len({*map(prompt_digest, same)}) == 1
    other = [
        dict(prompt="a", system="s"),
        dict(prompt="a", context="s2"),
        dict(prompt="a", image=b"1"),
        dict(prompt="a", image=b"2"),
        dict(seed=3, size=4),
        dict(seed=3, size=5),
        dict(messages=said("a", "b") + said("c", "d")),
    ]
    assert len({*map(prompt_digest, other)}) == len(other)


def test_unread_split_of_a_folder_is_named(tmp_path, capsys):
    import datasets

    for name in ("train", "validation"):
        numbered(tmp_path / "folder" / f"{name}.jsonl", 20)
    table = datasets.Dataset.from_list([dict(text=str(n)) for n in range(20)])
    datasets.DatasetDict(train=table, valid=table, latest=table).save_to_disk(tmp_path / "saved")
    for name, split in (("folder", "validation"), ("saved", "valid")):
        place = str(tmp_path / name)
        others = dict(eval_split=split), dict(eval_every=0), dict(eval_dataset="arithmetic")
        for more in ({}, *others):
            train_and_eval_rows(TrainArgs(dataset=place, **more))
            line = f"--dataset {place}: the split {split} is not read, training rows are set aside"
            line += f"; see --eval_split {split}\n"
            assert (line in capsys.readouterr().out) == (more == {})


def test_unread_split_of_the_hub_is_named_by_what_is_loaded(tmp_path, capsys, monkeypatch):
    import datasets

    for name in ("train", "test_prefs"):
        numbered(tmp_path / f"{name}.jsonl", 20)
    table = datasets.Dataset.from_list([dict(text=str(n)) for n in range(20)])
    table.info.splits = dict(train=None, test_prefs=None)

    def load_dataset(_, name, split, **__):
        if split != "train":
            raise ValueError(f'Unknown split "{split}"')
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train_and_eval_rows(TrainArgs(dataset="some/prefs"))
    assert "the split test_prefs is not read" in capsys.readouterr().out


def test_columns_are_renamed_in_the_data_sets_that_have_them(tmp_path):
    a = write(tmp_path / "a.jsonl", '{"problem": "1", "completion": "2"}\n' * 10)
    b = write(tmp_path / "b.jsonl", '{"prompt": "3", "completion": "4"}\n' * 10)
    c = write(tmp_path / "c.jsonl", '{"problem": "5", "prompt": "6", "completion": "7"}\n' * 10)
    for name, text in (("train", b.read_text()), ("test", a.read_text())):
        write(tmp_path / "splits" / f"{name}.jsonl", text)
    flags = dict(columns=("prompt=problem",), eval_size=2)
    for own in (
        dict(dataset=(str(a), str(b))),
        dict(dataset=(f"{a}:1", f"{b}:1")),
        dict(dataset=str(tmp_path / "[ab].jsonl")),
        dict(dataset=str(a), eval_dataset=str(b)),
        dict(dataset=str(b), eval_dataset=str(a)),
        dict(dataset=str(tmp_path / "splits")),
    ):
        for rows in train_and_eval_rows(TrainArgs(**flags, **own)):
            assert {row["prompt"] for row in rows} <= {"1", "3"}
    with pytest.raises(ValueError, match="^--columns prompt=problem: no column problem; --dataset"):
        train_and_eval_rows(TrainArgs(dataset=str(b), **flags))
    words = "c.jsonl:1 has a column prompt already; --columns prompt=problem _prompt=prompt"
    with pytest.raises(ValueError, match=words):
        train_and_eval_rows(TrainArgs(dataset=str(c), **flags))
    flags["columns"] = ("prompt=problem", "_prompt=prompt")
    rows, _ = train_and_eval_rows(TrainArgs(dataset=str(c), **flags))
    assert {row["prompt"] for row in rows} == {"5"}


def test_each_dataset_with_a_weight_has_its_own_held_out_rows(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 30), numbered(tmp_path / "b.jsonl", 20, start=30)
    train, held_out = train_and_eval_rows(TrainArgs(dataset=(f"{a}:3", f"{b}:1"), eval_size=9))
    for rows, counts in ((train, (26, 16)), (held_out, (4, 4))):
        assert tuple([row["_dataset"] for row in rows].count(name) for name in "ab") == counts
        assert all((row["_dataset"] == "a") == (int(row["text"]) < 30) for row in rows)
    alone, _ = train_and_eval_rows(TrainArgs(dataset=f"{a}:3", eval_size=4))
    assert numbers(alone) == numbers(train)[:26] and "_dataset" not in alone[0]
    flags = dict(dataset=(f"{a}:3", f"{b}:1"), eval_dataset=b, eval_size=9, eval_split="x")
    assert [len(rows) for rows in train_and_eval_rows(TrainArgs(**flags))] == [50, 9]


def test_several_held_out_sets_are_independent(tmp_path):
    """Each has at most `--eval_size` rows, independent of the other sets. A single unnamed set has
    no name."""
    a, b = numbered(tmp_path / "a.jsonl", 30), numbered(tmp_path / "b.jsonl", 3, start=30)
    flags = dict(dataset=numbered(tmp_path / "train.jsonl", 9, start=50), eval_size=4)

    def held_out_of(*names: str) -> list[dict]:
        train, held_out = train_and_eval_rows(TrainArgs(eval_dataset=names, **flags))
        assert len(train) == 9 and not any("_dataset" in row for row in train)
        return held_out

    held_out = held_out_of(a, f"hard={b}", "arithmetic")
    assert [row["_dataset"] for row in held_out] == ["a"] * 4 + ["hard"] * 3 + ["arithmetic"] * 4
    alone = held_out_of(a)
    assert held_out[:4] == [row | dict(_dataset="a") for row in alone]
    assert "_dataset" not in alone[0] and held_out_of(f"x={b}")[0]["_dataset"] == "x"


@pytest.mark.parametrize("folder", ["data", "d[a]ta"])
def test_held_out_split_or_file_is_used_and_capped(folder, tmp_path):
    numbered(tmp_path / folder / "train.jsonl", 5)
    numbered(tmp_path / folder / "test.jsonl", 30, start=100)
    other = numbered(tmp_path / "other.jsonl", 30, start=200)
    for flags, first in ((dict(), 100), (dict(eval_dataset=other), 200)):
        args = TrainArgs(dataset=str(tmp_path / folder), eval_size=7, **flags)
        train, held_out = train_and_eval_rows(args)
        assert numbers(train) == [0, 1, 2, 3, 4]
        assert len({*numbers(held_out)}) == 7 and min(numbers(held_out)) >= first
    train, held_out = train_and_eval_rows(TrainArgs(dataset_split="test"))
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(dataset="a.jsonl", dataset_split="x"), "a.jsonl has no split 'x': see"),
        (dict(dataset_split="validation"), "--dataset arithmetic has no split 'validation'"),
        (dict(dataset="a.jsonl", eval_size=50), "--eval_size 50: no training rows left of 50"),
        (dict(dataset=("a.jsonl:1", "b:2"), eval_size=1), "--eval_size 1: less than one row"),
        (dict(eval_dataset=("a:1",)), "--eval_dataset a:1: only the --dataset of training scripts"),
        (dict(dataset="a.jsonl", eval_dataset="folder"), "has no split 'test': see --eval_s"),
        (dict(eval_dataset="/absent.jsonl"), "--eval_dataset /absent.jsonl: no such file"),
    ],
)  # fmt: skip
def test_invalid_splits_are_refused(flags, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbered(tmp_path / "a.jsonl", 50)
    numbered(tmp_path / "folder" / "validation.jsonl", 5)
    with pytest.raises(ValueError, match=words):
        train_and_eval_rows(TrainArgs(**flags))


def test_empty_held_out_set_is_refused():
    rows = [dict(_dataset=name) for name in "aabb"]
    require_held_out(rows, rows[1:3], "")
    require_held_out([], [], "")
    with pytest.raises(ValueError, match="^no held-out rows of b are left: all too long$"):
        require_held_out(rows, rows[:2], ": all too long")
    with pytest.raises(ValueError, match="^no held-out rows are left$"):
        require_held_out([dict(text="")], [], "")


# ---- columns ----


def columns_of(row: dict, choices, **more) -> tuple[str, ...]:
    return require_columns("--dataset x", [dict(_source="x:1") | row], choices, **more)


PAIR = ("prompt", "completion")


@pytest.mark.parametrize(
    ("row", "choices", "columns"),
    [
        (dict(text="a", messages=[1]), SFT_COLUMNS, ("messages",)),
        (dict(text="a", messages=None), SFT_COLUMNS, ("text",)),
        (dict(prompt="a", completion="a", answer="a"), SFT_COLUMNS, PAIR),
        (dict(conversations=[1]), SFT_COLUMNS, ("conversations",)),
        (dict(messages=[1], label=1.0), KTO_COLUMNS, ("messages", "label")),
        (dict(question="a", answer="a", reasoning="a"), PROMPT_COLUMNS, ("question",)),
        (dict(prompt="a", completion="a", input=" ", context=None, history=[]), SFT_COLUMNS, PAIR),
        (dict(prompt="a", completion="a", _context="a"), SFT_COLUMNS, PAIR),
        # whole conversations and texts
        (dict(instruction="a", input="b", output="c", text="(a): b c"), SFT_COLUMNS, ("text",)),
        (dict(messages=said("a"), input="a", instruction="a"), SFT_COLUMNS, ("messages",)),
        (dict(question="a", chosen=said("a"), rejected=said("a", "c")), PAIR_COLUMNS,
         PAIR_COLUMNS[1]),
    ],
)  # fmt: skip
def test_columns_are_recognised(row, choices, columns):
    assert columns_of(row, choices) == columns


@pytest.mark.parametrize(
    ("row", "choices", "unread"),
    [
        (dict(instruction="a", input="b", output="c"), SFT_COLUMNS, "instruction"),
        (dict(instruction="a", input="b"), PROMPT_COLUMNS, "instruction"),
        (dict(prompt="a", input="b", completion="c"), SFT_COLUMNS, "input"),
        (dict(prompt="a", input="b", answer="c"), PROMPT_COLUMNS, "input"),
        (dict(prompt="a", input="b", chosen="c", rejected="d"), PAIR_COLUMNS, "input"),
        (dict(instruction="a", input="b", chosen="c", rejected="d"), PAIR_COLUMNS,
         "instruction and input"),
        (dict(question="a", chosen="c", rejected="d"), PAIR_COLUMNS, "question"),
        (dict(question="a", context="b", answer="c"), SFT_COLUMNS, "context"),
        (dict(question="a", context="b", answer="c"), PROMPT_COLUMNS, "context"),
        (dict(prompt="a", history=[["b", "c"]], completion="c"), SFT_COLUMNS, "history"),
        (dict(messages=[1], documents=["a"]), SFT_COLUMNS, "documents"),
        (dict(question="a", answer="b", reasoning="c"), SFT_COLUMNS, "reasoning"),
        (dict(messages=[1], label=True, thinking="c"), KTO_COLUMNS, "thinking"),
    ],
)  # fmt: skip
def test_column_that_changes_the_meaning_and_is_not_read_is_refused(row, choices, unread):
    """Whichever row has it. It can be ignored by its name."""
    first = dict.fromkeys(row, "") | {k: v for k, v in row.items() if k not in unread}
    if "chosen" in row and "prompt" not in row:
        first = row
    rows = [first | dict(_source="x:1"), row | dict(_source="x:2")]
    place = r"\(x:1\)" if first is row else r"\(x:2\)"
    with pytest.raises(ValueError, match=rf"^--dataset: nothing reads {unread} {place} beside"):
        require_columns("--dataset", rows, choices)
    names = unread.split(" and ")
    ignored = rename_columns(rows, [f"_{name}={name}" for name in names])
    assert require_columns("--dataset", ignored, choices)


@pytest.mark.parametrize(
    ("row", "mapping", "choices", "unread"),
    [
        (dict(instruction="Translate", input="chat", output="cat"), "prompt=input answer=output",
         PROMPT_COLUMNS, "instruction"),
        (dict(instruction="Translate", input="chat", output="cat"),
         "prompt=input completion=output", SFT_COLUMNS, "instruction"),
        (dict(instruction="Translate", input="chat", output="cat"), "question=input answer=output",
         SFT_COLUMNS, "instruction"),
        (dict(instruction="Translate", question="chat", answer="cat"), "", PROMPT_COLUMNS,
         "instruction"),
        (dict(question="chat", problem="Translate", answer="cat"), "", SFT_COLUMNS, "problem"),
        (dict(question="chat", problem="Translate", answer="cat"), "prompt=problem",
         PROMPT_COLUMNS, "question"),
        (dict(query="a", prompt="b", completion="c", label=True), "", KTO_COLUMNS, "query"),
        (dict(question="a", prompt="b", chosen="c", rejected="d"), "", PAIR_COLUMNS, "question"),
        (dict(conversations=said("a"), chosen="c", rejected="d"), "", PAIR_COLUMNS,
         "conversations"),
        (dict(passage="a", question="b", answer="c"), "", SFT_COLUMNS, "passage"),
        (dict(choices=["3", "4"], question="1+2?", answer="A"), "", PROMPT_COLUMNS, "choices"),
        (dict(instruction="Translate", text="chat"), "", SFT_COLUMNS, "instruction"),
        (dict(messages=said("a", "Paris"), context="Paris"), "", SFT_COLUMNS, "context"),
        (dict(prompt="a", messages=said("b", "c")), "", SFT_COLUMNS, "prompt"),
        (dict(text="a b", prompt="a"), "", SFT_COLUMNS, "prompt"),
        (dict(question="a", answer="b", completion="c"), "", SFT_COLUMNS, "completion"),
    ],
)  # fmt: skip
def test_part_of_a_prompt_is_read_or_refused_whatever_its_name(row, mapping, choices, unread):
    rows = rename_columns([row | dict(_source="x:1")], mapping.split())
    with pytest.raises(ValueError, match=rf"^--dataset: nothing reads {unread} \(x:1\) beside"):
        require_columns("--dataset", rows, choices)
    assert require_columns("--dataset", rows, choices, also_read=[unread])
    ignored = rename_columns(rows, [f"_{unread}={unread}"])
    assert require_columns("--dataset", ignored, choices)


@pytest.mark.parametrize(
    ("row", "choices"),
    [
        (dict(prompt="a  b?", messages=said("a\nb?", "c")), SFT_COLUMNS),
        (dict(prompt="a", chosen="b", rejected="c", messages=said("a", "b")), PAIR_COLUMNS),
        (dict(prompt="a", messages=said("a", "long answer")), PROMPT_COLUMNS),
        (dict(question="Q: 1+1? (A) 2", options=["2"], context=None), PROMPT_COLUMNS),
        (dict(prompt="a", completion="<think>b</think>c", thinking="b"), SFT_COLUMNS),
    ],
)  # fmt: skip
def test_column_whose_text_stands_in_what_is_read_is_not_lost(row, choices):
    assert columns_of(row, choices) == columns_of(row, choices[:2])


MESSAGES, TEXT = dict(messages=said("a", "b")), dict(text="c")
P, C = dict(prompt="Q", chosen="Q a b", rejected="Q a c"), dict(chosen="Q a b", rejected="Q a c")


@pytest.mark.parametrize(
    ("rows", "choices", "columns"),
    [
        ([dict(prompt="a"), dict(prompt="a", completion="b")], SFT_COLUMNS, PAIR),
        ([dict(messages=None), MESSAGES], SFT_COLUMNS, ("messages",)),
        ([dict(messages=None) | TEXT, MESSAGES | TEXT, MESSAGES], SFT_COLUMNS, ("messages",)),
        ([dict(completion=None, prompt="x") | TEXT, dict(prompt="a", completion="b")] * 2,
         SFT_COLUMNS, PAIR),
        ([C | dict(prompt=None), P, P], PAIR_COLUMNS, PAIR_COLUMNS[0]),
        ([C | dict(prompt=None), P], PAIR_COLUMNS, PAIR_COLUMNS[0]),
        ([C | dict(prompt=None)] * 2, PAIR_COLUMNS, PAIR_COLUMNS[1]),
        ([MESSAGES, *[dict(prompt="a", completion="b")] * 2], SFT_COLUMNS, PAIR),
        ([dict(question="a")] * 2 + [dict(prompt="a")], PROMPT_COLUMNS, ("question",)),
    ],
)  # fmt: skip
def test_most_rows_decide_in_any_order(rows, choices, columns):
    """Others are bad rows, which end the run or are skipped."""
    rows = [row | dict(_source=f"x:{i}") for i, row in enumerate(rows)]
    for order in permutations(rows[:3]):
        assert require_columns("--dataset", [*order, *rows[3:]], choices) == columns


@pytest.mark.parametrize(
    ("rows", "choices", "words"),
    [
        ([TEXT, TEXT, TEXT | MESSAGES], SFT_COLUMNS, "nothing reads messages (x:2) beside text"),
        ([TEXT] * 2 + [TEXT | dict(prompt="c", completion="")], SFT_COLUMNS, "nothing reads pro"),
        ([C, C, C | dict(prompt="W")], PAIR_COLUMNS, "nothing reads prompt (x:2) beside chosen"),
        ([C | dict(question="W")], PAIR_COLUMNS, "make it the prompt by --columns prompt=qu"),
    ],
)  # fmt: skip
def test_a_column_that_few_rows_have_is_not_ignored(rows, choices, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        require_columns(
            "--dataset", [row | dict(_source=f"x:{i}") for i, row in enumerate(rows)], choices
        )


def test_columns_that_are_needed_are_named():
    words = r"^--dataset x has the columns foo \(x:1\); needed: messages, or prompt and completion"
    with pytest.raises(ValueError, match=words):
        columns_of(dict(foo=1), SFT_COLUMNS)
    a = dict(prompt="", completion="", _dataset="a", _source="a:1")
    rows = [a, dict(a, text="", _dataset="b", _source="b:1")]  # each dataset needs them
    assert require_columns("--dataset", rows, (("text",), PAIR)) == PAIR
    words = r"has the columns prompt, completion \(a:1, b:1\); needed: text"
    with pytest.raises(ValueError, match=words):
        require_columns("--dataset", rows, (("text",),))


def test_columns_can_be_swapped_and_copied_but_not_overwritten():
    rows = [dict(a=1, b=2, _source="x:1"), dict(a=3, _source="x:2")]
    assert rename_columns(rows, ("a=b", "b=a", "c=a")) == [
        dict(a=2, b=1, c=1, _source="x:1"), dict(b=3, c=3, _source="x:2")
    ]  # fmt: skip
    for pair, words in (
        ("prompt=problem", "no column problem; --dataset x has a, b"),
        ("a=b", "x:1 has a column a already; --columns a=b _a=a ignores that one"),
        ("_source=a", "--dataset x has a column _source already"),
    ):
        with pytest.raises(ValueError, match=f"^--columns {pair}: {words}$"):
            require_old_names("--dataset x", rows, [pair])
            rename_columns(rows, [pair])
    assert rename_columns(rows[:1], ("a=b", "_a=a")) == [dict(a=2, _a=1, _source="x:1")]


NESTED = {
    "reward_model": {"ground_truth": "4", "a.b": {"c": 5}},
    "extra.info": "own",
    "extra": {"info": "inner"},
    "answers": {"text": ["x", "y"]},
    "turns": [{"content": "hi"}],
    "_source": "x:1",
}


@pytest.mark.parametrize(
    ("old", "value"),
    [
        ("reward_model.ground_truth", "4"),
        ("reward_model.a.b.c", 5),
        ("extra.info", "own"),
        ("answers.text.1", "y"),
        ("turns.0.content", "hi"),
        ("reward_model.gold", "reward_model is an object with ground_truth, a.b"),
        ("turns.1.content", "turns is a list"),
        ("extra.info.x", "extra is an object with info"),
        ("nothing.x", "--dataset x has reward_model, extra.info, extra, answers, turns"),
    ],
)
def test_column_inside_another_can_be_named(old, value):
    """A column whose own name has a dot comes first. The outer column stays."""
    pairs = (f"answer={old}",)
    if " " not in str(value):
        require_old_names("--dataset x", [NESTED], pairs)
        (row,) = rename_columns([NESTED], pairs)
        outer = {} if old in NESTED else NESTED
        assert row["answer"] == value and row.items() >= {**outer, "_source": "x:1"}.items()
    else:
        with pytest.raises(ValueError, match=f"^--columns answer={old}: no column {old}; {value}$"):
            require_old_names("--dataset x", [NESTED], pairs)
