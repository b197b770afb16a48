"""The `math` reward: whether the final answer equals the gold answer mathematically, by math-verify on top of sympy.

sympy takes hours, or all memory, for answers that look harmless, so this runs in a `processes.Pool`. The first call, or
`math.prepare()`, imports math-verify.
"""

import re
from functools import cache, lru_cache

from common.rewards.functions import NUMBER, last_boxed

# The rest of a line behind ####, or behind A: if it begins like mathematics and not like prose.
ANNOUNCED = re.compile(r"(?:####|\bA:(?=[\s*]*[-+.\d$\\(\[]))[\s*]*+([^\n]*)")
# A number with words behind it, such as "18 dollars per week": math-verify would read a product of letters.
WITH_WORDS = re.compile(rf"([-+]?\$?{NUMBER}) +[a-z]{{4,}}[a-z ,'-]*", re.IGNORECASE)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MOST_WORDS = 12  # of an answer; more are prose, which math-verify would read as a product of letters too
LONGEST_TEXT = 2000  # last characters of a completion that are searched if it announces no answer


def math(completion: str, row: dict) -> float:
    """Return 1 if the completion's final answer equals that of the `answer` column.

    The final answer is the content of the last \\boxed{...}, else the text behind the last `####` or `A:`, else the
    answer that math-verify finds near the end. In the column likewise, but without a mark all of it is the answer.
    1/2 = 0.5 = 50% and 50% = 50, but 0.333 is not 1/3 (six decimals must agree); units, degrees and `x =` do not
    matter; (1, 2) is ordered, {1, 2} and `1, 2` are not.

    An answer that cannot be understood scores 0. If it is the row's own, that raises `ValueError` naming the row.
    """
    parse, verify = library()
    gold = parse_gold(str(row["answer"]))
    if not gold:
        raise ValueError(f"{row['_source']}: math-verify does not understand the answer {str(row['answer'])[-80:]!r}")
    found = announced_answer(completion)
    return float(verify(gold, parse(completion[-LONGEST_TEXT:]) if found is None else parse_answer(found)))


@cache
def library():
    """Return math-verify's `parse` and `verify` without their time-outs, which are signals that C code ignores."""
    import logging
    from functools import partial

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time-outs are off
    parse = partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=None)
    verify = partial(math_verify.verify, timeout_seconds=None)
    verify(parse("\\boxed{1}"), parse("\\boxed{2}"))  # the first use of the parser reads large tables
    return parse, verify


def announced_answer(text: str) -> str | None:
    """Return the content of the last \\boxed{...} (empty if it is not closed), else the text behind the last `####` or
    `A:`, else None."""
    if "\\boxed{" in text:
        return last_boxed(text) or ""
    found = ANNOUNCED.findall(text)
    return found[-1] if found else None


def parse_answer(answer: str) -> list:
    """Return the sympy objects that an answer without other text may mean; [] if it cannot be understood."""
    from math_verify import LatexExtractionConfig

    answer = answer.strip().strip("*").rstrip(".").strip()
    if words := WITH_WORDS.fullmatch(answer):
        answer = words[1]
    if len(WORD.findall(answer)) > MOST_WORDS:
        return []
    # math-verify reads 1 000 as 1 * 0, 3 1/2 as (3 + 1) / 2 and 1e5 as 5 times Euler's number.
    answer = re.sub(r"(?<=\d)(?:\\[ ,;:!]|[ ~])+(?=\d{3}(?!\d))", "", answer)
    answer = re.sub(r"(?<![\d./])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", answer)
    answer = re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"\\times 10^{\1}", answer)
    return library()[0](f"\\boxed{{{answer}}}", [LatexExtractionConfig(boxed_match_priority=0)])


@lru_cache(4096)
def parse_gold(answer: str) -> list:
    announced = announced_answer(answer)
    return parse_answer(answer if announced is None else announced)


math.columns = ("answer",)
math.prepare = library
