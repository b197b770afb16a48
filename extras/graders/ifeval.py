"""The `ifeval` reward: verifiable instructions (IFEval, arXiv:2311.07911), checked by rules alone.

A row names its instructions in two columns, as the public dataset `google/IFEval` does:

    instruction_id_list: ["length_constraints:number_words", "punctuation:no_comma"]
    kwargs:              [{"relation": "at least", "num_words": 300}, {}]

`INSTRUCTIONS` lists all instructions. The rules are those of the paper's checker, lenient where it
is lenient, so that scores can be compared, except that

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
from typing import Annotated

POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
# hyphens, dots and slashes inside do not divide a word; "'" does
CAPITAL_TOKEN = re.compile(r"\w+(?:[-./]\w+)*")
CLOSING = "\"')]}*_`”’»"  # may stand between the end of a sentence and the next white space
ABBREVIATIONS = set(
    "mr. mrs. ms. dr. prof. st. jr. sr. vs. e.g. i.e. cf. inc. ltd. co. corp. u.s. u.k.".split()
)


# ---- the forms of arguments ----


def is_count(value: object) -> bool:  # also 300.0: a table turns columns with gaps into floats
    return (type(value) is int or (type(value) is float and value.is_integer())) and value >= 0


def is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


# each with the form that an error names, and a predicate
Count = Annotated[int, "a whole number >= 0", is_count]
Position = Annotated[int, "a whole number >= 1", lambda value: is_count(value) and value >= 1]
Relation = Annotated[
    str, '"at least" or "less than"', lambda value: value in ("at least", "less than")
]
Letter = Annotated[str, "one character", lambda value: is_text(value) and len(value) == 1]
Text = Annotated[str, "a text that is not blank", is_text]
Texts = Annotated[list[str], "a list of texts", are_texts]


# ---- the reward ----


def ifeval(completion: str, row: dict) -> float:
    """Return the fraction of the row's instructions that the completion follows, in [0, 1]. The
    share of rows with 1 is the paper's strict accuracy by prompt. A completion of white space
    follows none.

    Columns: `instruction_id_list`, `kwargs` (a dict of arguments for each instruction; tables fill
    gaps with nulls, so None, for an argument or a dict, counts as missing)."""
    if not completion.strip():
        return 0.0
    followed = 0
    for instruction, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        arguments = [kwargs[name] for name in arguments_of(instruction)]
        followed += INSTRUCTIONS[instruction](completion, *arguments)
    return followed / len(row["kwargs"])


def check(row: dict) -> None:
    """Raise `ValueError` naming the row if its instructions cannot be checked: lists that are empty
    or of different lengths, an unknown id, an argument that is missing or of the wrong type."""
    source = row["_source"]
    ids = row["instruction_id_list"]
    all_kwargs = row["kwargs"]
    if not isinstance(ids, list) or not ids:
        expected = "expected a list of instructions"
        raise ValueError(f"{source}: instruction_id_list: {expected}, got {ids!r}")
    if not isinstance(all_kwargs, list) or len(all_kwargs) != len(ids):
        got = len(all_kwargs) if isinstance(all_kwargs, list) else repr(all_kwargs)
        expected = f"expected a dict for each of the {len(ids)} instructions"
        raise ValueError(f"{source}: kwargs: {expected}, got {got}")
    for instruction, kwargs in zip(ids, all_kwargs, strict=True):
        try:
            check_instruction(instruction, kwargs)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def check_instruction(instruction: object, kwargs: object) -> None:
    if instruction == "language:response_language":
        problem = "needs a language detector, which ifeval lacks; drop the row"
        raise ValueError(f"{instruction} {problem}")
    if not isinstance(instruction, str) or instruction not in INSTRUCTIONS:
        names = ", ".join(INSTRUCTIONS)
        raise ValueError(f"unknown instruction {instruction!r}; there are {names}")
    if not isinstance(kwargs, dict | None):
        raise ValueError(f"the kwargs of {instruction}: expected a dict, got {kwargs!r}")
    for name, (expected, is_right) in arguments_of(instruction).items():
        value = (kwargs or {}).get(name)
        if value is None or not is_right(value):
            got = "nothing" if value is None else repr(value)
            raise ValueError(f"{instruction}: argument {name}: expected {expected}, got {got}")


@cache
def arguments_of(instruction: str) -> dict[str, tuple]:
    """Return the form of each argument: those of the parameters of the check behind the text."""
    _, *parameters = inspect.signature(INSTRUCTIONS[instruction]).parameters.values()
    return {parameter.name: parameter.annotation.__metadata__ for parameter in parameters}


ifeval.columns = ("instruction_id_list", "kwargs")
ifeval.check = check


# ---- keywords: not case-sensitive ----


def existence(text: str, keywords: Texts) -> bool:
    """Check that every keyword occurs, inside a longer word too."""
    text = text.lower()
    return all(keyword.lower() in text for keyword in keywords)


def frequency(text: str, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """Count occurrences that do not overlap, inside longer words too."""
    return compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def forbidden_words(text: str, forbidden_words: Texts) -> bool:
    """Check that none of them occurs as a whole word."""
    return not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)
        for word in forbidden_words
    )


def letter_frequency(
    text: str, letter: Letter, let_frequency: Count, let_relation: Relation
) -> bool:
    """Count a character; the dataset counts # and ! too."""
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_words(text: str, num_words: Count, relation: Relation) -> bool:
    """Count runs of letters, digits and underscores: "don't" is two words."""
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


def number_sentences(text: str, num_sentences: Count, relation: Relation) -> bool:
    """Count sentences with a letter in them. A sentence ends with the text, or with a word that
    ends in . ! or ? (also before quotes and brackets) and is no initial ("J.") or common
    abbreviation. Line breaks end no sentence."""
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
    return compare(count + inside, relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: Position) -> bool:
    """Check for exactly so many paragraphs, divided by ***."""
    return len(divide(text, "***")) == num_paragraphs


def nth_paragraph_first_word(
    text: str, num_paragraphs: Position, nth_paragraph: Position, first_word: Text
) -> bool:
    """Check for exactly so many paragraphs, divided by empty lines, the nth (from 1) of which
    starts with the word."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"""[.,?!'"]""", word, maxsplit=1)[0].lower() == first_word.lower()


# ---- content and format ----


def number_placeholders(text: str, num_placeholders: Count) -> bool:
    """Check for at least so many [placeholders], each within a line."""
    # The closing bracket is optional: a "[" without one then uses up its line, which keeps the time
    # linear.
    return re.findall(r"\[[^\n\]]*+(\]?)", text).count("]") >= num_placeholders


def postscript(text: str, postscript_marker: Text) -> bool:
    """Check that the marker occurs anywhere, in any case; the dataset's two also with white space
    inside."""
    marker = postscript_marker.strip()
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: Count) -> bool:
    """Check for exactly so many lines that start with "-", or with one "*" and other text."""
    bullets = [re.match(r"-|\*[^*]", line.lstrip()) for line in text.split("\n")]
    return sum(map(bool, bullets)) == num_bullets


def constrained_response(text: str) -> bool:
    return re.search(r"My answer is (?:yes|no|maybe)\.", text) is not None


def number_highlighted_sections(text: str, num_highlights: Count) -> bool:
    """Check for at least so many *highlights* and **highlights**, each within a line and not
    blank."""
    highlights = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(highlight.strip() != "" for highlight in highlights) >= num_highlights


def multiple_sections(text: str, section_spliter: Text, num_sections: Count) -> bool:
    """Check for at least so many numbered headings (`Section 1`), case-sensitive. `section_spliter`
    is the dataset's spelling."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


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
    """Check that a line has <<a title>>, not blank."""
    # A regular expression would look for the ">>" anew from every "<<" of a line.
    titles = [line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n")]
    return any(title.strip("<>").strip() for title in titles)


def two_responses(text: str) -> bool:
    """Check for two different responses, divided by ******."""
    responses = divide(text, "******")
    return len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: Text) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: Text) -> bool:
    """Check the last words; a double quotation mark may follow them."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Count words with a capital letter and without a small one, such as "A" and "3D"."""
    count = sum(map(str.isupper, CAPITAL_TOKEN.findall(text)))
    return compare(count, capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Check for at least one letter with a case, and for no small one."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    return text.islower()


def no_comma(text: str) -> bool:
    return "," not in text


# ---- shared by the checks ----


def compare(count: int, relation: Relation, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def divide(text: str, divider: str) -> list[str]:
    """Return the stripped parts between dividers, which may also stand at the very start and end.
    An empty part between two of them makes the list empty, which no instruction requires."""
    first, *rest = (part.strip() for part in text.split(divider))
    return [part for part in (first, *rest) if part] if all(rest[:-1]) else []


# the second half of an instruction's id is the name of its check
CHECKS = dict(
    keywords=(existence, frequency, forbidden_words, letter_frequency),
    length_constraints=(
        number_words,
        number_sentences,
        number_paragraphs,
        nth_paragraph_first_word,
    ),
    detectable_content=(number_placeholders, postscript),
    detectable_format=(
        number_bullet_lists,
        constrained_response,
        number_highlighted_sections,
        multiple_sections,
        json_format,
        title,
    ),
    combination=(two_responses, repeat_prompt),
    startend=(end_checker, quotation),
    change_case=(capital_word_frequency, english_capital, english_lowercase),
    punctuation=(no_comma,),
)
INSTRUCTIONS: dict[str, Callable[..., bool]] = {}
for kind, checks in CHECKS.items():
    INSTRUCTIONS |= {f"{kind}:{function.__name__}": function for function in checks}
