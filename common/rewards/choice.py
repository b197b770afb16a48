r"""Rewards for answers that a completion states: `choice` for multiple choice, and `stated` for a
short text, as in BIG-Bench Hard (arXiv:2210.09261).

The options of a row are recognised by their columns:

- `options` or `choices`: a list of texts, or {text: [...], label: [...]} (ARC). The right one is in
  `answer` or `answerKey`: an index from 0, a letter, a label, or the text of the option;
- `Correct Answer` and `Incorrect Answer 1` to `3` (GPQA), in an order that their texts determine.

A completion may be any text. `plain` removes its marks, so that `**B**` and `\boxed{B}` need no
rules of their own."""

import random
import re
import string

from common.rewards.functions import as_text, check_answer, gold_answers

LETTERS = string.ascii_uppercase
OPTION_COLUMNS = ("options", "choices")
ANSWER_COLUMNS = ("answer", "answerKey")
GPQA_COLUMNS = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|<answer>", re.IGNORECASE)
LATEX_FONT = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathsf)\s*\{([^{}\n]*)\}")
NOT = r"(?!(?:not|never|cannot|choices|options)\b)"
ANNOUNCED = re.compile(
    rf"(?:####|\banswers?\b(?: {NOT}\w+){{0,6}}? ?(?::|=|\b(?:is|are|was|be)\b:?)"
    r"|\b(?:option|choice)(?: (?:would|must|should) be| is| ?:)"
    r"|\b(?:choose|chose|pick|select|(?:go|going|went) with)\b)\s*",
    re.IGNORECASE,
)
FILLERS = re.compile(
    r"(?:(?:therefore|thus|indeed|most|\w+ly|either|both|the|option|choice|letter|answer)\s+)*",
    re.IGNORECASE,
)
# What follows an option. An article is followed by a word: `The answer is A lot of work`.
END = re.compile(
    r"\s*$|\s*[(–—]|\s*[.,;:!?)](?!\w)|\s+-\s|\s+(?:as|because|since|which|with|but)\s",
    re.MULTILINE,
)
LETTER = re.compile(r"\(?([A-Z])\b\)?(?= (?:and|or) |" + END.pattern + ")", re.MULTILINE)
SMALL_LETTER = re.compile(r"\(?([a-z])\)|([b-z])(?=\.?$)", re.MULTILINE)
OR_ANOTHER = re.compile(r" ?(?:[,/&] ?(?:and |or )?|(?:and|or) )" + LETTER.pattern, re.MULTILINE)
CALLED_RIGHT = re.compile(
    r"(?<![\w'])([A-Z])\)? (?:is|must be|would be) (?:the |therefore |thus |clearly |definitely )*"
    r"(?:correct|right|best|(?:correct |right |best )?(?:answer|option|choice))(?="
    rf"{END.pattern})",
    re.MULTILINE,
)
IN_BRACKETS = re.compile(r"\(([A-Z])\)|\b[Oo]ption ([A-Z])\b")
LINE = re.compile(r"[^\n]*\S[^\n]*")
LETTER_AND_TEXT = re.compile(r"\(?([A-Za-z])(?:\)|\b)(?: ?[.:)–-]* (.*))?")


# ---- the options of a row ----


def options_of(row: dict) -> tuple[list[str], int]:
    """Return the options of a row in the order of their letters, and the index of the right one.
    Raises `ValueError` naming the row without 2 to 26 options, or if the answer is none of
    them."""
    source = row.get("_source")
    if all(row.get(column) is not None for column in GPQA_COLUMNS):
        return shuffled([str(row[column]).strip() for column in GPQA_COLUMNS])
    column = first_column(row, OPTION_COLUMNS)
    if column is None:
        expected = " or ".join((*OPTION_COLUMNS, "Correct Answer and Incorrect Answer 1 to 3"))
        raise ValueError(f"{source}: no options; expected the columns {expected}")
    options = row[column]
    labels = list(LETTERS)
    if isinstance(options, dict):
        labels = options.get("label")
        options = options.get("text")
    if not isinstance(options, list) or not all(isinstance(x, str | int | float) for x in options):
        expected = "expected a list of texts, or {text: [...], label: [...]}"
        raise ValueError(f"{source}: column {column}: {expected}, got {row[column]!r:.80}")
    options = [as_text(option).strip() for option in options]
    if not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"{source}: column {column}: expected 2 to 26 options, got {len(options)}")
    answer = row.get(first_column(row, ANSWER_COLUMNS))
    if answer is None:
        raise ValueError(f"{source}: no answer; expected a column {' or '.join(ANSWER_COLUMNS)}")
    right = index_of(answer, options, labels)
    if right is None:
        raise ValueError(f"{source}: answer {answer!r:.80} is none of the {len(options)} options")
    return options, right


def first_column(row: dict, columns: tuple[str, ...]) -> str | None:
    return next((column for column in columns if row.get(column) is not None), None)


def shuffled(options: list[str]) -> tuple[list[str], int]:
    """Return the options, whose first is right, in an order that only they determine."""
    order = list(range(len(options)))
    random.Random("\n".join(options)).shuffle(order)
    return [options[i] for i in order], order.index(0)


def index_of(answer: object, options: list[str], labels: object) -> int | None:
    """Return the index of the right option; None if it is none of them."""
    text = as_text(answer).strip()
    names = labels[: len(options)] if isinstance(labels, list) else []
    if text in names:
        return names.index(text)
    if type(answer) in (int, float):
        return int(text) if text.isdigit() and int(text) < len(options) else None
    return options.index(text) if options.count(text) == 1 else None


def option_columns(row: dict) -> dict[str, str]:
    """Return what a prompt shows of the options: `lettered_options`, lines such as `A. text`, and
    `right_letter`, for solved examples."""
    options, right = options_of(row)
    lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False)]
    return dict(lettered_options="\n".join(lines), right_letter=LETTERS[right])


# ---- the option that a completion states ----


def choice(completion: str, row: dict) -> float:
    """Return 1 if the completion states the right option, by its letter or its text. The last
    statement counts. A statement of several options, or of a letter without an option, is wrong."""
    options, right = options_of(row)
    return float(stated_option(completion, options) == right)


def stated_option(completion: str, options: list[str]) -> int | None:
    """Return the index of the option that is stated last: behind "answer is" and the like, in a
    box, as a line of its own, or as "B is correct". Without any of these, it is the only letter in
    brackets in the last line. None for no option, or for several."""
    text = plain(completion)
    texts = [plain(option).rstrip(".").lower() for option in options]
    texts = ["" if is_letter(one) or texts.count(one) > 1 else one for one in texts]
    statements = {}  # position in the text -> letter
    for match in ANNOUNCED.finditer(text):
        letter = letter_at(text, match.end(), texts)
        if letter:
            statements[match.end()] = letter
    letters = LETTERS[: len(options)]
    for match in CALLED_RIGHT.finditer(text):
        if match[1] in letters:
            statements[match.start()] = match[1]
    statements |= lines_with_one_option(text, texts)
    if statements:
        letter = statements[max(statements)]
    else:
        last_line = text[text.rfind("\n") + 1 :]
        named = {one or other for one, other in IN_BRACKETS.findall(last_line)}
        letter = named.pop() if len(named) == 1 else ""
    return letters.index(letter) if is_letter(letter) and letter in letters else None


def plain(text: str) -> str:
    """Return a text without emphasis, quotation marks and LaTeX braces. A box becomes `####`, and
    a bold letter a letter in brackets."""
    text = BOX.sub(" #### ", text.replace("</answer>", "\n"))
    text = re.sub(r"\*\*\(?([A-Z])\)?\*\*", r"(\1)", LATEX_FONT.sub(r"\1", text))
    text = re.sub(r"[*_$`\"“”{}\[\]\\]", "", text)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"[^\S\n]+", " ", text)).strip()


def is_letter(text: str) -> bool:
    return len(text) == 1 and text.isalpha()


def letter_at(text: str, position: int, texts: list[str]) -> str:
    """Return the letter of the option that is stated at a position, "several", or "" for none."""
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
        end = position + len(texts[index])
        if texts[index] and text[position:end].lower() == texts[index] and END.match(text, end):
            return LETTERS[index]
    position = FILLERS.match(text, position).end()
    match = LETTER.match(text, position) or SMALL_LETTER.match(text, position)
    if match is None:
        return ""
    return "several" if OR_ANOTHER.match(text, match.end()) else match[match.lastindex].upper()


def lines_with_one_option(text: str, texts: list[str]) -> dict[int, str]:
    """Return the letters of lines that are an option and nothing else, by the line's position.
    Different options in neighbouring lines are a list, such as the question's, and no
    statement."""
    lines = list(LINE.finditer(text))
    letters = ["", *(letter_of_line(line[0], texts) for line in lines), ""]
    return {
        line.start(): letters[i]
        for i, line in enumerate(lines, 1)
        if letters[i] and {letters[i - 1], letters[i + 1]} <= {"", letters[i]}
    }


def letter_of_line(line: str, texts: list[str]) -> str:
    """Return the letter of the option if the line is `B`, `(B)`, `B. text` or `text`; else ""."""
    line = re.sub(r"^(?:[#>•]+ ?|- )*", "", line).rstrip(" .:;,!").lower()
    if line and line in texts:
        return LETTERS[texts.index(line)]
    match = LETTER_AND_TEXT.fullmatch(line)
    letter = match[1].upper() if match else ""
    is_option = letter and LETTERS.index(letter) < len(texts)
    return letter if is_option and match[2] in (None, "", texts[LETTERS.index(letter)]) else ""


# ---- a short answer in the form that the question asks for ----


def stated(completion: str, row: dict) -> float:
    """Return 1 if the rest of the line behind the last "answer is" or box, or else the last line,
    is the `answer`. Case, emphasis, white space and a full stop do not matter. If the answer is a
    letter in brackets, `(A)`, its letter counts, and text may follow."""
    text = re.sub(r"[*`$\"]|[^\S\n]+(?=\s)", "", LATEX_FONT.sub(r"\1", completion))
    text = BOX.sub("####{", text.replace("</answer>", "}\n")).strip()
    announced = list(ANNOUNCED.finditer(text))
    start = announced[-1].end() if announced else text.rfind("\n") + 1
    line = text[start:].split("\n")[0]
    if line.startswith("{"):  # not up to the matching brace: the answer may be `} ]`
        line = line[1:].rpartition("}")[0]
    rest = line[FILLERS.match(line).end() :]
    forms = (bare(line), bare(rest), f"({letter_at(rest, 0, [])})".lower())
    return float(any(bare(answer) in forms for answer in gold_answers(row)))


def bare(text: str) -> str:
    """Return a text without white space, case, and the full stop at its end."""
    return "".join(text.split()).rstrip(".").lower()


choice.check = options_of
stated.columns = ("answer",)
stated.check = check_answer
