"""bench/planted.py plants each bug in one place of the present code."""

import pytest
from helpers import ROOT

from bench.planted import BUGS, plant


def test_there_are_twelve_bugs_with_names_of_their_own():
    assert len({bug.name for bug in BUGS}) == len(BUGS) == 12


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_copy_differs_in_one_place(bug, tmp_path):
    copy = plant(bug, tmp_path)
    text = (copy / bug.file).read_text()
    assert text != (ROOT / bug.file).read_text()
    compile(text, bug.file, "exec")
