"""Forms of answers that math-verify does not read, or reads as other numbers: times of day,
repeating decimals, number words, units, and symbols of Unicode."""

import re
from typing import NamedTuple

from common.rewards.functions import (
    CURRENCY,
    LETTER,
    NUMBER,
    SCALE_WORDS,
    to_number,
    without_latex,
)

CLOCK = re.compile(
    r"(\d{1,2})(?: ?: ?([0-5]\d))?(?: ?: ?([0-5]\d))?(?: ?([ap])\.? ?m\.?)?", re.IGNORECASE
)
# 0.1\overline{6}, 0.\bar 3, 0.\dot{1}4285\dot{7}, 0.1(6), and digits with a combining line or dot.
START = r"(?<![\d.])(\d{0,50})\.(\d{0,50})"
REPEATING = [
    re.compile(START + end)
    for end in (
        r"\\(?:overline|bar|dot|overbar)\s*(?:\{(\d{1,50})\}|(\d))(?!\d|\\dot|[{(])",
        r"\\dot\s*\{?(\d)\}?(\d{0,50})\\dot\s*\{?(\d)\}?(?!\d)",
        r"\((\d{1,50})\)(?![\d(])",
        r"((?:\d[\u0304\u0305\u0307]){1,50})(?!\d)",
    )
]
# A number with words: `18 dollars per week`, `2.5 million`, `3 quarters`, `£5`, `18个`.
LETTERS = r"[^\W\d_]"
WITH_WORDS = re.compile(
    rf"([-+]?)\s*+{CURRENCY}\s*+([-+]?{NUMBER})({SCALE_WORDS})?(?:[ -]*((?:{LETTERS}{{4,}}"
    rf"|[^\W\d_\u0000-\u052f]|[€£¥₹]|USD|EUR|GBP|CNY|RMB|k?m/[hs])(?:{LETTERS}|[ ,'.])*))?"
)
SCALED = re.compile(rf"(?<!{LETTER})({NUMBER})({SCALE_WORDS})")
PARTS = "half third quarter fourth fifth sixth seventh eighth ninth tenth".split()
PARTS = dict(zip(PARTS, (2, 3, 4, 4, 5, 6, 7, 8, 9, 10), strict=True)) | dict(halve=2)
PARTS |= dict(hundredth=100, thousandth=1000)
# Words that make another value, and the names of formulas, which math-verify reads.
CHANGING = set("or to minus plus over squared cubed factorial below".split())
FORMULAS = set("alpha beta gamma delta theta lambda sigma omega sqrt infinity sinh cosh".split())
SYMBOLS = str.maketrans({"∞": r"\infty ", "∈": r"\in ", "·": r"\cdot ", "⋅": r"\cdot ", "°": ""})
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
# of an answer; more are prose, which math-verify would read as a product of letters too
MOST_WORDS = 12


def normal(answer: str) -> str:
    """Return a plain answer as math-verify reads it; "" if it is prose, or if its words make it
    another value, of which math-verify would read the bare number."""
    answer = answer.strip().strip("*").rstrip(".").strip()
    match = WITH_WORDS.fullmatch(without_latex(answer).replace("$", "").strip())
    words = re.findall(r"[^\W\d_]+", (match[4] or "").lower()) if match else []
    if CHANGING & set(words) or len(WORD.findall(answer)) > MOST_WORDS:
        return ""
    if match and not FORMULAS & set(words):
        return _without_words(match[1], match[2], match[3], words)
    answer = re.sub(r"√\s*(\d+|\w)", r"\\sqrt{\1}", answer).replace("√", r"\sqrt")
    for pattern in REPEATING:
        answer = pattern.sub(_as_fraction, answer)
    # math-verify reads 1 000 as 1 * 0, 3 1/2 as (3 + 1) / 2 and 1e5 as 5 times Euler's number.
    answer = re.sub(r"(?<=\d)(?:\\[ ,;:!]|[ ~])+(?=\d{3}(?!\d))", "", answer.translate(SYMBOLS))
    answer = re.sub(r"(?<![\d./])(\d+) +(\d+) */ *(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", answer)
    return re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"\\times 10^{\1}", answer)


def _without_words(sign: str, digits: str, scale: str | None, words: list[str]) -> str:
    number = to_number(f"{digits}{scale or ''}")
    part = PARTS.get(words[0].removesuffix("s")) if words else None
    if number is not None and (scale or part):
        number /= part or 1
        digits = rf"\frac{{{number.numerator}}}{{{number.denominator}}}"
    is_percent = words and words[0] in ("percent", "percentage")
    return sign + digits + (r"\%" if is_percent else "")


def with_numbers(text: str) -> str:
    """Return a text with plain numbers for `18 million`, and spaces before numbers behind `Answer:`
    and the letters of scripts that have none: math-verify looks for these."""
    text = SCALED.sub(lambda x: str(to_number(x[0]) or x[0]), text)
    text = re.sub(r"(?<=\d)\^\{(\d+)\}", r"^\1", text)
    east = r"[^\W\u0000-\u052f]"
    return re.sub(rf"(?:(?<={east})|(?<=[^\W\d_]:))(?=[-+.\d$\\])|(?<=\d)(?={east})", " ", text)


def letters_of(answer: str) -> str:
    """Return an answer of letters and spaces alone, in small letters; "" for any other."""
    text = " ".join(without_latex(answer).replace("$", "").strip(" .*").lower().split())
    return text if text.replace(" ", "").isalpha() and len(text) < 100 else ""


def is_word(letters: str) -> bool:
    """Return whether letters are a word, such as Evelyn, and not a product such as xy."""
    first, *rest = letters.split() or [""]
    return (len(first) > 3 or letters in ("yes", "no", "odd")) and first not in FORMULAS


class Time(NamedTuple):
    """A time of day."""

    shown: int
    """seconds from 0:00 as written, on a clock of 12 or 24 hours"""
    half: str
    """a or p (a.m., p.m.); "" without"""
    is_certain: bool
    """whether it is no ratio such as 3:10"""

    @property
    def seconds(self) -> int:
        """Seconds from midnight."""
        return self.shown if not self.half else self.shown % 43200 + 43200 * (self.half == "p")

    def equals(self, other: "Time") -> bool:
        """Return whether both are the same time. Where one lacks a.m. or p.m., the other may have
        either."""
        if bool(self.half) == bool(other.half):
            return self.seconds == other.seconds
        written, full = (other, self) if self.half else (self, other)
        return written.shown in (full.seconds, full.shown)


def time_of(answer: str) -> Time | None:
    """Return the time that an answer is; None if it is none. Hours alone need a.m. or p.m."""
    text = re.sub(r"[{}$~]", " ", without_latex(answer))
    match = CLOCK.fullmatch(" ".join(text.split()))
    if match is None or not (match[2] or match[4]):
        return None
    numbers = match.groups()[:3]
    hours, minutes, seconds = (int(number or 0) for number in numbers)
    half = (match[4] or "").lower()
    if hours > (12 if half else 24):
        return None
    leads_with_0 = any(number and number.startswith("0") for number in numbers)
    return Time(3600 * hours + 60 * minutes + seconds, half, bool(half) or leads_with_0)


def _as_fraction(match: re.Match) -> str:
    """Return a repeating decimal as a fraction: `0.1\\overline{6}` is `\\frac{15}{90}`."""
    whole, once, *repeated = (re.sub(r"\D", "", digits or "") for digits in match.groups())
    again = "".join(repeated)
    numerator = int(f"0{whole}{once}{again}") - int(f"0{whole}{once}")
    return rf"\frac{{{numerator}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"
