"""The answer that a text states, and its value: equal answers have equal values.

No function raises for any text, or takes more than linear time, but `check_answer` and
`check_number`, which refuse a row."""

import json
import math
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Any

# ---- announced, in a box, or the last number ----


def stated_number(completion: str) -> Fraction | None:
    """Return the number that `gsm8k` reads; None if there is none, or several."""
    answers = final_answers(completion)
    return to_number(answers[-1]) if answers else None


def final_answers(text: str) -> list[str]:
    """Return every number after `####` or `A:`, as its sign and digits. If its line has further
    numbers, the text up to the last of them belongs to it, so that `to_number` refuses it."""
    found = announced(without_latex(plain(text)), FINAL_NUMBER)
    return [sign + number for sign, number in found]


def announced(text: str, answer: re.Pattern) -> list[tuple[str, ...]]:
    """Match `answer` after every `####`, and after every `A:` that announces an answer and does not
    label a case (`is_label`). Return the groups of each match."""
    found = []
    end = 0
    marks = list(MARK.finditer(text))
    labels = other_labels(text) if any(mark[0] == "A:" for mark in marks) else ()
    for mark in marks:
        if mark.start() < end or (mark[0] == "A:" and is_label(text, mark.start(), *labels)):
            continue
        if match := answer.match(text, mark.end()):
            found.append(match.groups())
            end = match.end()
    return found


def other_labels(text: str) -> tuple[int, set[str]]:
    """Look for labels of other cases than A. Return where the last `B:` or `C:` with a number
    stands that has no noun in front (-1: nowhere), and all nouns in front of other letters: `plan`
    of `Plan B`."""
    last, nouns = -1, set()
    for label in LABEL.finditer(text):
        noun, letter, has_number = label.groups()
        if noun and letter != "A":
            nouns.add(noun.lower())
        elif has_number and letter in "BC":
            last = label.start(2)
    return last, nouns


def is_label(text: str, start: int, last_label: int, nouns: set[str]) -> bool:
    """Return whether the `A:` at `start` labels a case, and announces no answer, as in `A: 12, B:
    20` or `Plan A: 12`. A noun within a line counts only if the text also has, say, a `plan B`."""
    if start < last_label:
        return True
    line = text.rfind("\n", 0, start) + 1
    noun = NOUN_BEFORE.search(text, max(line, start - 40), start)
    if noun is None:
        return False
    begins_line = text[line : noun.start()].strip(" \t*#>_-`") == ""
    is_name = begins_line and noun[1][0].isupper() and noun[1].lower() not in ANNOUNCING
    return is_name or noun[1].lower() in nouns


def gold_numbers(row: dict) -> list[Fraction | None]:
    """Return each right answer as a number: the last one after `####` or `A:`, else the whole
    answer; None for an answer that is no number."""
    return [to_number((final_answers(answer) or [answer])[-1]) for answer in gold_answers(row)]


def check_number(row: dict) -> None:
    """Raise `ValueError` unless each right answer is a number."""
    check_answer(row)
    for answer, number in zip(gold_answers(row), gold_numbers(row), strict=True):
        if number is None:
            expected = "expected a number, or text with `#### number`"
            raise ValueError(f"{row['_source']}: column answer: {expected}, got {answer[-80:]!r}")


def any_number(completion: str) -> Fraction | None:
    """Return the number that `gsm8k_flexible` reads."""
    text = plain(completion)
    box = last_boxed(text)
    if box is None and final_answers(text):
        return stated_number(completion)
    if box is not None and "frac" in box:
        return None
    text = FRACTION.sub(r" \1\2/\3\4", without_latex(text if box is None else box))
    numbers = [sign + number for sign, number, *_ in ANY_NUMBER.findall(text)]
    value = value_of(numbers[-1 if box is None else 0]) if numbers else None
    return value if isinstance(value, Fraction) else None


# A box is braced; a number alone needs no braces.
BOX = re.compile(
    r"\\(?:boxed|fbox|framebox(?:\[[^\]\n]{0,20}\]){0,2})(?:\s*(\{)|\s*([-+]?\d[\d.,/]*))"
)
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    """Return the content of the last box (\\boxed, \\fbox, \\framebox), with balanced braces, of
    which `\\{` is none; None without a box, or if it is not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    box = boxes[-1]
    if box[2] is not None:
        return box[2].rstrip(".,")
    depth = 0
    for brace in BRACE.finditer(text, box.start(1)):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end(1) : brace.start()]
    return None


# ---- the column `answer` ----


def gold_answers(row: dict) -> list[str]:
    """Return the right answers of a row, any of which counts: the column `answer`, or the members
    of a list there."""
    value = row["answer"]
    return [as_text(one) for one in (value if isinstance(value, list) else [value])]


def as_text(value: object) -> str:
    """Return a number in plain digits, anything else by `str`. Tables make floats of whole numbers:
    18.0 is 18."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    shortest = Decimal(repr(value)).normalize()  # int(1e23) is 99999999999999991611392
    return f"{shortest + 0:f}"  # -0.0 is 0


def from_json(value: object) -> Any:
    """Return the list or object that a table holds as JSON text; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def check_answer(row: dict) -> None:
    """Raise `ValueError` unless the column `answer` is text, a finite number or a list of them. A
    list of texts as JSON is refused: it may be one answer or several."""
    value = row["answer"]
    for one in value if isinstance(value, list) and value else [value]:
        # a boolean is neither: its text is true, True, yes, ...
        if type(one) not in (str, int, float) or one in (math.inf, -math.inf) or one != one:
            expected = "expected text, a number, or a list of them"
            break
    else:
        listed = from_json(value)
        if listed is value or not isinstance(listed, list) or str not in map(type, listed):
            return
        expected = "expected the list itself; if this text is the answer, wrap it in a list"
    raise ValueError(f"{row['_source']}: column answer: {expected}, got {value!r:.80}")


# ---- plain text: marks of other scripts and of LaTeX ----


class PlainForms(dict):
    """A table that maps a character to its ASCII form, and finds a form when it is first asked for:
    digits of all scripts, fullwidth letters and marks, minus signs, spaces, fractions. Other
    characters stay as they are."""

    def __missing__(self, code: int) -> str:
        form = character = chr(code)
        kind, *parts = unicodedata.decomposition(character).split() or [""]
        if unicodedata.decimal(character, None) is not None:
            form = str(unicodedata.decimal(character))
        elif kind in ("<wide>", "<narrow>", "<small>", "<font>", "<noBreak>"):
            form = unicodedata.normalize("NFKC", character).translate(self)
        elif kind == "<fraction>":
            form = " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
        elif unicodedata.category(character) == "Zs":
            form = " "
        self[code] = form
        return form


PLAIN = PlainForms()
for marks, form in [
    ("−‐‑➖", "-"), ("。｡।۔", ". "), ("、､،", ", "), ("٬", ","), ("٫", "."), ("٪", "%"),
    ("⁄∕", "/"), ("∶", ":"), ("【〔", "["), ("】〕", "]"), ("「」『』“”„", '"'),
    ("\u200b\u200e\u200f\u2060\ufeff", ""),
]:  # fmt: skip
    PLAIN.update(dict.fromkeys(map(ord, marks), form))
POWER = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")
DASH = re.compile(r"[‒–](?=\s?\\?[$£€¥]?\.?\d)")  # a minus, or the dash of a range
GROUPED = re.compile(r"(?<=\d)(?:[\u2009\u202f]|\\[,!])(?=\d{3}(?!\d))")  # 1 000 by a thin space
# In parts: thousands of combining marks after each other take quadratic time.
COMPOSABLE = re.compile(r"[\0-\x7f]?[^\0-\x7f]{1,1000}")
FONT = re.compile(r"\\(?:text|math|bold|operatorname)[a-zA-Z]*\s*\{([^{}\n]*)\}")


def plain(text: str) -> str:
    """Return a text with ASCII digits and marks: `－１８％` is `-18%`, `3½` is `3 1/2`, `x²` is
    `x^{2}`. Canonically equal texts, such as `é` in one character or two, are the same."""
    if text.isascii():
        return text
    text = POWER.sub(lambda x: f"^{{{unicodedata.normalize('NFKC', x[0])}}}", DASH.sub("-", text))
    text = GROUPED.sub("", text).translate(PLAIN)
    return COMPOSABLE.sub(lambda x: unicodedata.normalize("NFC", x[0]), text)


def without_latex(text: str) -> str:
    r"""Return a plain text without LaTeX's fonts, spaces and escapes: `\$1{,}000~\text{km}` is
    `$1,000 km`."""
    text = text.replace("~", " ")
    if "\\" not in text:
        return text.replace("{,}", ",")
    text = FONT.sub(r"\1", GROUPED.sub("", text).replace("{,}", ",").replace("\\!", ""))
    text = re.sub(r"(?<!\\)\\(?:[,;:() ]|q?quad\b|(?:left|right)(?![a-zA-Z]))", " ", text)
    return re.sub(r"\\([$%#&_])", r"\1", text)


# ---- numbers in a text ----

# A letter or digit of a script with spaces between words: x2 has no number, 共2个 has one.
LETTER = r"[^\W\u0530-\U0010ffff]"
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"  # a comma joins groups of three only
NUMBER = rf"(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"  # has no sign
SCALES = dict(hundred=10**2, thousand=10**3, million=10**6, billion=10**9, trillion=10**12)
SCALES |= dict(dozen=12, lakh=10**5, crore=10**7, k=10**3, m=10**6)
SCALES |= {"百": 100, "千": 10**3, "万": 10**4, "萬": 10**4, "만": 10**4}
SCALES |= {"亿": 10**8, "億": 10**8, "억": 10**8}
WORDS = "|".join(name for name in SCALES if len(name) > 1)
SCALE_WORDS = (
    rf"(?:(?:[ \t*~-]{{0,4}}(?i:{WORDS})s?)+(?!{LETTER})"
    r"|[ \t]?(?:百(?!分)|千(?![克米瓦卡])|[万萬亿億만억])+)"
)
SCALE = rf"(?:{SCALE_WORDS}|(?:[ \t]?[kK]|M)(?!{LETTER}))"
CURRENCY = r"(?:\\?[$£€¥₹]){0,2}"  # $\$18$
FORMAT = re.compile(rf"(?:^|\n)(?:####|A:) *[-+]?{CURRENCY}{NUMBER}\s*$")
# A mark before an answer: `####`, or `A:` unless it is a label as in `Plan A: 12` (`is_label`).
MARK = re.compile(rf"####|(?<!{LETTER})A:")
# The `Plan ` of `Plan A`; after a number it is a unit.
NOUN = rf"(?<!{LETTER})(?<![0-9] )([^\W\d_\u0530-\U0010ffff]{{2,30}})(?:-|[ \t]++)[*_`\"'(\[]*+"
NOUN_BEFORE = re.compile(rf"{NOUN}\Z")
NUMBER_FOLLOWS = r"[*_`)]*:(?=[\s*]*+[-+.0-9$£€\\(\[])"
LABEL = re.compile(rf"(?:{NOUN}|(?<!{LETTER}))([A-E])(?!{LETTER})({NUMBER_FOLLOWS})?")
# `Final A: 18` and the like announce an answer.
ANNOUNCING = set("so thus hence then therefore finally that is the final answer solution".split())
ANNOUNCING |= set("result total conclusion response output correct my your our".split())
# The first number after a mark, and all up to another number in its line, with which it is none.
# "*+" gives nothing back: with three plain "*" after each other, white space without a number takes
# cubic time.
FINAL_NUMBER = re.compile(
    rf"[\s*`_]*+([-+]?)\s*+{CURRENCY}\s*+([-+]?{NUMBER}{SCALE}?(?:[^\n#]*[0-9])?)"
)
EXPONENT = r"(?:[eE]|[ ]?(?:×|\\times|\\cdot|x|\*)[ ]?10[ ]?\^[ ]?\{?)([-+]?[0-9]{1,3})(?![0-9])\}?"
# Neither part of a word, nor of a fraction or power.
ANY_NUMBER = re.compile(
    rf"(?:(?<!{LETTER})([-+]))?{CURRENCY}(?<![/^])(?<!\^\{{)(?<!{LETTER})"
    rf"({NUMBER}(?!\.?[0-9]|\s*/\s*[0-9]|\^(?!\{{?\\circ))(?:{EXPONENT}|{SCALE})?)"
)
ONE_NUMBER = re.compile(rf"([-+]?)\s*+{CURRENCY}\s*+([-+]?)({NUMBER})({SCALE})?\s*+%?\s*+\.?")
POWER_OF_TEN = re.compile(rf"([-+]?{NUMBER}){EXPONENT}\.?")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([-+]?\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", re.ASCII)
SPACED = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
RATIO = re.compile(r"([-+]?)\s*(?:(\d+)\s+)?([-+]?\d+)\s*/\s*(\d+)\.?", re.ASCII)
REPEATING = re.compile(  # 0.1\overline{6}, 0.\bar 3, 0.\dot{3}, 0.1(6)
    r"(?<![\d.])(\d{0,50})\.(\d{0,50})"
    r"(?:\\(?:overline|bar|dot|overbar)\s*(?:\{(\d{1,50})\}|(\d))|\((\d{1,50})\))(?![\d({]|\\dot)"
)


def to_number(text: str) -> Fraction | None:
    """Return `-1,234.50` as Fraction(-2469, 2), which is exact, and `18 million` as 18000000; None
    for anything but one number."""
    match = ONE_NUMBER.fullmatch(without_latex(plain(text[:100])).strip())
    # Python refuses to convert integers of thousands of digits
    if match is None or len(text) > 100 or (match[1] and match[2]):
        return None
    number = Fraction(match[1] + match[2] + match[3].replace(",", ""))
    words = re.findall(WORDS, (match[4] or "").lower()) or (match[4] or "").strip().lower()
    return number * math.prod(SCALES[word] for word in words)


def with_fractions(text: str) -> str:
    """Return a text with fractions for repeating decimals: `0.1\\overline{6}` is
    `\\frac{15}{90}`."""

    def fraction(match: re.Match) -> str:
        whole, once, again = match[1], match[2], match[3] or match[4] or match[5]
        numerator = int(f"0{whole}{once}{again}") - int(f"0{whole}{once}")
        return rf"\frac{{{numerator}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"

    return REPEATING.sub(fraction, text)


def value_of(text: str) -> Fraction | str:
    """Return the number that a text is, also as a fraction, with an exponent or with repeating
    decimals; else the text without spaces and what only typesets it. Equal answers have equal
    values."""
    text = with_fractions(without_latex(plain(text)).replace("$", ""))
    text = FRACTION.sub(r" \1\2/\3\4", text)
    text = re.sub(r"([\^_])\{(\w)\}", r"\1\2", " ".join(text.split()))
    text = text.rstrip(" .%").removesuffix(" percent")
    number = None
    if len(text) > 100:
        pass
    elif (ratio := RATIO.fullmatch(text)) and int(ratio[4]):
        sign, whole, top, bottom = ratio.groups()
        number = Fraction(f"{sign}1") * (int(whole or 0) + Fraction(int(top), int(bottom)))
    elif power := POWER_OF_TEN.fullmatch(text):
        number = Fraction(power[1].replace(",", "")) * Fraction(10) ** int(power[2])
    elif text[-1:] not in "kKM":  # there it is a variable
        number = to_number(text.replace(" ", "") if SPACED.fullmatch(text) else text)
    return re.sub(r"(?<!\d) | (?!\d)", "", text) if number is None else number
