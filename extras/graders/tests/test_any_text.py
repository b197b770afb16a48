"""What all graders do with any text: a reward between 0 and 1, in linear time, without thoughts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.rewards.registry import OTHERS, load_reward
from extras.graders.ifeval import INSTRUCTIONS, arguments_of
from extras.graders.tests.test_choice import CITIES, STATED
from extras.graders.tests.test_ifeval import CASES
from tests.rewards.scored import RIGHT, require_no_answers_in_thoughts

NAMES = [name for name, place in OTHERS.items() if place.startswith("extras.graders.")]
EXAMPLES = {name: value for _, kwargs, _, _ in CASES for name, value in kwargs.items()}
ROWS = dict(
    countdown=dict(nums=[3, 5, 7, 9], target=24),
    choice=dict(options=CITIES, answer="B"),
    stated=dict(answer="(A)"),
    ifeval=dict(
        instruction_id_list=list(INSTRUCTIONS),
        kwargs=[{name: EXAMPLES[name] for name in arguments_of(i)} for i in INSTRUCTIONS],
    ),
)
PIECES = [
    *"*[]\"',.!?()_-#>{}:|1+AB", "**", "***", "******", "<<", ">>", "P.", "S.", "Section", " 1",
    "\n", "\n\n", "- ", " ", "\t", "a", " is", "or", "river", "```", "json", "answer",
    "\\boxed{", "<think>", "</think>", "<answer>", "</answer>", "#### ", "答案是", "选", "¹ ",
    "\x00", "文", "😀", "İ", "ß", "\u2028",
]  # fmt: skip
LONG = [
    "word ", "Section 1 ", "*a ", "<<a ", "A-", "A b. ", "option A ", "answer is A, ", "fully ",
    "answer x x x x x x ", "A. London\n", "(A) ", "A是", "_ ", "the ", "1+", "1,", "a b ",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text() | st.lists(st.sampled_from([*PIECES, *STATED]), max_size=40).map("".join))
def test_any_text_gets_a_reward_in_range(name, text):
    value = load_reward(name)(text, ROWS[name] | dict(_source="a:1"))
    assert isinstance(value, float) and 0 <= value <= 1


@pytest.mark.parametrize("name", NAMES)
def test_long_text_takes_linear_time(name):
    """In quadratic time this would take minutes."""
    size = 30_000
    texts = [piece * (size // len(piece)) for piece in [*PIECES, *LONG]]
    texts += ["\n" * (size // 2) + " " * (size // 2) + "* a", "[" * (size // 2) + "]" * (size // 2)]
    for text in [*texts, "a" + '"' * size + " " + "*" * size]:
        load_reward(name)(text, ROWS[name] | dict(_source="a:1"))


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_are_no_answers(name):
    texts = dict(countdown="9+9", choice=RIGHT, stated=RIGHT, ifeval="no such mark")
    require_no_answers_in_thoughts(name, texts[name], found_anywhere=name != "countdown")
