"""Pieces of code are found whatever their line breaks."""

import pytest

from course.exercises.fragments import find, replace

BROKEN = """value = function(
    first,
    [second, third[0]],
)
"""


@pytest.mark.parametrize(
    "code",
    [
        "value = function(first, [second, third[0]])",
        "value=function( first , [ second , third[ 0 ] ] )",
        "function(first, [second",
        "third[0]])",
        BROKEN,
    ],
)
def test_spaces_line_breaks_and_trailing_commas_do_not_matter(code):
    assert find(code, BROKEN, "the text").group() in BROKEN
    one_line = "value = function(first, [second, third[0]])"
    assert find(code, one_line, "the text").group() in one_line


@pytest.mark.parametrize("code", ["rst", "val", "unknown", "function(second"])
def test_part_of_a_name_and_other_code_are_refused(code):
    with pytest.raises(ValueError, match="the text has 0 times .*, expected 1"):
        find(code, BROKEN, "the text")


def test_code_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match=r"the text has 2 times 'a', expected 1"):
        find("a", "a + a", "the text")


def test_replaced_code_leaves_the_rest_as_it_is():
    assert replace("first, [second", r"\1", BROKEN, "the text") == BROKEN.replace(
        "first,\n    [second", r"\1"
    )
