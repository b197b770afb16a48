"""The `math` reward: whether the final answer equals the gold answer mathematically, by math-verify
on top of sympy.

sympy takes hours, or all memory, for answers that look harmless, so this runs in a
`processes.Pool`. The first call, or `math.prepare()`, imports math-verify."""

import re
from collections.abc import Callable
from functools import cache, lru_cache, partial

from common.rewards.functions import BOX, NUMBER, check_answer, gold_answers, last_boxed
from common.rewards.math_forms import time_of, without_repeating_decimals

# The rest of a line behind ####, or behind A: if it begins like mathematics and not like prose.
ANNOUNCED = re.compile(r"(?:####|\bA:(?=[\s*]*[-+.\d$\\(\[]))[\s*]*+([^\n]*)")
# A number with words behind it, such as "18 dollars per week": math-verify would read a product of
# letters.
WITH_WORDS = re.compile(rf"([-+]?\$?{NUMBER}) +[a-z]{{4,}}[a-z ,'-]*", re.IGNORECASE)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# of an answer; more are prose, which math-verify would read as a product of letters too
MOST_WORDS = 12
LONGEST_TEXT = 2000  # last characters of a completion that are searched if it announces no answer


def math(completion: str, row: dict) -> float:
    """Return 1 if the completion's final answer equals that of the `answer` column, or one of a
    list there.

    The final answer is the content of the last box, else the text behind the last `####` or `A:`,
    else the answer that math-verify finds near the end. In the column likewise, but without a mark
    all of it is the answer. 1/2 = 0.5 = 50% and 50% = 50, but 0.333 is not 1/3 (six decimals must
    agree); units, degrees and `x =` do not matter; (1, 2) is ordered, {1, 2} and `1, 2` are not;
    0.\\overline{3} = 1/3; 3:45 p.m. = 15:45.

    An answer that cannot be understood scores 0. If it is the row's own, that raises `ValueError`
    naming the row."""
    golds = [gold_of(answer) for answer in gold_answers(row)]
    for gold in golds:
        if not parse_answer(gold) and time_of(gold) is None:
            problem = f"math-verify does not understand the answer {gold[-80:]!r}"
            raise ValueError(f"{row['_source']}: {problem}")
    answer = announced_answer(completion)
    return float(any(equal(gold, answer, completion) for gold in golds))


def gold_of(answer: str) -> str:
    announced = announced_answer(answer)
    return answer if announced is None else announced


def equal(gold: str, answer: str | None, completion: str) -> bool:
    """Return whether `answer` equals `gold`; without it, whether math-verify finds `gold` in the
    completion.

    A gold answer such as 12:00 can only be a time. 3:10 may be a ratio, which equals 6:20.
    """
    parse, verify = library()
    if answer is None:
        return verify(parse_answer(gold), parse(completion[-LONGEST_TEXT:]))
    gold_time = time_of(gold)
    time = time_of(answer)
    if gold_time and time and gold_time.equals(time):
        return True
    if gold_time and gold_time.is_certain and (time or ":" in gold):
        return False
    return verify(parse_answer(gold), parse_answer(answer))


@cache
def library():
    """Return math-verify's `parse` and `verify` without their time-outs, which are signals that C
    code ignores."""
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time-outs are off
    # math-verify 0.9 compares numbers by their difference alone, which is nearly 0 for all tiny
    # numbers.
    math_verify.grader.sympy_numeric_eq = partial(same_number, math_verify.grader.sympy_numeric_eq)
    parse = partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=None)
    verify = partial(math_verify.verify, timeout_seconds=None)
    verify(parse("\\boxed{1}"), parse("\\boxed{2}"))  # the first use reads large tables
    return parse, verify


def same_number(nearly_equal: Callable, a, b, *precision) -> bool:
    """Return whether two sympy expressions are the same number: `nearly_equal`, and exactly equal
    if both are exact.

    Numbers with decimals may differ by a thousandth at most, so that 1e-20 is not 2e-20. Formulas
    in symbols are left to math-verify's symbolic comparison, which is exact."""
    from math_verify.grader import get_pct_val, safe_sympy_doit
    from sympy import Expr, Float

    are_numbers = isinstance(a, Expr) and isinstance(b, Expr)
    if are_numbers and get_pct_val(a, a) == get_pct_val(b, b):
        return True  # 50% = 50; math-verify has this rule for whole numbers only
    if not nearly_equal(a, b, *precision):
        return False
    if not are_numbers:
        return True  # a matrix, whose elements were compared here
    a = safe_sympy_doit(a)
    b = safe_sympy_doit(b)
    difference = a - b
    has_decimals = a.has(Float) or b.has(Float)
    if difference.free_symbols:
        return has_decimals
    if difference.is_Rational:
        return difference == 0
    digits = 3 if has_decimals else 40
    return bool(abs(difference.evalf(50)) <= abs(b.evalf(50)) * 10**-digits)


def announced_answer(text: str) -> str | None:
    """Return the content of the last box (empty if it is not closed), else the text behind the last
    `####` or `A:`, else None."""
    if BOX.search(text):
        return last_boxed(text) or ""
    announced = ANNOUNCED.findall(text)
    return announced[-1] if announced else None


@lru_cache(4096)
def parse_answer(answer: str) -> list:
    """Return the sympy objects that an answer without other text may mean; [] if it cannot be
    understood."""
    from math_verify import LatexExtractionConfig

    answer = answer.strip().strip("*").rstrip(".").strip()
    number = WITH_WORDS.fullmatch(answer)
    if number:
        answer = number[1]
    if len(WORD.findall(answer)) > MOST_WORDS:
        return []
    answer = without_repeating_decimals(answer)
    # math-verify reads 1 000 as 1 * 0, 3 1/2 as (3 + 1) / 2 and 1e5 as 5 times Euler's number.
    answer = re.sub(r"(?<=\d)(?:\\[ ,;:!]|[ ~])+(?=\d{3}(?!\d))", "", answer)
    answer = re.sub(r"(?<![\d./])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", answer)
    answer = re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"\\times 10^{\1}", answer)
    return library()[0](f"\\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)])


math.columns = ("answer",)
math.check = check_answer
math.prepare = library
