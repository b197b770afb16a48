"""An equal value in another spelling is equal, another value is not, and what stands around an
answer does not change it: for every reward that compares answers, the check of gold answers, and
majority votes."""

# ruff: noqa: E501  (tables with wide characters)

import unicodedata
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.evaluate.estimators import final_answer
from common.rewards.answers import check_answer, from_json, last_boxed, plain, value_of
from common.rewards.functions import boxed, gsm8k, gsm8k_flexible
from common.rewards.math_reward import math

# gold answer, its other spellings, other values
NUMBERS = {
    "18": (
        "18|18.0|18.|+18|18.00|１８|１８。|١٨|𝟏𝟖|१८|$18|\\$18|£18|€18|￥18|018|18\\text{ apples}|18~\\text{apples}",
        "180|-18|−18|–18|-１８|1.8|18.5|8|18 million|18 thousand|18k|18万|18百|18²|18^2|18 or 20|18 to 20|"
        "18-20|18–20|18～20|1,8|18,0|18.000.000|1 8|18/7|18\\text{ million}|18\\ \\text{billion}|18·2",
    ),
    "1000": (
        "1000|1,000|1000.0|1,000.00|１，０００|１０００|$1,000|1{,}000|1\\,000|1\\!000|1\u2009000|1\u202f000|"
        "1 thousand|1 Thousand|10 hundred|1千|1٬000",
        "1.000|1,00|100,0|10,00|1,0000|1.0|1|1000 thousand|1,000,000|10,000|0.001|1'000'000",
    ),
    "1234567": (
        "1234567|1,234,567|１，２３４，５６７|1{,}234{,}567|1.234567 million",
        "1234,567|123,4567|12,34,567|1.234.567|1,234,567,000|-1,234,567|1,234",
    ),
    "-5": ("-5|−5|－5|–5|-5.0|-$5|$-5|−５|﹣5|‑5", "5|+5|-50|5-|-5 million"),
    "0.5": ("0.5|.5|0.50|０．５|0٫5|٠٫٥", "5|.05|0,5|0.5 million|-.5|0.05|0.5.1"),
    "18000000": ("18 million|18,000,000|18000000|18 Million|1800万|0.18亿|18\\text{ million}",
                 "18|18 thousand|18 billion|18 million million|18万"),
    "2500000": ("2.5 million|2,500,000|250万|25 lakh", "2.5|2.5 thousand|25 million|2,5 million"),
    "60": ("60|5 dozen|5\\text{ dozen}", "5|12|5 dozens dozen"),
    "35": ("35", "3,5|3, 5|3 5|3.5|3;5"),
    "150": ("150", "1,50|1.50|15,0"),
}  # fmt: skip
TEXTS = {
    "1/2": ("0.5|½|\\frac12|\\frac{1}{2}|\\dfrac{1}{2}|\\tfrac12|\\cfrac{1}{2}|1/2|１／２|1∕2|2/4|.50", "1/3|12|2|1|-½|1\\frac12|0.2"),
    "7/2": ("3½|3 1/2|3\\frac{1}{2}|3\\dfrac12|3.5|7/2", "31/2|3|1/2|2/7|3/2"),
    "1500": ("1.5e3|1.5E3|1.5 × 10^3|1.5\\times10^{3}|1.5 \\cdot 10^3|1.5×10³|1500|1,500", "1.5|3|10|1.5e4|15|1.5e-3"),
    "0.001": ("1e-3|1 × 10⁻³|0.001", "1e3|0.01|-3"),
    "(1, 2)": ("(1,2)|（1，2）|( 1 , 2 )|\\left(1, 2\\right)|(１，２)", "(2,1)|(1,3)|[1,2]|(1,2]|12|\\{1,2\\}|$ \\{1, 2\\} $"),
    "3, 5": ("3,5", "35|3.5|8"),
    "[1, 2)": ("[1,2)|［1，2）|\\left[1,2\\right)", "(1,2)|[1,2]|(1,2]"),
    "x^2": ("x^2|x^{2}|x²|$x^2$", "x^3|2x|x|x2"),
    "-12": ("-12|-12%|-12\\%|-12 percent", "12|-1.2|12 percent"),
    "\\begin{pmatrix} 1 & 2 \\\\ -3 & 4 \\end{pmatrix}": (
        "\\begin{pmatrix}1&2\\\\-3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\-4&3\\end{pmatrix}"),
}  # fmt: skip
MATHS = {
    "\\{1, 2\\}": ("\\{2,1\\}|2, 1|1,2|\\left\\{1,2\\right\\}", "(1,2)|\\{1,3\\}|12|1"),
    "18 cents": ("18|18 cents|18\\text{ cents}|$18$ cents|18.0|18¢", "18 dollars|18\\text{ dollars}|180|\\$18"),
    "60 km/h": ("60|60 km/h|60\\text{ km/h}|60.0", "6|60 mph|60 m/s"),
    "(-\\infty, 3)": ("x∈(−∞,3)|x<3|3>x|（-∞，3）|(-∞,3)", "x\\le 3|(-\\infty,3]|x>3"),
    "x < 3": ("(-\\infty,3)|3 > x", "x \\le 3"),
    "[-2, 7]": ("-2 \\le x \\le 7|x \\in [-2,7]", "(-2,7)"),
    "0.12": ("12%|12\\%|12 percent|12％|12٪|3/25", "12|1.2%|1.2|12 per mille"),
    "3/4": ("3 quarters|0.75|75%|¾", "3|4|3 fourteenths|3 halves"),
    "4": ("4|2^2|2²|√16|\\sqrt{16}", "2|2 squared|22|4 factorial"),
    "90": ("90|90°|90^\\circ|90 degrees|90\\text{ degrees}", "9|90 million"),
    "5 cm": ("5|5 cm|5\\text{ cm}|5.0 cm|5~\\text{cm}", "5 m|5 km|6 cm|5 cm^2"),
    "True": ("true|TRUE|\\text{True}|True.", "1|False|0|yes"),
    "no": ("No|\\text{no}", "on|yes"),
    "none of the above": ("None of the above.|\\text{none of the above}", "all of the above|none"),
    "\\text{Evelyn}": ("Evelyn", "Eve"),
    "C": ("\\text{(C)}", "D"),
    "25_8": ("25_8|25_{8}", "25_9|26_8"),
    "18": ("18 USD|18 men|18个|18 kg|18€|18 元", "18 or more|18 alpha|18x"),
    "5": ("x = 5|x=5|$5.00", "-5||1/0|\\frac{|}|\\infty"),
    "x=5": ("5", "y=5"),
    "$7$": ("\\(7\\)", "8"),
    "0": ("0.0", "0.0000001|1 000"),
    "2": ("2.0", "3 1/2"),
    "1000000": ("10^6|1 000 000", "1000001"),
    "100000": ("1e5", "1e4"),
    "1:2": ("1:2", "2:1"),
    "3:10": ("6:20", "10:3"),
    # 50% is 0.5, and 50
    "50\\%": ("0.5|50", "5|500"),
    "0.5": ("50\\%", "50"),
    "\\frac{100}{3}\\%": ("\\frac{1}{3}|33\\frac{1}{3}\\%", "\\frac{1}{4}"),
    "\\frac{1}{8}": ("12.5\\%", "12.5"),
    "33.33": ("33.33\\%", "33.34"),
    "7.2\\%": ("7.2", "7.3"),
    # expressions
    "-\\frac{1}{2}": ("\\frac{-1}{2}", "\\frac{1}{2}"),
    "2\\pi": ("2π|2 π|2\\cdot\\pi", "2|π|2\\pi^2|6.28"),
    "2\\sqrt{3}": ("2√3|√12|\\sqrt{12}", "√3|\\sqrt{3}2^2|12"),
    "\\sqrt{2}": ("√2", "1.414|\\sqrt{2}+10^{-20}"),
    "x^2-1": ("(x-1)(x+1)", "(x-1)^2"),
    "y = 2x+3": ("3+2x", "y=2x"),
    # tuples, sets, intervals
    "(1,2]": ("(1, 2]", "[1,2)"),
    "(-\\infty,1)\\cup(2,\\infty)": ("(2,\\infty)\\cup(-\\infty,1)", "(-\\infty,1)"),
    "1,2": ("2, 1|1，2|1、2", "12|1.2|(1,3)"),
    "7 \\text{ or } 8": ("8,7", "7"),
    "\\emptyset": ("\\{\\}|∅|\\varnothing", "0"),
    # exact numbers are compared exactly, decimals by their size too
    "1/3": ("2/6|0.33333333|0.\\dot{3}|x = 0.\\overline{3}", "0.333|0.333..."),
    "0.333": ("0.3330", "\\frac{1}{3}"),
    "\\frac{1}{2004!}": ("\\frac{2005}{2005!}", "\\frac{1}{2006!}"),
    "\\left(2^{-100}, 1\\right)": ("(2^{-100}, 1)", "(2^{-101}, 1)"),
    "\\{2^{-100}\\}": ("\\{2^{-100}\\}", "\\{2^{-101}\\}"),
    "x = 2^{-100}": ("2^{-100}", "2^{-101}"),
    "0.0000001": ("10^{-7}", "0.0000002"),
    "1.5 \\times 10^{-20}": ("15 \\times 10^{-21}", "2.5 \\times 10^{-20}"),
    # repeating decimals
    "0.\\overline{3}": ("1/3|0.\\overline{33}|0.\\bar{3}|0.\\bar3", "0.3|3|0.3\\overline{0}"),
    "1/6": ("0.1(6)|0.1\\overline{6}", "0.16"),
    "-\\frac{47}{22}": ("-2.1\\overline{36}", "-2.1\\overline{63}"),
    # times are words
    "3:45 p.m.": ("3:45 PM|3：45 p.m.|3:45pm|3:45 \\text{ p.m.}", "3:46 p.m.|3:45 a.m.|45|15|15:45"),
    "12:00": ("12:00", "13:00|12"),
    "12:05": ("12:05", "2.4"),
    "9:05": ("09:05", "9/5|5:09"),
}  # fmt: skip
ANNOUNCED = (
    "#### @",
    "**####** @",
    "A: @",
    "**A:** @",
    "Ａ：@",
    "so 7, \\boxed{9}?\n#### @\n",
    "答案A：@",
)
BOXED = ("\\boxed{@}", "so #### 7 and 9: $\\boxed{@}$.", "\\boxed{9}, no: \\fbox{@}", "答案是\\boxed{@}。",
         "\\boxed{@} in \\boxed notation", "{ \\{ \\boxed {@}")  # fmt: skip
PROSE = ("The answer is @", "答案是@", "总共@个", "so 7 * 9, which is **@**", "答え：@", "คำตอบ@")


def split(*groups: str) -> list[list[str]]:
    return [group.split("|") for group in groups]


def row(answer: str) -> dict:
    return dict(answer=answer, _source="rows:1")


@pytest.mark.parametrize("gold", NUMBERS)
def test_numbers_are_equal_in_every_spelling(gold):
    equal, others = split(*NUMBERS[gold])
    wrong = []
    for right, texts in ((1, equal), (0, others)):
        for text in texts:
            forms = [(gsm8k, form) for form in ANNOUNCED]
            if "apples" not in text:  # `boxed` compares other text than numbers as text
                forms += [(boxed, form) for form in BOXED]
            if right:  # prose may have several numbers
                forms += [(gsm8k_flexible, form) for form in ANNOUNCED[:5] + BOXED]
            if right and "\\" not in text and text[0] != "+":
                forms += [(gsm8k_flexible, form) for form in PROSE]
            wrong += [
                (reward.__name__, form.replace("@", text), right)
                for reward, form in forms
                if reward(form.replace("@", text), row(gold)) != right
            ]
            if right and "apples" not in text and gsm8k(f"#### {gold}", row(text)) != 1:
                wrong.append(("gold", text, right))
    assert not wrong


@pytest.mark.parametrize("gold", NUMBERS | TEXTS)
def test_boxed_and_votes_compare_values(gold):
    equal, others = split(*(NUMBERS | TEXTS)[gold])
    equal = [gold, *(text for text in equal if "apples" not in text)]
    votes = {final_answer(f"\\boxed{{{text}}}") for text in equal}
    assert len(votes) == 1, votes
    assert not votes & {final_answer(f"\\boxed{{{text}}}") for text in others}
    assert [text for text in equal + others if boxed(f"\\boxed{{{text}}}", row(gold))] == equal
    assert [text for text in equal + others if boxed(f"\\boxed{{{gold}}}", row(text))] == equal


@pytest.mark.parametrize("gold, texts", [*(NUMBERS | TEXTS).items(), *MATHS.items()])
def test_math_compares_values(gold, texts):
    equal, others = split(*texts)
    forms = ("$\\boxed{@}$", "so 7?\n\n#### @\n", "\\boxed{9}? No: $\\boxed{@}$。")
    cases = [(form, text, gold, 1) for text in equal for form in forms]
    cases += [(form, text, gold, 0) for text in others for form in forms]
    cases += [("\\boxed{@}", equal[0], f"thus \\boxed{{{gold}}}", 1)]
    wrong = [case for case in cases if math(case[0].replace("@", case[1]), row(case[2])) != case[3]]
    assert not wrong


@pytest.mark.parametrize("gold", [5, 5.0, ["7", "\\frac{10}{2}"]])
def test_math_reads_numbers_and_lists_of_answers(gold):
    assert math("\\boxed{5}", row(gold)) == 1 and math("\\boxed{6}", row(gold)) == 0


@pytest.mark.parametrize(
    "form", ["Answer：@", "Answer:@", "答案是@。", "总共@个。", "答案：@", "The answer is @."]
)
def test_math_finds_answers_in_prose(form):
    equal, others = split("18|18.0|１８|−18|18 km", "180|18 million|18 thousand|18万|1,8|18²")
    for text in equal:
        assert math(form.replace("@", text), row("-18" if text == "−18" else "18")) == 1, text
    assert not [text for text in others if math(form.replace("@", text), row("18"))]


WORDS = ["café", "서울", "한국어", "Ångström", "Å", "दिल्ली", "ญี่ปุ่น", "x̂", "القاهِرة", "Öl", "巴黎"]


@pytest.mark.parametrize("word", WORDS)
def test_canonically_equal_texts_are_equal(word):
    one, other = (unicodedata.normalize(form, word) for form in ("NFC", "NFD"))
    for gold, text in ((one, other), (other, one), (one, one)):
        assert boxed(f"\\boxed{{{text}}}", row(gold)) == 1
        assert math(f"\\boxed{{{text}}}", row(gold)) == math(f"#### {text}", row(gold)) == 1
        assert math(f"\\boxed{{{text}o}}", row(gold)) == math("\\boxed{18}", row(gold)) == 0
        assert final_answer(f"The answer is {text}.") == final_answer(f"The answer is {gold}.")


# ---- generated values ----

WIDE = {i: i + 0xFEE0 for i in range(0x21, 0x7F)}
MARKS = str.maketrans("%:,.-$()", "％：，．－＄（）")
SCRIPTS = [str.maketrans("0123456789", "".join(chr(zero + i) for i in range(10)))
           for zero in (0xFF10, 0x660, 0x6F0, 0x966, 0xE50, 0x1D7CE)]  # fmt: skip


@given(st.integers(-(10**8), 10**8), st.integers(0, 999), st.booleans(), st.sampled_from(SCRIPTS),
       st.sampled_from([None, WIDE, MARKS]), st.sampled_from(["", ".", " ", "。", "，", "个", "元", " km", "다"]),
       st.integers(-3, 3))  # fmt: skip
def test_digits_and_marks_of_any_script_do_not_change_a_score(
    whole, part, commas, script, marks, behind, change
):
    text = f"{whole:,}" if commas else f"{whole}.{part:03}"
    gold = row(text.replace(",", "") if not change else str(whole + change * 7))
    for form, reward in (("#### @", gsm8k), ("\\boxed{@}", boxed), ("是@", gsm8k_flexible)):
        written = text.translate(script)
        completion = form.replace("@", written.translate(marks) if marks else written)
        if "{" not in form:
            completion += behind
        assert reward(completion, gold) == (not change), completion


CONTEXTS = st.lists(st.sampled_from([
    "So 7 * 9 = 63.\n", "\\boxed{7}", "#### 7\n", "A: 7\n", "{", "}", "\\{", "$", "`", "**", "答案是7。", " ",
    "\n", "<b>", "(7", "\\[", "1.", "2)", "- ", "7,", "\u200b", "（", "Answer: 7\n", "\\text{", "\\left\\{",
])).map("".join)  # fmt: skip


@given(CONTEXTS, st.sampled_from(["18", "18.0", "1,8", "１８", "-18", "18 million", "18万"]))
def test_what_stands_before_an_answer_does_not_change_it(before, text):
    for form, reward in (("\n#### @", gsm8k), ("\\boxed{@}", boxed), ("\\boxed{@}", gsm8k_flexible),
                         ("\\boxed{@}", math), ("\n#### @", math)):  # fmt: skip
        if reward is math and form == "\n#### @" and "\\boxed" in before:
            continue  # a box wins
        answer = form.replace("@", text)
        assert reward(before + answer, row("18")) == reward(answer, row("18"))
    assert final_answer(f"{before}\\boxed{{{text}}}") == final_answer(f"\\boxed{{{text}}}")


@given(st.text(max_size=80))
def test_plain_text_stays_plain(text):
    assert plain(plain(text)) == plain(text) and isinstance(value_of(text), Fraction | str)
    assert value_of(text) == value_of(plain(text))


# ---- boxes, JSON text, gold answers ----


@pytest.mark.parametrize("content", [
    r"\left\{x, y\right.", r"\{1, 2\}", r"\{1", r"1\}", r"\frac{1}{2}", r"\\{x}\\", r"\{\{",
])  # fmt: skip
def test_escaped_braces_do_not_count(content):
    assert last_boxed(rf"so {{ \boxed{{{content}}} }}") == content
    assert boxed(rf"\boxed{{{content}}}", row(rf"\boxed{{{content}}}")) == 1


@pytest.mark.parametrize("text", ['["4", "four"]', ' ["4"]', '[4, "four"]'])
def test_list_of_texts_as_json_is_refused(text):
    with pytest.raises(ValueError, match="rows:1: column answer: expected the list itself"):
        check_answer(row(text))
    check_answer(row([text]))


@pytest.mark.parametrize("text", ["[1, 2]", "[1, 2)", "{1, 2}", '{"a": 1}', "[x]", "[", "4", ""])
def test_other_texts_with_brackets_are_answers(text):
    check_answer(row(text))
    assert isinstance(from_json(text), str) == (text not in ("[1, 2]", '{"a": 1}'))


def test_gold_answer_that_failed_once_is_parsed_again(monkeypatch):
    """math-verify turns a MemoryError into an answer that it does not understand."""
    from math_verify import parser

    gold = r"\frac{x + 17}{23}"
    with monkeypatch.context() as short:

        def fail(*arguments):
            raise MemoryError

        short.setattr(parser, "extract_latex", fail)
        with pytest.raises(ValueError, match="rows:1: math-verify does not understand"):
            math(rf"\boxed{{{gold}}}", row(gold))
    assert math(rf"\boxed{{{gold}}}", row(gold)) == 1
