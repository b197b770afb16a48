"""The math reward: the answer in a completion. Equal answers are in test_equal_answers.py, answers
on which sympy hangs in test_total.py."""

import pytest

from common.rewards.math_reward import math
from tests.workers.pools import opened


def row(answer) -> dict:
    return dict(answer=answer, _source="rows.jsonl:3")


@pytest.mark.parametrize("completion, reward", [
    (r"\fbox{18}", 1), (r"\boxed{7}, \framebox{18}", 1), (r"\boxed{18}, \fbox{1", 0),
    (r"\boxed 18", 1), (r"\boxed{7}, no: \boxed{18}", 1), (r"\boxed{18}, no: \boxed{7}", 0),
    (r"#### 7 \boxed{18}", 1), (r"\boxed{18}, no: \boxed{7", 0), (r"\boxed{1", 0),
    ("#### 7\nno:\n#### 18", 1), ("#### 18\nno:\n#### 7", 0), ("####18", 1), ("#### $18.00", 1),
    ("#### 18 dollars per week", 1), ("####\n18", 1), ("#### 36/2", 1), ("A: 18", 1),
    ("**A:** 18", 1), ("Q: what?\nA: x = 18", 1), ("A: we add 3 and 15, so the answer is 18.", 1),
    ("The answer is 18.", 1), ("The final answer is $x = 18$. I hope it is correct.", 1),
    ("so $9 + 9 = 18$", 1), ("17 and 1 make 18", 1), ("18 and 1 make 19", 0),
    ("text " * 10_000 + "18", 1), ("", 0), ("none", 0), ("####", 0), ("#### none", 0),
    ("\\" * 500, 0), ("$" * 3000, 0), ("{" * 3000, 0), ("\\boxed{" * 500, 0), ("\0\ud800", 0),
])  # fmt: skip
def test_answer_is_extracted_from_the_completion(completion, reward):
    for gold in ("18", r"so \boxed{18}", "9 + 9 = 18\n#### 18", r"$\frac{36}{2}$"):
        assert math(completion, row(gold)) == reward


@pytest.mark.parametrize(
    "gold",
    ["", "##", "####", r"\boxed{1", "??", "A sum of " + "many words and no mark " * 5 + "18"],
)
def test_unparsable_gold_answer_is_an_error(gold):
    for completion in (r"\boxed{18}", "", gold):
        with pytest.raises(ValueError, match="rows.jsonl:3: math-verify does not understand"):
            math(completion, row(gold))


# ---- in a process ----

TARGET = "common.rewards.math_reward:math"


def test_errors_name_the_row_and_nothing_is_printed(capfd):
    with opened(TARGET, 1, shared=True) as pool:
        bad, good = pool.map([("5", row("")), ("5", row("5"))])
    assert "ValueError: rows.jsonl:3" in bad.error and good.value == 1
    assert capfd.readouterr() == ("", "")
