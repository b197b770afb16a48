"""The math reward: the answer in a completion, and answers on which sympy hangs. Equal answers are
in test_equal_answers.py."""

import json
import random
import subprocess
import sys

import pytest
from helpers import GSM8K, ROOT, needs_gsm8k

from common.rewards.functions import gsm8k
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


@needs_gsm8k
def test_math_reward_agrees_with_gsm8k_on_the_dataset():
    """Every tenth gold answer (all of them agree) is a completion for its row and for another
    row."""
    answers = [
        json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").split("\n") if line
    ][::10]
    right = 0
    for i, answer in enumerate(answers):
        assert math(answer, row(answer)) == gsm8k(answer, row(answer)) == 1, answer
        right += (reward := math(answer, row(answers[i - 1])))
        assert reward == gsm8k(answer, row(answers[i - 1])), (answer, answers[i - 1])
    assert len(answers) > 740 and right < 30


# ---- in processes, with a deadline ----

TARGET = "common.rewards.math_reward:math"
HANGING = [r"9^{9^{9^{9}}}", r"(10^8)!", r"\sum_{i=1}^{10^9} \frac{1}{i^2+1}"]


@pytest.mark.slow
def test_only_answers_that_hang_in_sympy_get_no_reward():
    """math-verify's time-outs are signals, which two of the three answers ignore."""
    rng, calls, rewards = random.Random(0), [], []
    for _ in range(60):
        a, b, equal = rng.randint(-999, 999), rng.randint(1, 99), rng.random() < 0.5
        written = rng.choice(
            [rf"\frac{{{3 * a}}}{{{3 * b}}}", f"{a}/{b}", rf"x = \frac{{{a}}}{{{b}}}"]
        )
        calls.append(
            (f"I say \\boxed{{{written if equal else a + b + 1000}}}", row(rf"\frac{{{a}}}{{{b}}}"))
        )
        rewards.append(float(equal))
    hanging = {20: HANGING[0], 58: HANGING[1], 59: HANGING[2]}
    for i, answer in hanging.items():
        calls[i] = (f"so \\boxed{{{answer}}}", row("18"))
    with opened(TARGET, 2, shared=True) as pool:
        results = pool.map(calls, [2.0 if i in hanging else None for i in range(len(calls))])
    assert [i for i, r in enumerate(results) if r.timed_out] == sorted(hanging)
    assert [r.value for r in results] == [
        None if i in hanging else reward for i, reward in enumerate(rewards)
    ]


def test_errors_name_the_row_and_nothing_is_printed(capfd):
    with opened(TARGET, 1, shared=True) as pool:
        bad, good = pool.map([("5", row("")), ("5", row("5"))])
    assert "ValueError: rows.jsonl:3" in bad.error and good.value == 1
    assert capfd.readouterr() == ("", "")


def test_only_worker_processes_import_the_library():
    modules = "{'torch', 'sympy', 'math_verify'}"
    code = (
        "import sys, common.rewards.math_reward, common.workers.pool; "
        f"print({modules} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n" and math.columns == ("answer",)
