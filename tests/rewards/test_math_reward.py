"""The math reward: equal answers, the answer in a completion, and answers on which sympy hangs."""

import json
import random
import subprocess
import sys

import pytest
from helpers import GSM8K, ROOT, needs_gsm8k

from common.rewards.functions import gsm8k
from common.rewards.math_reward import math
from tests.rewards.pools import opened

# gold answer, answer, equal. Excluded cases, because math-verify is wrong about them: it ignores
# number bases (25_8 = 25) and units (5 cm = 5 m), rounds decimals to six places (0.1234567 =
# 0.1234569), reads words without \text as products, in which the order of letters has no effect (no
# = on), rejects "x < 3" for the gold answer (-\infty, 3), although it accepts the reverse, and
# accepts (1, 2), as an interval or point, for the set {1, 2}.
PAIRS = [
    ("5", "5.0", 1), ("5", "5.", 1), ("5", "-5", 0), ("0", "0.0000001", 0),
    ("1000000", "1000001", 0), ("1/2", "0.5", 1), (r"\frac{1}{2}", r"\dfrac12", 1),
    (r"-\frac{1}{2}", r"\frac{-1}{2}", 1), ("1/3", "2/6", 1), (r"\frac{1}{3}", "0.333", 0),
    ("0.333", r"\frac{1}{3}", 0), (r"\frac{1}{3}", "0.33333333", 1), (r"3\frac{1}{2}", "3.5", 1),
    (r"\frac{7}{2}", "3 1/2", 1), (r"3\frac{1}{2}", r"\frac{3}{2}", 0), ("2", "3 1/2", 0),
    (r"50\%", "0.5", 1), ("50", "50%", 1), ("0.5", "50", 0), (r"5\%", "0.5", 0),
    ("0.12", r"12\%", 1), ("1,000", "1000", 1), ("1000", r"1{,}000", 1), ("1000", r"1\,000", 1),
    ("0", "1 000", 0), ("1234567", "1 234 567", 1), (r"\$5", "5.00", 1), ("1000", r"\$1,000", 1),
    ("18", "18 dollars", 1), (r"5 \text{ cm}", "5", 1), ("5 cm", "6 cm", 0), ("90", r"90^\circ", 1),
    ("x = 5", "5", 1), ("5", "x=5", 1), ("x=5", "y=5", 0), ("$7$", r"\(7\)", 1),
    ("10^6", "1000000", 1), ("1500", r"1.5 \times 10^3", 1), ("100000", "1e5", 1),
    ("1:2", "2:1", 0), (r"\sqrt{8}", r"2\sqrt{2}", 1),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", 1), (r"\sqrt{2}", "1.414", 0),
    (r"2\pi", r"\pi \cdot 2", 1), (r"\pi", "3.14", 0), (r"\log_2 8", "3", 1),
    (r"\binom{5}{2}", "10", 1), ("x^2-1", "(x-1)(x+1)", 1), ("x^2-1", "(x-1)^2", 0),
    (r"\sin^2 x + \cos^2 x", "1", 1), ("y = 2x+3", "3+2x", 1), ("2+3i", "3i+2", 1),
    ("2+3i", "2-3i", 0), ("(1, 2)", "(1,2)", 1), ("(1,2,3)", "(3,2,1)", 0), ("(1,2)", "(2,1)", 0),
    (r"\left(3, \frac{\pi}{2}\right)", r"(3,\pi/2)", 1), ("[1,2)", "[1, 2)", 1),
    ("(1,2]", "[1,2)", 0), ("(1,2)", "[1,2]", 0), ("x<3", r"(-\infty, 3)", 1),
    ("x < 3", "3 > x", 1), ("x<3", r"x \le 3", 0), (r"x \in [-2,7]", "[-2,7]", 1),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)", 1), (r"\{1,2\}", "2, 1", 1),
    ("7,8", "7", 0), (r"\pm 3", "3, -3", 1), (r"\pm 3", "3", 0), (r"7 \text{ or } 8", "8,7", 1),
    (r"\emptyset", r"\{\}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}", 0),
    (r"\text{Evelyn}", "Evelyn", 1), (r"\text{even}", r"\text{odd}", 0), ("C", r"\text{(C)}", 1),
    ("C", "D", 0), (r"\infty", r"-\infty", 0), ("5", "1/0", 0), ("5", "", 0), ("5", r"\frac{", 0),
    ("5", "}", 0), (5, "5", 1), (1e-5, "0.00001", 1),
    # exact numbers are compared exactly, decimals by their size too
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0), (r"\frac{1}{2004!}", r"\frac{2005}{2005!}", 1),
    ("2004!", "2006!", 0), ("2^{-1000}", "2^{-1001}", 0), ("e^{-100}", "e^{-101}", 0),
    ("e^{-100}", r"\frac{1}{e^{100}}", 1), (r"\sqrt{2}+10^{-20}", r"\sqrt{2}", 0),
    (r"\left(2^{-100}, 1\right)", r"\left(2^{-101}, 1\right)", 0),
    (r"\{2^{-100}\}", r"\{2^{-101}\}", 0), ("x = 2^{-100}", "2^{-101}", 0),
    ("x + 2^{-100}", "x + 2^{-101}", 0), (r"(1+\sqrt{2})^2", r"3+2\sqrt{2}", 1),
    ("0.0000001", "0.0000002", 0), ("0.0000001", "10^{-7}", 1),
    (r"1.5 \times 10^{-20}", r"2.5 \times 10^{-20}", 0),
    (r"1.5 \times 10^{-20}", r"15 \times 10^{-21}", 1), (r"\frac{100}{3}\%", r"\frac{1}{3}", 1),
    (r"\frac{1}{8}", r"12.5\%", 1), ("33.33", r"33.33\%", 1), (r"7.2\%", "7.2", 1),
    (r"7.2\%", "7.3", 0), (1e23, "10^{23}", 1),
    # repeating decimals
    (r"0.\overline{3}", r"\frac{1}{3}", 1), (r"0.\overline{3}", "0.3", 0),
    ("1/6", "0.1(6)", 1), ("1/3", r"0.\dot{3}", 1), ("1/3", r"x = 0.\overline{3}", 1),
    (r"0.1\overline{6}", "1/6", 1), (r"-2.1\overline{36}", r"-\frac{47}{22}", 1),
    ("1/3", r"0.\bar3", 1), (r"0.\overline{3}", r"0.\overline{33}", 1),
    (r"0.\overline{3}", r"0.3\overline{0}", 0), ("1/3", "0.333...", 0),
    # times are words; 3:10 may be a ratio
    ("12:00", "12:00", 1), ("12:00", "13:00", 0), ("12:05", "2.4", 0), ("12:00", "12", 0),
    (r"3:45 \text{ p.m.}", "3:45 PM", 1), ("3:45 a.m.", "3:45 p.m.", 0), ("15:45", "3:45", 0),
    ("3:10", "6:20", 1),
    (["7", r"\frac{1}{2}"], "0.5", 1), (["7", "8"], "9", 0),
]  # fmt: skip


def row(answer) -> dict:
    return dict(answer=answer, _source="rows.jsonl:3")


@pytest.mark.parametrize("gold, answer, equal", PAIRS)
def test_equal_answers_are_recognised(gold, answer, equal):
    assert math(f"so it is $\\boxed{{{answer}}}$.", row(gold)) == equal
    assert math(f"so it is\n#### {answer}\n", row(gold)) == equal
    if answer != "}" and not isinstance(gold, list):  # "}" closes the box
        assert math(f"\\boxed{{{answer}}}", row(f"thus \\boxed{{{gold}}}")) == equal


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
        "import sys, common.rewards.math_reward, common.rewards.processes; "
        f"print({modules} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n" and math.columns == ("answer",)
