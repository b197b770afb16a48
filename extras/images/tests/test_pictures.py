"""The task `squares`, whose answer is the number of squares in a picture, and its built-in model,
which has a token for each cell."""

from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from common.model.tiny import TINY_IMAGES
from extras.images.pictures import COLORS, squares_rows
from extras.images.reader import reader
from tools import make_tiny

TEST = squares_rows("test")


def test_answers_are_the_numbers_of_squares():
    """The squares of a row do not overlap, and nothing else is in its picture."""
    for row in TEST:
        (picture,) = row["images"]
        assert int(row["answer"]) == len(row["squares"])
        for square in row["squares"]:
            x, y, size = (square[name] for name in ("x", "y", "size"))
            whole = (size * size, COLORS[square["color"]])
            assert picture.crop((x, y, x + size, y + size)).getcolors() == [whole]
        ground, _ = max(picture.getcolors())
        assert ground == 32 * 32 - sum(square["size"] ** 2 for square in row["squares"])
    assert {row["answer"] for row in TEST} == set("123456789")


def test_rows_are_the_same_at_every_start_and_training_has_no_held_out_picture():
    def plain(rows: list[dict]) -> list[dict]:
        return [row | dict(images=row["images"][0].tobytes()) for row in rows]

    assert plain(squares_rows("test")) == plain(TEST)
    train = squares_rows("train")
    assert not {r["images"] for r in plain(train)} & {r["images"] for r in plain(TEST)}
    right = mean(row["completion"] == row["answer"] for row in train)
    assert right == pytest.approx(1 - 0.3 * 7 / 9, abs=0.03)
    for row in train:
        assert row["completion"] in (row["answer"], str(int(row["answer"]) - 1))
        assert row["chosen"] == row["answer"] != row["rejected"]


def test_tool_makes_the_model(tmp_path):
    with torch.random.fork_rng():
        make_tiny.write("tiny-images", tmp_path)
    files = {file.name for file in Path(TINY_IMAGES).iterdir()}
    assert files == {file.name for file in tmp_path.iterdir()}
    stored, made = (load_file(Path(x, "model.safetensors")) for x in (TINY_IMAGES, tmp_path))
    assert made.keys() == stored.keys()
    assert all(torch.allclose(made[name], x, atol=1e-6) for name, x in stored.items())


def test_a_cell_is_a_token():
    model = AutoModelForImageTextToText.from_pretrained(TINY_IMAGES)
    assert 1e6 < model.num_parameters() < 1.5e6
    found = reader(TINY_IMAGES, None)
    picture = TEST[0]["images"][0]
    shown = found.process(picture)["pixel_values"][0]
    colors = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(32, 32, 3)
    # neither scaled nor cut
    assert torch.equal(((shown + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0), colors)
    assert found.layout(*picture.size).placeholders == 16
    assert found.text(found.layout(*picture.size), "<image>").count("<image>") == 16
