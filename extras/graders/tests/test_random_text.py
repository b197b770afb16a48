"""Random and long texts for the rewards here."""

import pytest
from hypothesis import given

from common.rewards.registry import load_reward
from tests.rewards.test_functions import (
    RANDOM_TEXT,
    WILD,
    require_linear_time,
    require_reward_in_range,
)

NAMES = ("countdown", "ifeval")


def test_function_names_equal_their_flag_values():
    assert all(load_reward(name).__name__ == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@given(text=RANDOM_TEXT)
def test_random_text_gets_a_reward_in_range(name, text):
    require_reward_in_range(name, text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", WILD)
def test_long_random_text_takes_linear_time(name, kind):
    require_linear_time(name, kind)
