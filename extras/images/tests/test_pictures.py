"""The task `squares`: an answer is the number of squares in the picture."""

from statistics import mean

import pytest

from common.data.tasks import squares_rows
from extras.images.pictures import COLORS

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
