"""The built-in rewards, and their robustness on random text."""

import math
import random
import time
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.evaluate.estimators import final_answer
from common.rewards.answers import to_number
from common.rewards.functions import (
    REWARDS,
    boxed,
    exact_match,
    format,
    gsm8k,
    gsm8k_flexible,
    tag_format,
)
from common.rewards.math_reward import math as math_reward
from common.rewards.math_reward import normal, with_numbers
from common.rewards.registry import load_reward

# ---- equal answers ----


# tests/rewards/test_equal_answers.py has the spellings of numbers
@pytest.mark.parametrize("completion, answer, reward", [
    ("so 6 * 3 = 18\n#### 18", "9 + 9 = 18\n#### 18", 1), ("####18", "18", 1),
    ("#### 18 apples", "18", 1), ("#### 0.5", ".50", 1), ("#### $1,234.50", "1234.5", 1),
    (r"#### $\$18$", "18", 1),
    ("#### 70,000", "... 7 <<7*1=7>>7\n#### 70000", 1), ("#### 50%", "50", 1),
    ("Q: what?\nA: 18", "A: 18", 1), ("**A:** **18**", "18", 1), ("#### 18, I think", "18", 1),
    ("#### \\$18, #### $18", "18", 1), ("#### 18 (apples)", "18", 1), ("#### 18\n20", "18", 1),
    ("#### 7\nno:\n#### 18", "18", 1), ("#### 18\nno:\n#### 7", "18", 0),
    ("#### 18\n#### Check", "18", 1), ("18", "18", 0), ("the answer is 18", "#### 18", 0),
    ("DNA: 18", "18", 0), ("####", "18", 0), ("", "18", 0), ("#### none", "none", 0),
    ("#### 18", "eighteen", 0),
    # more than one number is no answer, and replaces an earlier one
    ("#### 18\n#### 18 or 20", "18", 0), ("#### 18 or 20", "20", 0), ("#### 18 & 20", "18", 0),
    ("#### **18** or **20**", "18", 0), ("#### 18 apples or 20", "18", 0),
    ("#### 18% or 20%", "18", 0), ("#### 18 (or maybe 20)", "18", 0), ("#### 18, 20", "18", 0),
    ("#### 18-20", "18", 0), ("#### 18 * 2", "18", 0), ("#### 36/2", "18", 0),
    ("#### 9 + 9 = 18", "9", 0), ("#### 1 000", "1", 0), ("#### 1e3", "1", 0),
    ("#### 1.5.2", "1.5", 0), ("#### 18 in 7 days", "18", 0),
])  # fmt: skip
def test_gsm8k_scores_the_final_answer(completion, answer, reward):
    assert gsm8k(completion, dict(answer=answer)) == reward


@pytest.mark.parametrize("completion, answer, reward", [
    ("The answer is 18.", "9 + 9 = 18\n#### 18", 1), ("so she makes **$18** a day", "18", 1),
    ("it costs \\$1,234.50.", "1234.5", 1), ("it takes 18km, 18 minutes", "18", 1),
    ("10 - 15 = -5.", "-5", 1), ("it is −5 degrees, or $-5", "-5", 1), ("we lose -$5", "-5", 1),
    ("from 10-5", "5", 1), ("from 10-5", "-5", 0), ("in 1,2,3", "3", 1), ("18 of H2O", "18", 1),
    ("18, or 1/2", "18", 1), ("9 and then 18", "9", 0), ("180", "18", 0), ("eighteen", "18", 0),
    ("", "18", 0), ("18", "eighteen", 0), (r"it turns by $18^\circ$", "18", 1),
    # a box takes precedence, then an announced answer, then the last number
    (r"\boxed{18} and then #### 9, in 7 days", "18", 1), (r"\boxed{7}, no: \boxed{18}", "18", 1),
    (r"\boxed{x_1 = \$18\text{ in }7\text{ days}} or 9", "18", 1),
    (r"\boxed{1{,}234} \boxed{1,\!234}", "1234", 1),
    (r"\boxed{\frac{18}{2}}, that is 18", "18", 0), (r"\boxed{1/2}", "2", 0),
    (r"\boxed{none} or 18", "18", 0), ("#### 18\nwhich took 7 steps", "18", 1),
    ("#### 9\n18", "18", 0),
])  # fmt: skip
def test_gsm8k_flexible_scores_the_extracted_answer(completion, answer, reward):
    assert gsm8k_flexible(completion, dict(answer=answer)) == reward


LABELLED = [  # the working, without its last sentence: the answer is 8
    "Plan A: 12 dollars\nPlan B: 20 dollars\n", "Group A: 5\nGroup B: 3\n", "A: 12 km\nB: 20 km\n",
    "Vertices: A: (0,0), B: (4,0). ", "For plan A: 12 dollars, for plan B: 20. ", "|A: 5|B: 3|\n",
    "Train A: 12 miles\nTrain B travels 20 miles\n", "**Plan A:** 12\n**Plan B:** 20\n",
    "Options: A: 12 km B: 20 km. ", "Team-A: 12, team-B: 20. ", "方案A：12元\n方案B：20元\n",
    "- A: 5\n- C: 3\n\n", "Person A: 12 years. The other is 20. ", "Let A: 5 and B: 3. ",
]  # fmt: skip


@pytest.mark.parametrize("working", LABELLED)
def test_label_in_the_working_announces_no_answer(working):
    text = f"{working}The total is 8."
    for reward in (gsm8k_flexible, math_reward):
        assert [reward(text, dict(answer=gold, _source="a:1")) for gold in ("8", "12")] == [1, 0]
    assert gsm8k(f"{working}#### 8", dict(answer="8")) == 1
    assert gsm8k(f"{working}A: 8", dict(answer="8")) == 1
    assert gsm8k(text, dict(answer="12")) == gsm8k(text, dict(answer="5")) == 0
    assert final_answer(f"{working}The answer is 8.") == "8"
    assert final_answer(f"{working}The answer is B.") == "B"


@pytest.mark.parametrize("announced", [
    "A: 18", "**A:** 18", "- A: 18", "So A: 18", "Final A: 18", "The total A: 18",
    "Q: how many? A: 18", "Q: 9 apples and 9 pears A: 18", "so she has left A: 18",
    "9 km + 9 km = 18 km A: 18", "答案A：18", "Solution:\nA: 18", "A: 18\nB: right?",
    "A: 18\nPlan B: 3 is worse", "A: 18\nIn case B it is 7",
])  # fmt: skip
def test_heading_announces_the_answer(announced):
    assert gsm8k(announced, dict(answer="18")) == 1


def test_to_number_is_exact():
    assert to_number("0.1") + to_number("0.2") == to_number("0.3")
    assert to_number("-1,234.50") == to_number("-1234.5")
    for text in ("", "x", "1 2", "1.2.3", "--1", "1e3", "nan", "inf"):
        assert to_number(text) is None


@pytest.mark.parametrize("completion, answer, reward", [
    (r"\boxed{18}.", r"thus \boxed{18}", 1), (r"\boxed{ x + 1 }", "x+1", 1),
    (r"\boxed{7} no, \boxed{18}", "18", 1), (r"\boxed{18} no, \boxed{7}", "18", 0),
    (r"\boxed{18} and then \boxed{1", "18", 0), (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0),
    (r"\boxed{\frac{1}{2} + {3}} c}", r"\frac{1}{2} + {3}", 1), (r"\boxed{18}", "x", 0),
    (r"\boxed{}", "18", 0), (r"\boxed{}", "%", 0), ("18", "18", 0),
    (r"\boxed{7}, \fbox{18}", "18", 1),
    (r"\framebox[2cm][c]{18}", r"\fbox{18}", 1), (r"\boxed {18}", "18", 1),
    (r"\boxed 18.", "18", 1), (r"\boxed{18}, in \boxed notation", "18", 1),
])  # fmt: skip
def test_boxed_scores_the_last_box(completion, answer, reward):
    assert boxed(completion, dict(answer=answer)) == reward


@pytest.mark.parametrize("completion, reward", [
    ("#### 5", 1), ("so\n#### 5\n", 1), ("A: $5", 1), ("so\nA: -1,000.5", 1), ("so #### 5", 0),
    ("#### 5 x", 0), ("#### x", 0), ("5", 0), ("", 0), ("#### 5\nA\n", 0),
])  # fmt: skip
def test_format_scores_the_tags(completion, reward):
    assert format(completion, {}) == reward


def test_exact_match_compares_the_stripped_text():
    assert exact_match(" 18\n", dict(answer="18")) == 1 and exact_match("18", dict(answer=18)) == 1
    assert exact_match("18.0", dict(answer="18")) == 0 and exact_match("", dict(answer="18")) == 0


# ---- types of the column `answer` ----

READ_ANSWER = dict(exact_match="{}", gsm8k="#### {}", gsm8k_flexible="{}", boxed=r"\boxed{{{}}}")


@pytest.mark.parametrize("name", READ_ANSWER)
@pytest.mark.parametrize(("value", "right", "wrong"), [
    ("18", ["18"], ["8"]), (18, ["18"], ["8"]), (18.0, ["18"], ["8"]), (0.5, ["0.5"], ["5"]),
    (1e-5, ["0.00001"], ["1"]), (1e22, [f"1{'0' * 22}"], ["1"]), (-0.0, ["0"], ["1"]),
    (["18"], ["18"], ["8"]), (["18", 20, 0.5], ["18", "20", "0.5"], ["8"]),
    (1e23, [f"1{'0' * 23}"], ["1"]),
])  # fmt: skip
def test_answer_column_may_be_text_a_number_or_a_list_of_alternatives(name, value, right, wrong):
    reward, row = REWARDS[name], dict(answer=value, _source="rows:1")
    reward.check(row)
    assert [reward(READ_ANSWER[name].format(text), row) for text in right] == [1] * len(right)
    assert all(reward(READ_ANSWER[name].format(text), row) < 1 for text in wrong)


def test_whole_number_may_be_larger_than_any_float():
    row = dict(answer=10**400, _source="rows:1")
    exact_match.check(row)
    assert exact_match(f"1{'0' * 400}", row) == 1


@pytest.mark.parametrize("name", [*READ_ANSWER, "math"])
@pytest.mark.parametrize(
    "value", [True, [], [None], [["18"]], {"a": 1}, math.nan, [18, math.inf], [False]]
)
def test_answers_of_other_types_are_refused(name, value):
    with pytest.raises(
        ValueError, match="rows:1: column answer: expected text, a number, or a list of them, got "
    ):
        load_reward(name).check(dict(answer=value, _source="rows:1"))


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_flexible"])
@pytest.mark.parametrize("value", ["eighteen", "", "1/2", "#### 18 or 20", ["18", "x"]])
def test_answers_without_a_number_are_refused_where_numbers_are_compared(name, value):
    with pytest.raises(ValueError, match="rows:1: column answer: expected a number, or text with"):
        REWARDS[name].check(dict(answer=value, _source="rows:1"))
    REWARDS[name].check(dict(answer="so\n#### 1,800", _source="rows:1"))


# ---- the form of a completion ----


@pytest.mark.parametrize("completion, reward", [
    ("<think>why</think> <answer>4</answer>", 1),
    ("\n<think>\nwhy\n\nso\n</think>\n\n<answer>\n4\n</answer>\n", 1),
    ("<think></think><answer>4</answer>", 1), ("<think>a < b</think><answer><b>4</b></answer>", 1),
    ("<think>why</think> <answer> \n</answer>", 0),
    ("<think>why</think> so <answer>4</answer>", 0),
    ("so <think>why</think> <answer>4</answer>", 0),
    ("<think>why</think> <answer>4</answer> so", 0),
    ("<answer>4</answer> <think>why</think>", 0), ("<think>why <answer>4</answer></think>", 0),
    ("<think><think>why</think> <answer>4</answer>", 0),
    ("<think>why</think> <answer>4</answer> <answer>5</answer>", 0),
    ("<think>why</think> <answer>4", 0), ("<answer>4</answer>", 0), ("", 0),
    ("<THINK>why</THINK> <answer>4</answer>", 0),
])  # fmt: skip
def test_tag_format_scores_each_tag(completion, reward):
    assert tag_format(completion, {}) == reward


# ---- any text ----

FULL_ROW = dict(
    answer="#### 18",
    nums=[3, 5],
    target=8,
    instruction_id_list=["punctuation:no_comma", "keywords:existence"],
    kwargs=[{}, dict(keywords=["x"])],
    _source="rows.jsonl:1",
)
PIECES = "<think> </think> <answer> </answer> #### A: \\boxed{ { } 1 1, / . * $ - ( ) 3+5".split()
PIECES += ["=8", "×", "x", "٣", "😀", " ", "\n", "\x00", "\ufeff", "\u2028"]
RANDOM_TEXT = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))


@pytest.mark.parametrize("name", REWARDS)
@given(text=RANDOM_TEXT)
def test_random_text_gets_a_reward_in_range(name, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = load_reward(name)(text, FULL_ROW)
    assert isinstance(value, float) and 0 <= value <= 1


SIZE = 30_000
LONG = [
    *PIECES, "a", "\t", "\\", "\\boxed ", "\\frac", "\\frac{1}", "\\text{", "\\text", "$", "#### 1",
    "1,111,", "1.", "1/", "1 ", "9/", "1+", "e9", "1e5", "–", "^{", "* ", "_ ", "hundred ",
    "1 hundred ", "百", "1百", "x10^", "1 x 10 ^", "选", "答案", "，", "１", "½", "²", "\u2009",
    "1\u2009111", "1:", "0.1(", "0.\\dot", "\\overline{", "√", "\nA: 1", "a b ",
    "Plan A: 1 ", "A: 1 B: 1 ", "\nCar A: 1\nCar B: ", "\u0301\u0316", "é",
]  # fmt: skip
LONG = {piece: piece * (SIZE // len(piece)) for piece in LONG}
for start, fill, end in [
    ("####", " ", "x"), ("#### 1", ",", ""), ("#### 1", " ", "/ 2"), ("1", "0", "x^2"),
    ("-", " ", "x"), ("\\boxed", " ", "x"), ("\\text", "a", "{"), ("#### 1", " hundred", "x"),
    ("A:", " *", "x"), ("1/1", " ", "x"), ("1.", "0", "/3"), ("", "_ ", "x"), ("1", " ", "/2"),
    ("Plan", " ", "A: 1"), ("B", "*", ":"),
    ("<answer>", "(", "</answer>"), ("<think></think>", " ", "<answer>1</answer>x"),
    ("<think></think><answer>", " ", "</answer>"),
]:  # fmt: skip
    LONG[f"{start}, many {fill!r}, {end}"] = start + fill * (SIZE // len(fill)) + end
LONG["random"] = "".join(random.Random(0).choices(PIECES, k=SIZE // 3))
READERS = {name: load_reward(name) for name in REWARDS}
READERS["in a box"] = lambda text, row: boxed(f"\\boxed{{{text}}}", row)
READERS["a vote"] = lambda text, row: final_answer(text)
READERS["math"] = lambda text, row: (normal(text), with_numbers(text))


@pytest.mark.parametrize("name", READERS)
def test_long_texts_take_linear_time(name):
    for kind, text in LONG.items():
        started = time.process_time()
        READERS[name](text, FULL_ROW)
        assert time.process_time() - started < 5, kind  # 0.1 s; quadratic: 10 s
