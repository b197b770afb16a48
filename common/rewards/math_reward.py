"""The `math` reward: whether the final answer equals the gold answer mathematically, by math-verify
on top of sympy.

math-verify reads words as products of letters and ignores most of what it does not know, so numbers
and words are compared here, and the rest is put into its words first. sympy takes hours, or all
memory, for answers that look harmless, so this runs in processes (common/workers). The first call,
or `math.prepare()`, imports math-verify."""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache, partial

from common.rewards.answers import (
    BOX,
    CURRENCY,
    LETTER,
    NUMBER,
    SCALE_WORDS,
    announced,
    check_answer,
    gold_answers,
    last_boxed,
    plain,
    to_number,
    value_of,
    with_fractions,
    without_latex,
)

# The rest of a line after ####, or after A: if it begins like mathematics and not like prose.
REST_OF_LINE = re.compile(r"(?:(?<=####)|(?=[\s*]*[-+.\d$£€\\(\[]))[\s*]*+([^\n]*)", re.ASCII)
LONGEST_TEXT = 2000  # last characters of a completion that are searched if it announces no answer


def math(completion: str, row: dict) -> float:
    """Return 1 if the completion's final answer equals the one in the `answer` column, or one of a
    list there.

    The final answer is the content of the last box, else the text after the last `####` or `A:`,
    else the answer that math-verify finds near the end. In the column likewise, but without a mark
    all of it is the answer. 1/2 = 0.5 = 50% and 50% = 50, but 0.333 is not 1/3 (six decimals must
    agree); units, degrees and `x =` do not matter; (1, 2) is ordered, {1, 2} and `1, 2` are not;
    0.\\overline{3} = 1/3; 18 million = 18,000,000.

    An answer that cannot be understood scores 0. If it is the row's own, that raises `ValueError`
    naming the row."""
    golds = [announced_answer(plain(answer), plain(answer)) for answer in gold_answers(row)]
    for gold in golds:
        if not (isinstance(value_of(gold), Fraction) or words_of(gold) or parsed(gold)):
            problem = f"math-verify does not understand the answer {gold[-80:]!r}"
            raise ValueError(f"{row['_source']}: {problem}")
    answer = announced_answer(plain(completion))
    if answer is not None:
        return float(any(equal(gold, answer) for gold in golds))
    parse, verify = library()
    found = parse(with_numbers(plain(completion)[-LONGEST_TEXT:]))
    return float(any(verify(parsed(gold), found) for gold in golds if parsed(gold)))


def announced_answer(text: str, otherwise: str | None = None) -> str | None:
    """Return the content of the last box (empty if it is not closed), else the text after the last
    `####` or `A:`."""
    if BOX.search(text):
        return last_boxed(text) or ""
    answers = announced(text, REST_OF_LINE)
    return answers[-1][0] if answers else otherwise


def with_numbers(text: str) -> str:
    """Return a text with plain numbers for `18 million`, and spaces before numbers after `Answer:`
    and the letters of scripts that have none: math-verify looks for these."""
    scaled = rf"(?<!{LETTER}){NUMBER}{SCALE_WORDS}"
    text = re.sub(scaled, lambda x: str(to_number(x[0]) or x[0]), text)
    text = re.sub(r"(?<=\d)\^\{(\d+)\}", r"^\1", text)
    east = r"[^\W\u0000-\u052f]"
    return re.sub(rf"(?:(?<={east})|(?<=[^\W\d_]:))(?=[-+.\d$\\])|(?<=\d)(?={east})", " ", text)


# ---- equal answers ----

# If both answers have one of these forms, its groups must be equal: (1, 2) is no set, 25_8 is not
# 25_9, 5 m is not 5 cm, nor 5 dollars 5 cents. math-verify looks at none of this.
FORMS = [
    re.compile(form)
    for form in (
        r"^(\(|\\\{)[^()]*(?:\)|\\\})$",
        r"\d_\{?(\d+)\}?$",
        r"\d[ ~]*(k?m/[hs]|mph|[mckμ]?m|[mk]?g|m?[lL]|s|min|h)(?: *\^\{?(\d))?\}?$",
        r"^(?=.*(?:\bcents?\b|¢))()|\bdollars?\b|\$",
    )
]
TIME = re.compile(r"\d ?[ap]\.? ?m\.?$|\d:0\d", re.IGNORECASE)  # but 3:10 may be a ratio
VARIABLE = re.compile(r"[\0-\x7f\u0370-\u03ff]*")  # of ASCII and Greek letters
# names that math-verify reads
NAMES = set("alpha beta gamma delta theta lambda sigma omega sqrt infinity sinh cosh".split())


def equal(gold: str, answer: str) -> bool:
    """Return whether two answers are equal: as numbers, as words, else by math-verify."""
    value = value_of(gold)
    if isinstance(value, Fraction) and value == value_of(answer):
        return True
    if words_of(gold) or words_of(answer):
        return words_of(gold) == words_of(answer)
    texts = [without_latex(text).strip(" .") for text in (gold, answer)]
    texts = [re.sub(r"^\$+(.*?)\$+$", r"\1", text).strip(" .") for text in texts]
    for form in FORMS:
        if len({match.groups() for match in map(form.search, texts) if match}) == 2:
            return False
    return library()[1](parsed(gold), parsed(answer))


def words_of(answer: str) -> str:
    """Return an answer that is words, such as Evelyn, or a time, in small letters without spaces;
    "" for any other, also for a product such as xy."""
    text = " ".join(without_latex(answer).replace("$", "").strip(" .*").lower().split())
    first = text.partition(" ")[0]
    letters = text.replace(" ", "")
    is_word = len(text) < 100 and first not in NAMES and all(map(is_letter, letters))
    is_variable = len(first) <= 3 and text not in ("yes", "no", "odd") and VARIABLE.fullmatch(first)
    if text and is_word and not is_variable or TIME.search(text[:20]):
        return letters.replace(".", "").lstrip("0")
    return ""


def is_letter(character: str) -> bool:
    """Return whether a character is a letter, or a mark of one, which many scripts have."""
    return character.isalpha() or unicodedata.category(character)[0] == "M"


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


# ---- what math-verify reads ----

# A number with words: `18 dollars per week`, `2.5 million`, `3 quarters`, `£5`, `18个`. It reads
# short words itself.
LETTERS = r"[^\W\d_]"
WITH_WORDS = re.compile(
    rf"([-+]?)\s*+{CURRENCY}\s*+([-+]?{NUMBER})({SCALE_WORDS})?(?:[ -]*((?:{LETTERS}{{4,}}"
    rf"|[^\W\d_\u0000-\u052f]|[€£¥₹¢]|USD|EUR|GBP|CNY|RMB|k?m/[hs])(?:{LETTERS}|[ ,'.])*))?"
)
PARTS = "half third quarter fourth fifth sixth seventh eighth ninth tenth".split()
PARTS = dict(zip(PARTS, (2, 3, 4, 4, 5, 6, 7, 8, 9, 10), strict=True)) | dict(halve=2)
PARTS |= dict(hundredth=100, thousandth=1000)
# words that change the value of a number
CHANGING = set("or to minus plus over squared cubed factorial below".split())
SYMBOLS = {"∞": r"\infty ", "∅": r"\emptyset ", "∈": r"\in ", "√": r"\sqrt "}
SYMBOLS |= {"·": r"\cdot ", "⋅": r"\cdot ", "°": ""}
REWRITTEN = [
    # it reads 1 000 as 1 * 0, 3 1/2 as (3 + 1) / 2 and 1e5 as 5 times Euler's number
    (r"(?<=\d)(?:\\[ ,;:!]| )+(?=\d{3}(?!\d))", ""),
    (r"(?<![\d./])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d)[eE]([-+]?\d+)", r"\\times 10^{\1}"),
    (r"\\sqrt +(\d+)", r"\\sqrt{\1}"),
    (r"\\varnothing", r"\\emptyset"),
]
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MOST_WORDS = 12  # an answer with more words is prose


def normal(answer: str) -> str:
    """Return a plain answer as math-verify reads it; "" if it is prose, or if words change its
    value: math-verify would read the number alone."""
    answer = answer.replace("~", " ").strip().strip("*").rstrip(".").strip()
    match = WITH_WORDS.fullmatch(without_latex(answer).replace("$", "").strip())
    words = re.findall(rf"{LETTERS}+", (match[4] or "").lower()) if match else []
    if CHANGING & set(words) or len(WORD.findall(answer)) > MOST_WORDS:
        return ""
    if match and not NAMES & set(words):
        sign, digits, scale, _ = match.groups()
        number = to_number(f"{digits}{scale or ''}")
        part = PARTS.get(words[0].removesuffix("s")) if words else None
        if number is not None and (scale or part):
            number /= part or 1
            digits = rf"\frac{{{number.numerator}}}{{{number.denominator}}}"
        is_percent = words and words[0] in ("percent", "percentage")
        return sign + digits + (r"\%" if is_percent else "")
    answer = with_fractions(answer).translate(str.maketrans(SYMBOLS))
    for pattern, form in REWRITTEN:
        answer = re.sub(pattern, form, answer)
    return answer


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

    if not isinstance(a, Expr) or not isinstance(b, Expr):  # a matrix, whose elements come here
        return nearly_equal(a, b, *precision)
    if get_pct_val(a, a) == get_pct_val(b, b):
        return True  # 50% = 50; math-verify has this rule for whole numbers only
    if not nearly_equal(a, b, *precision):
        return False
    a, b = safe_sympy_doit(a), safe_sympy_doit(b)
    difference = a - b
    has_decimals = a.has(Float) or b.has(Float)
    if difference.free_symbols:
        return has_decimals
    if difference.is_Rational:
        return difference == 0
    digits = 3 if has_decimals else 40
    return bool(abs(difference.evalf(50)) <= abs(b.evalf(50)) * 10**-digits)


math.columns = ("answer",)
math.check = check_answer
math.prepare = library
