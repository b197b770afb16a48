"""The data of lesson 12 and the numbers of its page."""

import random
import re
import runpy

import pytest
from helpers import ROOT

LESSON = runpy.run_path(str(ROOT / "course/lessons/12_images.py"))
PAGE = " ".join((ROOT / "course/lessons/12_images.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "pictures").mkdir()
    return folder, LESSON["rows_with_files"]("test", folder)


def test_page_has_lines_of_the_tower():
    page = (ROOT / "course/lessons/12_images.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    source = (ROOT / "extras/images/tower.py").read_text(encoding="utf-8")
    assert [line for line in code.splitlines() if f" {line}\n" not in source] == []


def test_shuffled_pictures_are_all_there_and_only_they_move(data):
    _, rows = data
    moved = LESSON["swapped"](rows, random.Random(0))
    assert sorted(row["images"] for row in moved) == sorted(row["images"] for row in rows)
    assert sum(a["images"] != b["images"] for a, b in zip(rows, moved, strict=True)) > 190
    assert [row | dict(images=0) for row in moved] == [row | dict(images=0) for row in rows]


def test_page_has_the_entropies_of_the_training_rows(capsys):
    LESSON["print_entropies"](LESSON["squares_rows"]("train"))
    blind, sees = re.findall(r"(\S+) nats per answer, (\S+) per token", capsys.readouterr().out)
    assert f"{blind[0]} nats per answer" in PAGE and f"loss is {blind[1]} per token" in PAGE
    assert f"With the picture it is {sees[1]}" in PAGE


def test_page_has_the_ids_and_the_shapes_of_the_first_picture(data, capsys):
    folder, rows = data
    LESSON["write"](folder / "test.jsonl", rows)
    LESSON["show"](folder, "tiny-images")
    ids, *shapes = capsys.readouterr().out.splitlines()[:5]
    around, image, *placeholders = ids.split()[:18]
    assert len(set(placeholders)) == 1 and len(placeholders) == 16
    shown = f"{around} {image} {placeholders[0]} x 16 {' '.join(ids.split()[18:22])} ..."
    assert shown in PAGE
    assert [line.split(maxsplit=1)[1] for line in shapes] == [
        "[1, 3, 32, 32]",
        "[1, 64, 64]",
        "[16, 128]",
        "[36, 128]",
    ]
    assert all(shape in PAGE for shape in ("[64, 64]", "[16, 128]", "[36, 128]"))
