"""The task `squares`: an answer is the number of squares that a flood fill finds in the picture."""

from collections import Counter
from statistics import mean

import pytest
from PIL import Image

from common.data.tasks import squares_rows

TEST = squares_rows("test")


def areas(picture: Image.Image) -> list[int]:
    """Return the sizes, in pixels, of connected regions of one colour other than the ground, which
    is the most frequent colour."""
    width, height = picture.size
    color = {(x, y): picture.getpixel((x, y)) for x in range(width) for y in range(height)}
    ((ground, _),) = Counter(color.values()).most_common(1)
    left = {place for place, shown in color.items() if shown != ground}
    found = []
    while left:
        edge = [left.pop()]
        size = 0
        while edge:
            x, y = edge.pop()
            size += 1
            for near in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if near in left and color[near] == color[x, y]:
                    left.remove(near)
                    edge.append(near)
        found.append(size)
    return found


def test_answers_are_the_numbers_of_squares():
    """Squares of one colour that touch are one region, whose area is that of both."""
    alone = 0
    for row in TEST:
        found = areas(row["images"][0])
        assert sum(found) == sum(square["size"] ** 2 for square in row["squares"])
        assert len(found) <= int(row["answer"])
        if set(found) <= {16, 25, 36, 49} and len(found) == int(row["answer"]):
            alone += 1
    assert alone > 0.8 * len(TEST)
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
