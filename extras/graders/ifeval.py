"""The `ifeval` reward: verifiable instructions (IFEval, arXiv:2311.07911), checked by rules alone.

A row names its instructions in two columns, as the public dataset `google/IFEval` does:

    instruction_id_list: ["length_constraints:number_words", "punctuation:no_comma"]
    kwargs:              [{"relation": "at least", "num_words": 300}, {}]

`INSTRUCTIONS` lists all instructions. The rules follow the paper's checker, lenient where it is
lenient, so that scores can be compared, except that

- keywords, markers and section names are text, never regular expressions;
- there is no language detector: `english_capital` and `english_lowercase` check only the case of
  the letters, and rows with `language:response_language` are refused;
- sentences and capital words are counted by the rules at `number_sentences` and `CAPITAL_TOKEN`;
  the checker uses NLTK's trained splitter and tokenizer.

A completion may be any text: every check takes time linear in it.
"""

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from common.rewards.answers import from_json

POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
# hyphens, dots and slashes inside do not divide a word; "'" does
CAPITAL_TOKEN = re.compile(r"\w+(?:[-./]\w+)*")
CLOSING = "\"')]}*_`”’»"  # may stand between the end of a sentence and the next white space
ABBREVIATIONS = set(
    "mr. mrs. ms. dr. prof. st. jr. sr. vs. e.g. i.e. cf. inc. ltd. co. corp. u.s. u.k.".split()
)


# ---- the reward ----


def ifeval(completion: str, row: dict) -> float:
    """Return the fraction of the row's instructions that the completion follows, in [0, 1]. The
    share of rows with 1 is the paper's strict accuracy by prompt. A blank completion follows none.

    Columns: `instruction_id_list`, and `kwargs`, a dict of arguments for each instruction. Tables
    fill gaps with nulls, so None in place of an argument or of a dict means that it is missing."""
    if not completion.strip():
        return 0.0
    checks = instructions_of(row)
    return sum(bool(check(completion, **arguments)) for check, arguments in checks) / len(checks)


def instructions_of(row: dict) -> list[tuple[Callable, dict]]:
    """Return the check of each instruction with its arguments. Raises `ValueError` naming the row
    if its lists are empty or of different lengths, an id is unknown, or an argument is missing or
    of the wrong type."""
    source = row.get("_source")
    ids = from_json(row["instruction_id_list"])
    all_kwargs = from_json(row["kwargs"])
    if not isinstance(ids, list) or not ids:
        expected = "expected a list of instructions"
        raise ValueError(f"{source}: instruction_id_list: {expected}, got {ids!r}")
    if not isinstance(all_kwargs, list) or len(all_kwargs) != len(ids):
        got = len(all_kwargs) if isinstance(all_kwargs, list) else repr(row["kwargs"])
        expected = f"expected a dict for each of the {len(ids)} instructions"
        raise ValueError(f"{source}: kwargs: {expected}, got {got}")
    try:
        arguments = list(map(arguments_for, ids, all_kwargs))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return [(INSTRUCTIONS[name], given) for name, given in zip(ids, arguments, strict=True)]


def arguments_for(instruction: object, kwargs: object) -> dict:
    if instruction == "language:response_language":
        problem = "needs a language detector, which ifeval lacks; drop the row"
        raise ValueError(f"{instruction} {problem}")
    if not isinstance(instruction, str) or instruction not in INSTRUCTIONS:
        names = ", ".join(INSTRUCTIONS)
        raise ValueError(f"unknown instruction {instruction!r}; there are {names}")
    if not isinstance(kwargs, dict | None):
        raise ValueError(f"the kwargs of {instruction}: expected a dict, got {kwargs!r}")
    arguments = {name: (kwargs or {}).get(name) for name in arguments_of(instruction)}
    for name, value in arguments.items():
        try:
            FORMS[name].validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"]
            raise ValueError(f"{instruction}: argument {name}: {problem}, got {value!r}") from error
    return arguments


@cache
def arguments_of(instruction: str) -> list[str]:
    """Return the names of an instruction's arguments: the parameters of its check after the
    text."""
    return list(inspect.signature(INSTRUCTIONS[instruction]).parameters)[1:]


ifeval.columns = ("instruction_id_list", "kwargs")
ifeval.check = instructions_of


# ---- the forms of arguments ----

# also 300.0: a table turns columns with gaps into floats
Count = Annotated[float, Field(ge=0, multiple_of=1, strict=True)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
NAMES_OF_FORMS = (
    (Count, "frequency let_frequency num_words num_sentences num_placeholders num_bullets"),
    (Count, "num_highlights num_sections capital_frequency"),
    (Annotated[Count, Field(ge=1)], "num_paragraphs nth_paragraph"),
    (Literal["at least", "less than"], "relation let_relation capital_relation"),
    (Annotated[list[Text], Field(min_length=1)], "keywords forbidden_words"),
    (Text, "keyword first_word postscript_marker section_spliter prompt_to_repeat end_phrase"),
    (Annotated[Text, Field(max_length=1)], "letter"),
)
FORMS = {name: TypeAdapter(form) for form, names in NAMES_OF_FORMS for name in names.split()}


# ---- checks of more than one line ----


def compare(count: int, relation: str, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def divide(text: str, divider: str) -> list[str]:
    """Return the stripped parts between dividers. A divider may also stand at the very start and
    end. If a part between two of them is empty, return no parts, which satisfies no instruction."""
    first, *rest = (part.strip() for part in text.split(divider))
    return [part for part in (first, *rest) if part] if all(rest[:-1]) else []


def count_sentences(text: str) -> int:
    """Return the number of sentences that have a letter. A sentence ends at the end of the text, or
    at a word that ends in . ! or ? (also before quotes and brackets), unless the word is an initial
    ("J.") or a common abbreviation. A line break ends no sentence."""
    count = 0
    inside = False  # a sentence
    for word in text.split():
        core = word.rstrip(CLOSING)
        inside = inside or any(map(str.isalpha, core))
        initial = len(core) == 2 and core[0].isupper() and core != "I."
        abbreviation = initial or core.lstrip("([\"'“‘").lower() in ABBREVIATIONS
        if inside and not abbreviation and core.endswith((".", "!", "?", "…", "。", "！", "？")):
            count += 1
            inside = False
    return count + inside


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: float, first_word: str
) -> bool:
    """Check that there are exactly so many paragraphs, divided by empty lines, and that the nth
    (from 1) begins with the word."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"""[.,?!'"]""", word, maxsplit=1)[0].lower() == first_word.lower()


def postscript(text: str, postscript_marker: str) -> bool:
    """Check that the marker occurs anywhere, in any case; the dataset's two also with spaces
    inside."""
    marker = postscript_marker.strip()
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Check for at least so many *highlights* or **highlights**, not blank, each within a line."""
    highlights = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(highlight.strip() != "" for highlight in highlights) >= num_highlights


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """Check that none of them occurs as a whole word."""
    words = "|".join(map(re.escape, forbidden_words))
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE) is None


def json_format(text: str) -> bool:
    """Check that the whole completion is one JSON value, bare or in a ``` block."""
    text = text.strip()
    for prefix in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(prefix)
    try:
        # Numbers stay text: Python refuses to convert integers of thousands of digits, which JSON
        # allows.
        json.loads(text.removesuffix("```").strip(), parse_int=str, parse_float=str)
    except (ValueError, RecursionError):  # the second for brackets nested thousands deep
        return False
    return True


def title(text: str) -> bool:
    """Check that some line has <<a title>> that is not blank."""
    # A regular expression would look for the ">>" anew from every "<<" of a line.
    titles = [line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n")]
    return any(title.strip("<>").strip() for title in titles)


def two_responses(text: str) -> bool:
    """Check for two different responses, divided by ******."""
    responses = divide(text, "******")
    return len(responses) == 2 and responses[0] != responses[1]


# ---- all instructions ----

INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    # keywords are not case-sensitive, and occur inside longer words too
    "keywords:existence": lambda text, keywords: all(
        keyword.lower() in text.lower() for keyword in keywords
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": forbidden_words,
    # the dataset counts # and ! too
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    # runs of letters, digits and underscores: "don't" is two words
    "length_constraints:number_words": lambda text, num_words, relation: compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(divide(text, "***")) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    # at least so many [placeholders], each within a line. The closing bracket is optional: a "["
    # without one then uses up its line, which keeps the time linear.
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        re.findall(r"\[[^\n\]]*+(\]?)", text).count("]") >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    # exactly so many lines that start with "-", or with one "*" and other text
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        sum(bool(re.match(r"-|\*[^*]", line.lstrip())) for line in text.split("\n")) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: (
        re.search(r"My answer is (?:yes|no|maybe)\.", text) is not None
    ),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    # at least so many numbered headings (`Section 1`); the name is the dataset's spelling
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    # a double quotation mark may follow the last words
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'\s*".*"\s*', text, re.DOTALL) is not None,
    # words with a capital letter and without a small one, such as "A" and "3D"
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        sum(map(str.isupper, CAPITAL_TOKEN.findall(text))), capital_relation, capital_frequency
    ),
    # at least one letter with a case, and no small one
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda text: "," not in text,
}
