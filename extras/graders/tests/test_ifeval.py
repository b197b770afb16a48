"""IFEval's instructions: completions that follow each or violate it, and malformed rows."""

import pytest

from common.rewards.registry import load_reward
from extras.graders.ifeval import INSTRUCTIONS, arguments_of, ifeval


def follows(completion: str, instruction: str, **kwargs) -> bool:
    """Check by the short name: `title` for `detectable_format:title`."""
    [full] = [i for i in INSTRUCTIONS if i.endswith(f":{instruction}")]
    row = dict(instruction_id_list=[full], kwargs=[kwargs], _source="rows.jsonl:1")
    ifeval.check(row)
    return ifeval(completion, row) == 1


# (instruction, its arguments, completions that follow it, completions that do not)
CASES = [
    ("existence", dict(keywords=["river", "Old town"]),
     ["The old TOWN by a RIVER", "rivers, old towns"], ["old town", "a river", "old  town, river"]),
    ("existence", dict(keywords=["c++ (", "."]), ["C++ (x)."], ["ccc(x)."]),  # no pattern
    ("frequency", dict(keyword=" ab ", frequency=2, relation="at least"),
     ["ab AB", "cabs ab", "ababa"], ["ab", "a"]),
    ("frequency", dict(keyword="ab", frequency=2, relation="less than"),
     ["ab", "none"], ["ab ab", "Ababab"]),
    ("forbidden_words", dict(forbidden_words=["rock", "c++"]),
     ["rocks, bedrock, rock_1", "c+ c++x"], ["the ROCK.", "rock", "in C++, too"]),
    ("letter_frequency", dict(letter="T", let_frequency=3, let_relation="at least"),
     ["tTt", "tt t"], ["that", "T"]),
    ("letter_frequency", dict(letter="#", let_frequency=2, let_relation="less than"),
     ["#a", "none"], ["#a #b", "###"]),
    ("number_words", dict(num_words=3, relation="at least"),
     ["a b c", "don't go", "one-two-3"], ["a b", "a . b !"]),
    ("number_words", dict(num_words=3.0, relation="less than"),
     ["a b", "!!"], ["a b c", "a\nb\nc d"]),
    ("number_sentences", dict(num_sentences=3, relation="at least"),
     ["Ab. b! c?", "It is. It was (really). Then more", "One.\n\nTwo.\n\nThree",
      "“Go.” **Stop!** On", "文。 文。 文。"],
     ["One. Two", "No end\nat all\nhere", "1. One.\n2. two.", "? ! .",
      "Dr. J. Doe vs. e.g. 3.5 others. Two"]),
    ("number_sentences", dict(num_sentences=2, relation="less than"),
     ["One", "One.", "Mr. A. Bee is 1.5 m tall"], ["One. Two.", "It was I. Then two"]),
    ("number_paragraphs", dict(num_paragraphs=2), ["a\n***\nb", "***a***b***", "a *** b\n\nc"],
     ["a", "a\n\nb", "a***b***c", "a *** *** b", "a***"]),
    ("nth_paragraph_first_word", dict(num_paragraphs=1, nth_paragraph=2, first_word="a"),
     [], ["a", "a\n\na"]),
    ("nth_paragraph_first_word", dict(num_paragraphs=2, nth_paragraph=2, first_word="Hello"),
     ["a\n\nhello there", "a\n\n'\"HELLO\"", "a\n\n\n\n hello, you\n\n", "a\n\nHello's"],
     ["hello\n\na", "a\n\nhello\n\nb", "hello", "a\n\nhelloes", "a\n\n**hello**", "a\nhello"]),
    ("number_placeholders", dict(num_placeholders=2),
     ["[a] [b]", "[a][b] [c]", "[] [\n[x [y] ]"], ["[a]", "[a\n] [b]", "]a[", "[[a]"]),
    ("postscript", dict(postscript_marker="P.S."),
     ["a\n\nP.S. b", "so p. s. b"], ["a PS b", "a P.S b", "P.\n\nS."]),
    ("postscript", dict(postscript_marker="P.P.S"),
     ["a\nP.P.S b", "P. P. S. b"], ["P.S. b", "PPS"]),
    ("postscript", dict(postscript_marker="(Note)"),
     ["a (NOTE) b", "(note)"], ["note", "a Note b"]),
    ("number_bullet_lists", dict(num_bullets=2),
     ["* a\n* b", "- a\n  - b\nc", "x\n\n\t*a\n-"],
     ["* a", "* a\n* b\n- c", "* a\n**b**", "* a\n1. b", "a * b\nc - d"]),
    ("constrained_response", {}, ["My answer is yes.", "So: My answer is maybe. Sorry"],
     ["My answer is yes", "my answer is no.", "Yes."]),
    ("number_highlighted_sections", dict(num_highlights=2),
     ["*a* and *b*", "**a b** *c*", "*a**b*"],
     ["*a*", "**a**", "*a\nb* *c*", "** ** *a*", "* *\n* * *a*", "****"]),
    ("multiple_sections", dict(section_spliter=" Section ", num_sections=2),
     ["Section 1\na\nSection 2\nb", "xSection1Section 2"],
     ["Section 1", "section 1 section 2", "Section A\nSection B", "Section  1 Section  2"]),
    ("multiple_sections", dict(section_spliter="S.", num_sections=1), ["S. 1"], ["SX 1"]),
    ("json_format", {},
     ['{"a": [1, null]}', '```json\n{"a": 1}\n```', "```\n[]\n```", "3", f"[{'9' * 9999}]"],
     ["{'a': 1}", '{"a": 1} so', "```json", "{", "[" * 9999 + "]" * 9999, "[1,]"]),
    ("title", {}, ["<<a>>\nb", "so << a b >> c", "<<<a>>>", "<<\n<<a>>"],
     ["<a>", "<<a", "<<>>", "<< >>", "<<<>>>", "<<a\n>>", ">>a<<"]),
    ("two_responses", {}, ["a ****** b", "******\na\n******\nb\n******"],
     ["a ****** a", "a", "a******b******c", "a *** b", "a ****** ****** b", "a ******"]),
    ("repeat_prompt", dict(prompt_to_repeat="Say it. "),
     ["say it. It", " SAY IT."], ["It. Say it.", "Say it"]),
    ("end_checker", dict(end_phrase=" Any questions?"),
     ["So. any questions?", 'Any QUESTIONS?" \n'], ["Any questions? No", "questions?"]),
    ("quotation", {}, ['"a"', ' "a" b "c"\n', '""'], ['"', '"a', 'a"', "“a”", "'a'"]),
    ("capital_word_frequency", dict(capital_frequency=2, capital_relation="at least"),
     ["A B", "(NASA), WELL-KNOWN", "NASA's 3D", "DON'T"],
     ["NASA's", "WELL-KNOWN", "U.S.", "1 2 3", "Ab Bc", "a.B C"]),
    ("capital_word_frequency", dict(capital_frequency=2, capital_relation="less than"),
     ["A b", "no"], ["A B", "I AM"]),
    ("english_capital", {}, ["A B 1!", "É"], ["A b", "Aa", "123"]),
    ("english_lowercase", {}, ["a b 1!", "é"], ["A b", "aA", "123"]),
    ("no_comma", {}, ["a; b", "a، b"], ["a, b", "1,000"]),
]  # fmt: skip


@pytest.mark.parametrize("instruction, kwargs, good, bad", CASES)
def test_instruction_separates_following_from_violating_completions(instruction, kwargs, good, bad):
    for completion in good:
        assert follows(completion, instruction, **kwargs), completion
    for completion in bad + ["", " \n\t"]:
        assert not follows(completion, instruction, **kwargs), completion


def test_every_instruction_has_cases():
    assert {instruction.partition(":")[2] for instruction in INSTRUCTIONS} == {
        case[0] for case in CASES
    }
    assert len(INSTRUCTIONS) == 24  # the paper has 25; the response's language is missing


# ---- rows ----

WORDS = "length_constraints:number_words"
RELATION = dict(relation="at least")


def row(*pairs) -> dict:
    names, kwargs = ([pair[i] for pair in pairs] for i in (0, 1))
    return dict(instruction_id_list=names, kwargs=kwargs, _source="rows.jsonl:3")


def test_reward_is_the_fraction_of_followed_instructions():
    """Every dict has the arguments of all instructions, as in the table of the public dataset."""
    nulls = dict.fromkeys(set().union(*map(arguments_of, INSTRUCTIONS)))
    example = row(
        ("punctuation:no_comma", None),
        ("detectable_format:number_highlighted_sections", nulls | dict(num_highlights=1)),
        (WORDS, nulls | dict(relation="at least", num_words=4)),
        (WORDS, nulls | dict(relation="less than", num_words=6, language="kn")),
    )
    ifeval.check(example)
    assert load_reward("ifeval") is ifeval and ifeval.columns == ("instruction_id_list", "kwargs")
    texts = {"*a* b c d": 4, "*a*, b c d": 3, "a, b c d": 2, "a, b c": 1, "": 0}
    for completion, followed in texts.items():
        assert ifeval(completion, example) == followed / 4
    assert ifeval("a, b c d e f", example) == 1 / 4


@pytest.mark.parametrize("broken, message", [
    (row(("language:response_language", {})), "response_language needs a language detector"),
    (row(("number_words", {})), "unknown instruction 'number_words'; there are keywords:existe"),
    (row(), "instruction_id_list: expected a list of instructions"),
    (row((WORDS, {})) | dict(kwargs=[]), "expected a dict for each of the 1 instructions, got 0"),
    (row((WORDS, "{}")), f"the kwargs of {WORDS}: expected a dict, got '{{}}'"),
    (row((WORDS, None)), f"{WORDS}: argument num_words: .* a valid number, got None"),
    (row((WORDS, dict(num_words=3, relation="at most"))), "argument relation: .* got 'at most'"),
    *((row((WORDS, RELATION | dict(num_words=value))), f"argument num_words: .* got {value!r}")
      for value in ("3", -1, 2.5)),
    (row(("keywords:existence", dict(keywords="river"))), "keywords: Input should be a valid list"),
    (row(("keywords:letter_frequency", dict(letter="ab"))), "letter: .* at most 1 character"),
    (row(("punctuation:no_comma", {}), (WORDS, {})), "argument num_words"),  # not only the first
])  # fmt: skip
def test_malformed_rows_are_refused_by_name(broken, message):
    with pytest.raises(ValueError, match=rf"^rows.jsonl:3: .*{message}"):
        ifeval.check(broken)
