"""The `math` reward: whether the final answer equals the gold answer mathematically, by math-verify
on top of sympy.

sympy takes hours, or all memory, for answers that look harmless, so this runs in a
`processes.Pool`. The first call, or `math.prepare()`, imports math-verify."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache, partial

from common.rewards.functions import (
    BOX,
    LETTER,
    check_answer,
    gold_answers,
    last_boxed,
    plain,
    value_of,
    without_latex,
)
from common.rewards.math_forms import is_word, letters_of, normal, time_of, with_numbers

# The rest of a line behind ####, or behind A: if it begins like mathematics and not like prose.
ANNOUNCED = re.compile(
    rf"(?:####|(?<!{LETTER})A:(?=[\s*]*[-+.\d$£€\\(\[]))[\s*]*+([^\n]*)", re.ASCII
)
LONGEST_TEXT = 2000  # last characters of a completion that are searched if it announces no answer
SHAPE = re.compile(r"^(\(|\\\{)[^()]*(?:\)|\\\})$")
BASE = re.compile(r"\d_\{?(\d+)\}?$")
UNIT = re.compile(r"\d[ ~]*(k?m/[hs]|mph|[mckμ]?m|[mk]?g|m?[lL]|s|min|h)(?: *\^\{?(\d))?\}?$")

CENTS = re.compile(r"(?:\bcents?\b|¢)()|\bdollars?\b")


def math(completion: str, row: dict) -> float:
    """Return 1 if the completion's final answer equals that of the `answer` column, or one of a
    list there.

    The final answer is the content of the last box, else the text behind the last `####` or `A:`,
    else the answer that math-verify finds near the end. In the column likewise, but without a mark
    all of it is the answer. 1/2 = 0.5 = 50% and 50% = 50, but 0.333 is not 1/3 (six decimals must
    agree); units, degrees and `x =` do not matter; (1, 2) is ordered, {1, 2} and `1, 2` are not;
    0.\\overline{3} = 1/3; 3:45 p.m. = 15:45; 18 million = 18,000,000.

    An answer that cannot be understood scores 0. If it is the row's own, that raises `ValueError`
    naming the row."""
    golds = [gold_of(answer) for answer in gold_answers(row)]
    for gold in golds:
        if not is_understood(gold):
            problem = f"math-verify does not understand the answer {gold[-80:]!r}"
            raise ValueError(f"{row['_source']}: {problem}")
    completion = plain(completion)
    answer = announced_answer(completion)
    if answer is not None:
        return float(any(equal(gold, answer) for gold in golds))
    parse, verify = library()
    found = parse(with_numbers(completion[-LONGEST_TEXT:]))
    return float(any(verify(parsed(gold), found) for gold in golds if parsed(gold)))


def gold_of(answer: str) -> str:
    announced = announced_answer(plain(answer))
    return plain(answer) if announced is None else announced


def is_understood(answer: str) -> bool:
    is_number = isinstance(value_of(answer), Fraction)
    return is_number or bool(time_of(answer) or is_word(letters_of(answer)) or parsed(answer))


def equal(gold: str, answer: str) -> bool:
    """Return whether two answers are equal. A gold answer such as 12:00 can only be a time. 3:10
    may be a ratio, which equals 6:20."""
    value = value_of(gold)
    if isinstance(value, Fraction) and value == value_of(answer):
        return True
    letters = [letters_of(gold), letters_of(answer)]
    if all(letters) and any(map(is_word, letters)):  # math-verify would read products of letters
        return letters[0] == letters[1]
    gold_time = time_of(gold)
    time = time_of(answer)
    if gold_time and time and gold_time.equals(time):
        return True
    if gold_time and gold_time.is_certain and (time or ":" in gold):
        return False
    # (1, 2) is no set, 25_8 is not 25_9, 5 m is not 5 cm, nor 5 dollars 5 cents; math-verify
    # looks at none of these
    texts = [without_latex(text).strip(" $.") for text in (gold, answer)]
    for form in (SHAPE, BASE, UNIT, CENTS):
        forms = {match.groups() for match in map(form.search, texts) if match}
        if len(forms) == 2:
            return False
    return library()[1](parsed(gold), parsed(answer))


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
    verify = partial(math_verify.verify, allow_set_relation_comp=True, timeout_seconds=None)
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
    if not nearly_equal(a, b, *precision) or not are_numbers:
        return nearly_equal(a, b, *precision)
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


def parsed(answer: str) -> list:
    """Return the sympy objects that an answer without other text may mean; [] if it cannot be
    understood, which is not kept: memory may only be short now."""
    try:
        return _parsed(answer)
    except ValueError:
        return []


@lru_cache(4096)
def _parsed(answer: str) -> list:
    from math_verify import LatexExtractionConfig

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found = library()[0](f"\\boxed{{{normal(answer)}}}", config)
    if not found:
        raise ValueError(answer)
    return found


math.columns = ("answer",)
math.check = check_answer
math.prepare = library
