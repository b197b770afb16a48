"""The `ifeval` reward: verifiable instructions (IFEval, arXiv:2311.07911), checked by rules alone.

A row names its instructions in two columns, as the public dataset `google/IFEval` does:

    instruction_id_list: ["length_constraints:number_words", "punctuation:no_comma"]
    kwargs:              [{"relation": "at least", "num_words": 300}, {}]

`INSTRUCTIONS` lists all instructions. The rules are those of the paper's checker, lenient where it is lenient, so that
scores can be compared, except that

- keywords, markers and section names are text, never regular expressions;
- there is no language detector: `english_capital` and `english_lowercase` check only the case of the letters, and rows
  with `language:response_language` are refused;
- sentences and capital words are counted by the rules at `number_sentences` and `CAPITAL_TOKEN`; the checker uses
  NLTK's trained splitter and tokenizer.

A completion may be any text: every check takes time linear in it.
"""

import json
import re

CONSTRAINED_RESPONSE = re.compile(r"My answer is (?:yes|no|maybe)\.")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
CAPITAL_TOKEN = re.compile(r"\w+(?:[-./]\w+)*")  # hyphens, dots and slashes inside do not divide a word; "'" does
CLOSING = "\"')]}*_`”’»"  # may stand between the end of a sentence and the next white space
ABBREVIATIONS = set("mr. mrs. ms. dr. prof. st. jr. sr. vs. e.g. i.e. cf. inc. ltd. co. corp. u.s. u.k.".split())


def ifeval(completion: str, row: dict) -> float:
    """Return the fraction of the row's instructions that the completion follows, in [0, 1]. The share of rows with 1 is
    the paper's strict accuracy by prompt. A completion of white space follows none.

    Columns: `instruction_id_list`, `kwargs` (a dict of arguments for each instruction; tables fill gaps with nulls, so
    None, for an argument or a dict, counts as missing).
    """
    if not completion.strip():
        return 0.0
    followed = 0
    for instruction, kwargs in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        function, names = INSTRUCTIONS[instruction]
        followed += function(completion, *(kwargs[name] for name in names))
    return followed / len(row["kwargs"])


def check(row: dict) -> None:
    """Raise `ValueError` naming the row if its instructions cannot be checked: lists that are empty or of different
    lengths, an unknown id, an argument that is missing or of the wrong type."""
    ids, all_kwargs, where = row["instruction_id_list"], row["kwargs"], row["_source"]
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where}: instruction_id_list: expected a list of instructions, got {ids!r}")
    if not isinstance(all_kwargs, list) or len(all_kwargs) != len(ids):
        found = len(all_kwargs) if isinstance(all_kwargs, list) else repr(all_kwargs)
        raise ValueError(f"{where}: kwargs: expected a dict for each of the {len(ids)} instructions, got {found}")
    for instruction, kwargs in zip(ids, all_kwargs, strict=True):
        if instruction == "language:response_language":
            raise ValueError(f"{where}: {instruction} needs a language detector, which ifeval lacks; drop the row")
        if not isinstance(instruction, str) or instruction not in INSTRUCTIONS:
            raise ValueError(f"{where}: unknown instruction {instruction!r}; there are {', '.join(INSTRUCTIONS)}")
        if not isinstance(kwargs, dict | None):
            raise ValueError(f"{where}: the kwargs of {instruction}: expected a dict, got {kwargs!r}")
        for name in INSTRUCTIONS[instruction][1]:
            (expected, is_right), value = ARGUMENTS[name], (kwargs or {}).get(name)
            if value is None or not is_right(value):
                found = "nothing" if value is None else repr(value)
                raise ValueError(f"{where}: {instruction}: argument {name}: expected {expected}, got {found}")


ifeval.columns = ("instruction_id_list", "kwargs")
ifeval.check = check


# ---- keywords: not case-sensitive ----


def keywords_exist(text: str, keywords: list[str]) -> bool:
    """Check that every keyword occurs, inside a longer word too."""
    text = text.lower()
    return all(keyword.lower() in text for keyword in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Count occurrences that do not overlap, inside longer words too."""
    return compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def no_forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """Check that none of them occurs as a whole word."""
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Count a character; the dataset counts # and ! too."""
    return compare(text.lower().count(letter.lower()), let_relation, let_frequency)


# ---- lengths ----


def number_words(text: str, num_words: int, relation: str) -> bool:
    """Count runs of letters, digits and underscores: "don't" is two words."""
    return compare(len(re.findall(r"\w+", text)), relation, num_words)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Count sentences with a letter in them. A sentence ends with the text, or with a word that ends in . ! or ? (also
    before quotes and brackets) and is no initial ("J.") or common abbreviation. Line breaks end no sentence."""
    count, inside = 0, False
    for word in text.split():
        core = word.rstrip(CLOSING)
        inside = inside or any(map(str.isalpha, core))
        initial = len(core) == 2 and core[0].isupper() and core != "I."
        abbreviation = initial or core.lstrip("([\"'“‘").lower() in ABBREVIATIONS
        if inside and not abbreviation and core.endswith((".", "!", "?", "…", "。", "！", "？")):
            count, inside = count + 1, False
    return compare(count + inside, relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check for exactly so many paragraphs, divided by ***."""
    return len(divide(text, "***")) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Check for exactly so many paragraphs, divided by empty lines, the nth (from 1) of which starts with the word."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if len(paragraphs) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"""[.,?!'"]""", word, maxsplit=1)[0].lower() == first_word.lower()


# ---- content and format ----


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """Check for at least so many [placeholders], each within a line."""
    # The closing bracket is optional: a "[" without one then uses up its line, which keeps the time linear.
    return re.findall(r"\[[^\n\]]*+(\]?)", text).count("]") >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """Check that the marker occurs anywhere, in any case; the dataset's two also with white space inside."""
    marker = postscript_marker.strip()
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Check for exactly so many lines that start with "-", or with one "*" and other text."""
    return sum(bool(re.match(r"-|\*[^*]", line.lstrip())) for line in text.split("\n")) == num_bullets


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Check for at least so many *highlights* and **highlights**, each within a line and not blank."""
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(highlight.strip()) for highlight in found) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Check for at least so many numbered headings (`Section 1`), case-sensitive. `section_spliter` is the dataset's
    spelling."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Check that the whole completion is one JSON value, bare or in a ``` block."""
    text = text.strip()
    for prefix in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(prefix)
    try:
        # Numbers stay text: Python refuses to convert integers of thousands of digits, which JSON allows.
        json.loads(text.removesuffix("```").strip(), parse_int=str, parse_float=str)
    except (ValueError, RecursionError):  # the second for brackets nested thousands deep
        return False
    return True


def title(text: str) -> bool:
    """Check that a line has <<a title>>, not blank."""
    # A regular expression would look for the ">>" anew from every "<<" of a line.
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("<>").strip() for line in text.split("\n"))


# ---- combinations, start and end, case ----


def two_responses(text: str) -> bool:
    """Check for two different responses, divided by ******."""
    responses = divide(text, "******")
    return len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """Check the last words; a double quotation mark may follow them."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Count words with a capital letter and without a small one, such as "A" and "3D"."""
    return compare(sum(map(str.isupper, CAPITAL_TOKEN.findall(text))), capital_relation, capital_frequency)


# ---- shared by the checks ----


def compare(count: int, relation: str, bound: int) -> bool:
    return count >= bound if relation == "at least" else count < bound


def divide(text: str, divider: str) -> list[str]:
    """Return the stripped parts between dividers, which may also stand at the very start and end. An empty part between
    two of them makes the list empty, which no instruction requires."""
    first, *rest = (part.strip() for part in text.split(divider))
    return [part for part in (first, *rest) if part] if all(rest[:-1]) else []


def is_count(value: object) -> bool:  # also 300.0: a table turns columns with gaps into floats
    return (type(value) is int or (type(value) is float and value.is_integer())) and value >= 0


def is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


COUNT = ("a whole number >= 0", is_count)
POSITION = ("a whole number >= 1", lambda value: is_count(value) and value >= 1)
RELATION = ('"at least" or "less than"', lambda value: value in ("at least", "less than"))
LETTER = ("one character", lambda value: is_text(value) and len(value) == 1)
TEXT = ("a text that is not blank", is_text)
TEXTS = ("a list of texts", lambda value: isinstance(value, list) and bool(value) and all(map(is_text, value)))
# fmt: off
ARGUMENTS = dict(
    num_words=COUNT, num_sentences=COUNT, num_placeholders=COUNT, num_bullets=COUNT, num_highlights=COUNT,
    num_sections=COUNT, frequency=COUNT, let_frequency=COUNT, capital_frequency=COUNT, num_paragraphs=POSITION,
    nth_paragraph=POSITION, relation=RELATION, let_relation=RELATION, capital_relation=RELATION, letter=LETTER,
    keyword=TEXT, keywords=TEXTS, forbidden_words=TEXTS, section_spliter=TEXT, postscript_marker=TEXT, first_word=TEXT,
    prompt_to_repeat=TEXT, end_phrase=TEXT,
)
INSTRUCTIONS = {  # id -> (check, its arguments in their order)
    "keywords:existence": (keywords_exist, ("keywords",)),
    "keywords:frequency": (keyword_frequency, ("keyword", "frequency", "relation")),
    "keywords:forbidden_words": (no_forbidden_words, ("forbidden_words",)),
    "keywords:letter_frequency": (letter_frequency, ("letter", "let_frequency", "let_relation")),
    "length_constraints:number_words": (number_words, ("num_words", "relation")),
    "length_constraints:number_sentences": (number_sentences, ("num_sentences", "relation")),
    "length_constraints:number_paragraphs": (number_paragraphs, ("num_paragraphs",)),
    "length_constraints:nth_paragraph_first_word":
        (nth_paragraph_first_word, ("num_paragraphs", "nth_paragraph", "first_word")),
    "detectable_content:number_placeholders": (number_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (number_bullet_lists, ("num_bullets",)),
    "detectable_format:constrained_response": (lambda text: CONSTRAINED_RESPONSE.search(text) is not None, ()),
    "detectable_format:number_highlighted_sections": (number_highlighted_sections, ("num_highlights",)),
    "detectable_format:multiple_sections": (multiple_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (json_format, ()),
    "detectable_format:title": (title, ()),
    "combination:two_responses": (two_responses, ()),
    "combination:repeat_prompt": (repeat_prompt, ("prompt_to_repeat",)),
    "startend:end_checker": (end_checker, ("end_phrase",)),
    "startend:quotation": (quotation, ()),
    "change_case:capital_word_frequency": (capital_word_frequency, ("capital_frequency", "capital_relation")),
    "change_case:english_capital": (str.isupper, ()),  # at least one letter with a case, and none of the other case
    "change_case:english_lowercase": (str.islower, ()),
    "punctuation:no_comma": (lambda text: "," not in text, ()),
}
# fmt: on
