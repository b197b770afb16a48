r"""Rewards for answers that a completion states: `choice` for multiple choice, and `stated` for a
short text, as in BIG-Bench Hard (arXiv:2210.09261).

The options of a row are recognised by their columns:

- `options` or `choices`: a list of texts, or {text: [...], label: [...]} (ARC). The right one is in
  `answer` or `answerKey`: an index from 0, a letter, a label, or the text of the option;
- `Correct Answer` and `Incorrect Answer 1` to `3` (GPQA), in an order that their texts determine.

A completion may be any text. It is read in a plain form, in which `**B**` is `(B)`, the text of
option B is `[B]`, and a box or an answer tag begins with `####`."""

import random
import re
import string
from collections.abc import Sequence

from common.rewards.answers import (
    LETTER,
    SCALE,
    as_text,
    check_answer,
    from_json,
    gold_answers,
    plain,
    value_of,
)

LETTERS = string.ascii_uppercase
OPTION_COLUMNS = ("options", "choices")
ANSWER_COLUMNS = ("answer", "answerKey")
GPQA_COLUMNS = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|<answer>", re.IGNORECASE)
LATEX_FONT = re.compile(r"\\(?:text|math)\w*\s*\{([^{}\n]*)\}")
NAMED_LETTER = re.compile(rf"\*\*\(?([A-Z])\)?\*\*|(?<!{LETTER})[Oo]ption ([A-Z])(?!{LETTER})")
# At the end of a line, `a` may be the article of an unfinished sentence.
SMALL_LETTER = re.compile(
    rf"(?<!{LETTER})\([a-z]\)|(?:(?<!{LETTER})[b-z]|^a)(?=\.? ?$)", re.MULTILINE
)

# "The answer to this question is", "Answer:", "the best option would be", "I choose", a box
NOUN = r"(?:answers?|option|choice|respuesta|réponse|antwort|resposta|risposta|ответ)"
ANSWER = rf"\b{NOUN}\b(?: (?!not\b|cannot\b|choices\b|options\b)\w{{2,30}}){{0,6}}?"
IS = r"(?::|=|\b(?:is|are|was|be|es|ist|est|é|è)\b:?)"
VERB = r"\b(?:choose|pick|select|go with)\b"
# 答案是, 答案应为, 故选, 答えは, 정답은; but neither 答案不是 nor 不选
NAMED_EAST = r"(?:选项|選項|选择|選擇|项|項)?"
ANSWER_EAST = r"(?:答案|答え|正解|정답|답)(?:应该|應該|应|應)?(?:是|为|為|选|選|は|은|는)?"
VERB_EAST = r"(?<!不)(?:选|選)(?:择|擇)?"
ANNOUNCED = (
    rf"(?i:(?:####|{ANSWER} ?{IS}|{VERB}|(?:{ANSWER_EAST}|{VERB_EAST}){NAMED_EAST} ?[:=]?)\s*)"
)
RIGHT_ONE = r"(?:correct|right|best|answer|option|choice|正[确確]的?|对的|正解)"
FILLERS = rf"(?i:(?:(?:therefore|most|\w{{1,20}}ly|either|both|the|letter|{RIGHT_ONE})\s+)*)"
OPTION = rf"[(\[]?(?<!{LETTER})[A-Z](?!{LETTER})[)\]]?"
OPTIONS = rf"{OPTION}(?:(?:,? (?:and|or) |, ?| ?[/&] ?|[和或与與及]){OPTION})*"
# What follows an option. An article is followed by a word: `The answer is A lot of work`.
WHY = r"(?:-|as|and|because|since|which|with|but)\s|选?项|選?項|因|是|で|だ|입|이|가"
END = rf"(?=\s*(?:$|[(–—]|[.,;:!?)](?!{LETTER})|{WHY}))"
LINE = rf"(?:[>•] ?|- )*{OPTION}(?: ?[.:)–-]* \[[A-Z]\])?[ .:;,!]*(?:\n|\Z)"
STATEMENTS = (
    rf"{ANNOUNCED}{FILLERS}({OPTIONS}){END}",
    rf"({OPTION}) ?(?:is |must be |would be |是|为){FILLERS}{RIGHT_ONE}{END}",
    rf"^((?:{LINE})+)",
)
STATEMENT = re.compile("|".join(STATEMENTS), re.MULTILINE)


def options_of(row: dict) -> tuple[list[str], int]:
    """Return the options of a row in the order of their letters, and the index of the right one.
    Raises `ValueError` naming the row if there are not 2 to 26, or if the answer is none of
    them."""
    source = row.get("_source")
    if all(row.get(column) is not None for column in GPQA_COLUMNS):
        options = [str(row[column]).strip() for column in GPQA_COLUMNS]
        correct = options[0]
        random.Random("\n".join(options)).shuffle(options)
        return options, options.index(correct)
    column = first_column(row, OPTION_COLUMNS)
    answer = row.get(first_column(row, ANSWER_COLUMNS))
    if column is None:
        expected = " or ".join((*OPTION_COLUMNS, "Correct Answer and Incorrect Answer 1 to 3"))
        raise ValueError(f"{source}: no options; expected the columns {expected}")
    options = from_json(row[column])
    labels = list(LETTERS)
    if isinstance(options, dict):
        labels = options.get("label")
        options = options.get("text")
    are_lists = isinstance(options, list) and isinstance(labels, list)
    if not are_lists or not all(isinstance(option, str | int | float) for option in options):
        expected = "expected a list of texts, or {text: [...], label: [...]}"
        raise ValueError(f"{source}: column {column}: {expected}, got {row[column]!r:.80}")
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"{source}: column {column}: expected 2 to 26 options, got {len(options)}")
    if answer is None:
        raise ValueError(f"{source}: no answer; expected a column {' or '.join(ANSWER_COLUMNS)}")
    options = [as_text(option).strip() for option in options]
    is_number = type(answer) in (int, float)
    indices = [str(i) for i in range(len(options))]
    name = as_text(answer).strip()
    for names in ([as_text(x) for x in labels[: len(options)]], indices if is_number else options):
        if names.count(name) == 1:
            return options, names.index(name)
    raise ValueError(f"{source}: answer {answer!r:.80} is none of the {len(options)} options")


def labels_of(row: dict) -> list[str]:
    """Return the labels of a row's options if they are no letters, such as 1, 2, 3. Each means the
    letter at its place."""
    options = from_json(row.get(first_column(row, OPTION_COLUMNS)))
    labels = [as_text(x).strip() for x in options["label"]] if isinstance(options, dict) else []
    letters = LETTERS[: len(labels)]
    return [] if any(x.upper() in letters for x in labels) else labels


def first_column(row: dict, columns: tuple[str, ...]) -> str | None:
    return next((column for column in columns if row.get(column) is not None), None)


def option_columns(row: dict) -> dict[str, str]:
    """Return what a prompt template may show of the options: `lettered_options`, lines such as `A.
    text`, and `right_letter`, for solved examples."""
    options, right = options_of(row)
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    return dict(lettered_options="\n".join(lines), right_letter=LETTERS[right])


def choice(completion: str, row: dict) -> float:
    """Return 1 if the completion states the right option, by its letter or its text. Its last
    statement counts. It is wrong if it names several options, or a letter without an option."""
    options, right = options_of(row)
    return float(stated_letters(completion, options, labels_of(row)) == {LETTERS[right]})


def vote_of_choice(completion: str, row: dict) -> str:
    """Return the letters that `choice` reads."""
    return "".join(sorted(stated_letters(completion, options_of(row)[0], labels_of(row))))


def stated_letters(completion: str, options: list[str], labels: Sequence[str] = ()) -> set[str]:
    """Return the letters of the last statement: after "answer is" and the like, in a box, on lines
    of their own, or as "B is correct". Without a statement, return the letters in brackets in the
    last line. A label in `labels` means the letter at its place."""
    texts = [unmarked(option).rstrip(".").lower() for option in options]
    names = [pair for pair in zip(labels, LETTERS, strict=False) if pair[0].lower() not in texts]
    names.sort(key=lambda pair: -len(pair[0]))
    text = plain(completion)
    for label, letter in names:
        named = re.escape(label)
        marked = rf"\*\*\(?{named}\)?\*\*|(?<!{LETTER})[Oo]ption {named}(?!\w|[.,]\w)"
        text = re.sub(marked, f"({letter})", text)
    text = unmarked(text)
    for option, letter in sorted(zip(texts, LETTERS, strict=False), key=lambda x: -len(x[0])):
        is_letter = re.fullmatch("[a-z]?", option)
        if not is_letter and texts.count(option) == 1:
            pattern = rf"(?<!{LETTER}){re.escape(option)}(?!{LETTER}|{SCALE})"
            text = re.sub(pattern, f"[{letter}]", text, flags=re.IGNORECASE)
    for label, letter in names:
        pattern = rf"(?<![\w.,/+$-]){re.escape(label)}(?!\w|[.,/]\w|[%°]|{SCALE})"
        text = re.sub(pattern, letter, text)
    last_line = text.rpartition("\n")[2]
    letters = re.findall(r"\(([A-Z])\)", last_line)
    for match in STATEMENT.finditer(text):
        letters = re.findall(rf"(?<!{LETTER})[A-Z](?!{LETTER})", match[match.lastindex or 0])
    return set(letters)


def unmarked(text: str) -> str:
    """Return a text without marks, with each letter that names an option in upper case."""
    text = re.sub(r"[_{}\[\]\\]", "", unformatted(NAMED_LETTER.sub(r"(\1\2)", plain(text))))
    return SMALL_LETTER.sub(lambda match: match[0].upper(), joined(text))


def unformatted(text: str) -> str:
    """Return a text without emphasis, quotation marks and LaTeX fonts. A box becomes `####{...}`,
    and so does an answer tag."""
    text = BOX.sub(" ####{", text.replace("</answer>", "}\n"))
    return joined(re.sub(r"[*`$\"“”]", "", LATEX_FONT.sub(r"\1", text)))


def joined(text: str) -> str:
    """Return a text with single spaces, and none at the ends of lines."""
    return "\n".join(" ".join(line.split()) for line in text.strip().split("\n"))


def stated(completion: str, row: dict) -> float:
    """Return 1 if the completion states the `answer`: in the rest of the line after its last
    "answer is" or box, or else in its last line. Case, emphasis, white space and a full stop do not
    matter. An answer in the form `(A)` is also right if its letter is stated, as in `choice`."""
    letter, line = stated_forms(completion)
    forms = {letter, bare(line), bare(re.sub(FILLERS, "", line, count=1))}
    return float(any(bare(answer) in forms for answer in gold_answers(row)))


def stated_forms(completion: str) -> tuple[str | None, str]:
    """Return `(A)` if exactly one letter is stated, else None; and the text that `stated` reads."""
    text = unformatted(plain(completion))
    announced = list(re.finditer(ANNOUNCED, text))
    start = announced[-1].end() if announced else text.rfind("\n") + 1
    line = text[start:].partition("\n")[0]
    if line.startswith("{"):  # up to the last brace, not the matching one: the answer may be `} ]`
        line = line[1:].rpartition("}")[0]
    letters = stated_letters(completion, options=[])
    return bare(f"({letters.pop()})") if len(letters) == 1 else None, line


def vote_of_stated(completion: str, row: dict) -> str:
    """Return the letter or the text that `stated` reads."""
    letter, line = stated_forms(completion)
    return letter or bare(re.sub(FILLERS, "", line, count=1))


def bare(text: str) -> str:
    """Return the number that a text is, or else the text without case, white space and a full stop
    at its end."""
    return str(value_of(text)).lower()


choice.may_read = (*OPTION_COLUMNS, *ANSWER_COLUMNS, *GPQA_COLUMNS)
choice.columns = ()  # `options_of` requires some of them
choice.check = options_of
choice.vote = vote_of_choice
stated.vote = vote_of_stated
stated.columns = ("answer",)
stated.check = check_answer
