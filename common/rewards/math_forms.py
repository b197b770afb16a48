"""Forms of answers that math-verify does not read: times of day and repeating decimals."""

import re
from typing import NamedTuple

CLOCK = re.compile(
    r"(\d{1,2})(?: ?: ?([0-5]\d))?(?: ?: ?([0-5]\d))?(?: ?([ap])\.? ?m\.?)?", re.IGNORECASE
)
# Marks of a text in LaTeX that do not change a time.
TYPESETTING = re.compile(
    r"\\(?:text|textrm|textbf|mathrm|rm|quad)(?![A-Za-z])|\\[ ,;:!]|[{}$~\s]|\\[()]"
)
# 0.1\overline{6}, 0.\bar 3, 0.\dot{1}4285\dot{7}, 0.1(6), and digits with a combining line or dot.
START = r"(?<![\d.])(\d{0,50})\.(\d{0,50})"
LINE = r"\\(?:overline|bar|dot|overbar)"
REPEATING = (
    re.compile(rf"{START}{LINE}\s*(?:\{{(\d{{1,50}})\}}|(\d))(?!\d|\\dot|[{{(])"),
    re.compile(rf"{START}\\dot\s*\{{?(\d)\}}?(\d{{0,50}})\\dot\s*\{{?(\d)\}}?(?!\d)"),
    re.compile(rf"{START}\((\d{{1,50}})\)(?![\d(])"),
    re.compile(rf"{START}((?:\d[\u0304\u0305\u0307]){{1,50}})(?!\d)"),
)


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
    match = CLOCK.fullmatch(" ".join(TYPESETTING.sub(" ", answer).split()))
    if match is None or not (match[2] or match[4]):
        return None
    numbers = match.groups()[:3]
    hours, minutes, seconds = (int(number or 0) for number in numbers)
    half = (match[4] or "").lower()
    if hours > (12 if half else 24):
        return None
    leads_with_0 = any(number and number.startswith("0") for number in numbers)
    return Time(3600 * hours + 60 * minutes + seconds, half, bool(half) or leads_with_0)


def without_repeating_decimals(answer: str) -> str:
    """Return the answer with repeating decimals as fractions: `0.1\\overline{6}` is
    `\\frac{15}{90}`."""
    for pattern in REPEATING:
        answer = pattern.sub(_as_fraction, answer)
    return answer


def _as_fraction(match: re.Match) -> str:
    whole, once, *repeated = (re.sub(r"\D", "", digits or "") for digits in match.groups())
    again = "".join(repeated)
    numerator = int(f"0{whole}{once}{again}") - int(f"0{whole}{once}")
    return rf"\frac{{{numerator}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"
