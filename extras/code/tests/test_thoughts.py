"""Thoughts are no programs."""

import pytest

from common.rewards.registry import OTHERS
from extras.code.sandbox import program
from tests.rewards.test_thoughts import require_no_answers_in_thoughts

NAMES = [name for name, place in OTHERS.items() if place.startswith("extras.code.")]


@pytest.mark.skipif(program.problem() is not None, reason=str(program.problem()))
@pytest.mark.parametrize("name", NAMES)
def test_thoughts_are_no_answers(name):
    require_no_answers_in_thoughts(name, "```python\nprint(18)\n```", found_anywhere=True)
