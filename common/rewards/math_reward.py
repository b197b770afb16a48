"""The `math` reward: is the final answer mathematically equal to the gold answer? By math-verify, on top of sympy.

sympy takes hours, or all memory, for answers that look harmless, so this belongs into a `pool.Pool`. math-verify is
imported by the first call, or by `math.prepare()`.
"""

import re
from functools import cache, lru_cache

from common.rewards.functions import NUMBER, last_boxed

# The rest of a line behind ####, or behind A: where it begins like mathematics and not like prose.
ANNOUNCED = re.compile(r"(?:####|\bA:(?=[\s*]*[-+.\d$\\(\[]))[\s*]*+([^\n]*)")
# A number with words behind it, which math-verify would take for a product of letters: "18 dollars per week".
WITH_WORDS = re.compile(rf"([-+]?\$?{NUMBER}) +[a-z]{{4,}}[a-z ,'-]*", re.IGNORECASE)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MOST_WORDS = 12  # of an answer; what has more is prose, and math-verify would take it for a product of letters too
LONGEST_TEXT = 2000  # characters of a completion without an announced answer that are searched, from its end


def math(completion: str, row: dict) -> float:
    """1 if the completion's final answer equals that of the `answer` column.

    The final answer is what the last \\boxed{...} holds, else what follows the last `####` or `A:`, else whatever
    math-verify finds near the end. Of the column also, except that without a mark the whole column is the answer.
    1/2 = 0.5 = 50% and 50% = 50, but 0.333 is not 1/3 (six decimals must agree); units, degrees and `x =` do not
    matter; (1, 2) is ordered, {1, 2} and `1, 2` are not.

    Raises `ValueError` naming the row if its own answer cannot be understood. What cannot be understood in a completion
    scores 0.
    """
    parse, verify = library()
    gold = parse_gold(str(row["answer"]))
    if not gold:
        raise ValueError(f"{row['_source']}: math-verify does not understand the answer {str(row['answer'])[-80:]!r}")
    found = announced_answer(completion)
    return float(verify(gold, parse(completion[-LONGEST_TEXT:]) if found is None else parse_answer(found)))


@cache
def library():
    """math-verify's `parse` and `verify` without their own time-outs: those are signals, which C code does not see."""
    import logging
    from functools import partial

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that the time-outs are off
    parse = partial(math_verify.parse, fallback_mode="no_fallback", parsing_timeout=None)
    verify = partial(math_verify.verify, timeout_seconds=None)
    verify(parse("\\boxed{1}"), parse("\\boxed{2}"))  # its parser reads large tables when it is first used
    return parse, verify


def announced_answer(text: str) -> str | None:
    """What the text says is its answer: in the last \\boxed{...} (empty if that is not closed), else behind the last
    `####` or `A:`."""
    if "\\boxed{" in text:
        return last_boxed(text) or ""
    found = ANNOUNCED.findall(text)
    return found[-1] if found else None


def parse_answer(answer: str) -> list:
    """The sympy objects that an answer without text around it may stand for; [] if it cannot be understood."""
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
