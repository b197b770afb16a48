"""Thoughts are no answers."""

import pytest

from common.rewards.registry import OTHERS
from tests.rewards.test_thoughts import RIGHT, require_no_answers_in_thoughts

TEXTS = dict(countdown="9+9", choice=RIGHT, stated=RIGHT, ifeval="no such mark")
NAMES = [name for name, place in OTHERS.items() if place.startswith("extras.graders.")]


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_are_no_answers(name):
    require_no_answers_in_thoughts(name, TEXTS[name], found_anywhere=name != "countdown")
