"""The columns of the data: rename them (`--columns`), choose those that a script reads, and refuse
data of which a part of the prompt or answer would be ignored."""

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, takewhile

from common.config.flags import pairs_of
from common.text.files import ADDED_COLUMNS
from common.text.messages import CONVERSATIONS, role_of

Columns = tuple[str, ...]  # names of columns that a script reads together

# Columns of each kind of script. A script uses the first of its choices that the dataset has.
SFT_COLUMNS = (
    ("messages",),
    ("prompt", "completion"),
    ("question", "answer"),
    ("text",),
    ("input", "output"),
    ("conversations",),
)
PAIR_COLUMNS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))  # preferences
KTO_COLUMNS = (("prompt", "completion", "label"), ("messages", "label"), ("conversations", "label"))
PROMPT_COLUMNS = (("prompt",), ("question",), ("input",))  # online scripts sample from these
# The encoder reads these columns too, whatever the script chooses.
READ_TOO = ("tools", "system", "system_prompt", "chat_template_kwargs", "image", "images")
# A column with one of these names is probably a part of what the model was asked, or answered.
ASKED = tuple(
    "prompt messages conversations instruction instructions question problem query input inputs"
    " context contexts history document documents passage passages options choices".split()
)
ANSWERED = ("completion", "reasoning", "thinking")
PROMPT_PARTS = (*ASKED, "system", "system_prompt", "image", "images")
OUR_COLUMNS = ("_source", *ADDED_COLUMNS)


# ---- the columns that a script reads ----


def choose_columns(flag: str, rows: Iterable[dict], choices: Sequence[Columns]) -> Columns:
    """Return the columns that a script reads: one of its `choices`. A choice is possible if every
    dataset has some row with all its columns. Each row then votes for the first possible choice
    whose columns it has, and the choice with most votes wins. Raises `ValueError` if none is
    possible."""
    names_of: dict[str | None, Counter[Columns]] = {}  # columns with values, of each dataset
    first_rows: dict[str | None, dict] = {}
    for row in rows:
        dataset = row.get("_dataset")
        first_rows.setdefault(dataset, row)
        # Tables have None in a missing column.
        names = tuple([name for name in row if row[name] is not None])
        names_of.setdefault(dataset, Counter())[names] += 1
    usable = [
        columns
        for columns in choices
        if all(any({*columns} <= {*names} for names in own) for own in names_of.values())
    ]
    if not usable:
        needed = ", or ".join(" and ".join(columns) for columns in choices)
        common = set.intersection(*({*chain(*own)} for own in names_of.values()))
        order = dict.fromkeys(chain(*chain(*names_of.values())))
        found = ", ".join(name for name in order if name in common - {*OUR_COLUMNS})
        sources = ", ".join(row["_source"] for row in first_rows.values())
        problem = f"has the columns {found} ({sources}); needed: {needed}"
        raise ValueError(f"{flag} {problem}; --columns new=old renames columns")
    votes: Counter[Columns] = Counter()
    for names, count in chain(*(own.items() for own in names_of.values())):
        if fitting := [columns for columns in usable if {*columns} <= {*names}]:
            votes[fitting[0]] += count
    return max(usable, key=votes.__getitem__)  # the first one if votes are equal


def require_columns(
    flag: str, rows: Collection[dict], choices: Sequence[Columns], also_read: Collection[str] = ()
) -> Columns:
    """Return the columns that a script reads (`choose_columns`). Raises `ValueError` if it would
    ignore a column whose name says that it belongs to the prompt or the answer, such as `context`.
    `also_read`: further columns that something reads."""
    columns = choose_columns(flag, rows, choices)
    require_all_read(flag, rows, columns, also_read)
    return columns


def require_all_read(
    flag: str, rows: Iterable[dict], columns: Columns, also_read: Collection[str] = ()
) -> None:
    """Raise `ValueError` if nothing reads a column that belongs to the prompt or the answer by its
    name, unless the columns that are read contain its text."""
    parts = {*ASKED, *ANSWERED} - {*columns, *also_read}
    if columns in PROMPT_COLUMNS:
        parts -= {*CONVERSATIONS, *ANSWERED}  # a script that samples need not read answers
    elif "chosen" in columns:
        parts -= {"completion"}
    lost: dict[str, str] = {}
    for row in rows:
        names = [name for name in row if name in parts and not is_blank(row[name])]
        if names and all(row.get(name) is not None for name in columns):  # others are bad rows
            for name in names:
                if not _stands_in(row, name, columns):
                    lost.setdefault(name, row["_source"])
    if lost:
        place = next(iter(lost.values()))
        problem = f"nothing reads {' and '.join(lost)} ({place}) beside {' and '.join(columns)}"
        advice = "join it with the prompt or the answer"
        if columns[0] == "chosen":
            advice = "make a column prompt of it"
            if len(lost) == 1 and "prompt" not in lost:
                advice = f"make it the prompt by --columns prompt={min(lost)}"
        elif columns in PROMPT_COLUMNS:
            advice = "join it with the prompt, name it in the `columns` of a reward"
        advice += f", or ignore it by --columns {' '.join(f'_{name}={name}' for name in lost)}"
        raise ValueError(f"{flag}: {problem}; {advice}")


def _stands_in(row: dict, name: str, columns: Columns) -> bool:
    """Return whether ignoring the column `name` loses nothing, because the columns that are read
    contain all its texts, as whole words. A part of the answer may stand in the prompt or the
    answer, other columns must stand in the prompt. If only `text` is read, ignoring prompt,
    completion or conversations does lose something: which part of the text to train."""
    if columns == ("text",) and name in ("prompt", "completion", *CONVERSATIONS):
        return False
    if columns[0] == "chosen":
        read = common_start(row["chosen"], row["rejected"])
    elif name in (*ANSWERED, *CONVERSATIONS) or columns == ("text",):
        read = texts_of([row[column] for column in columns])
    elif columns[0] in CONVERSATIONS and isinstance(row[columns[0]], list):
        turns = [x for x in row[columns[0]] if isinstance(x, dict)]
        read = texts_of([x for x in turns if role_of(x) != "assistant"])
    else:
        read = texts_of(row[columns[0]])
    read += texts_of([row.get("system"), row.get("system_prompt")])
    texts = [text for text in texts_of(row[name]) if text not in read]
    whole = " ".join(" ".join(read).split()) if texts else ""
    return all(_is_in(" ".join(text.split()), whole) for text in texts)


def _is_in(words: str, text: str) -> bool:
    """Return whether the text contains these words, not just parts of longer words."""
    start = text.find(words)
    while start >= 0:
        edges = text[start - 1 : start] + words[0], words[-1] + text[start + len(words) :][:1]
        if not any(len(edge) == 2 and edge.isalnum() for edge in edges):
            return True
        start = text.find(words, start + 1)
    return False


def is_blank(value: object) -> bool:
    return (isinstance(value, str) and not value.strip()) or value in (None, [], {})


def unread_columns(rows: list[dict], columns: Columns) -> dict[str, str]:
    """Return the columns that are neither in `columns` nor read by the encoder, each with the place
    of the first row that has a value in it. Columns that begin with `_` are left out: they are
    ours, or the user wants them ignored."""
    found: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            if is_blank(value) or name.startswith("_"):
                continue
            if name not in (*columns, *READ_TOO):
                found.setdefault(name, row["_source"])
    return found


# ---- --columns new=old ----


def rename_columns(rows: list[dict], columns: Sequence[str]) -> list[dict]:
    """Rename columns, given as new=old, in each row that has the old column. The old name may be a
    path into a column, such as `reward_model.ground_truth`. Raises `ValueError` if a row already
    has a column with the new name."""
    old_names = pairs_of("columns", columns)
    return [_renamed(row, old_names) for row in rows] if old_names else rows


def _renamed(row: dict, old_names: dict[str, str]) -> dict:
    renamed = {new: value for new, old in old_names.items() for value in _found(row, old)}
    kept = {name: value for name, value in row.items() if name not in old_names.values()}
    taken = [name for name in renamed if name in kept]
    if taken:
        new = taken[0]
        pair = f"--columns {new}={old_names[new]}"
        advice = f"{pair} _{new}={new} ignores that one"
        raise ValueError(f"{pair}: {row['_source']} has a column {new} already; {advice}")
    return kept | renamed


def _found(value: object, name: str) -> list:
    """Look a name up in a row: return [value], or [] if there is none. If the name is not a key, it
    is a path: `a.b.0` is the first member of the list at key b of the object at key a. Keys may
    contain dots themselves."""
    if isinstance(value, list):
        value = {str(i): member for i, member in enumerate(value)}
    if not isinstance(value, dict):
        return []
    if name in value:
        return [value[name]]
    dots = [i for i, character in enumerate(name) if character == "."]
    inside = (_found(value[name[:i]], name[i + 1 :]) for i in dots if name[:i] in value)
    return next(filter(None, inside), [])


def require_old_names(data: str, rows: Iterable[dict], columns: Sequence[str]) -> None:
    """Raise `ValueError` for a pair new=old of `--columns` if no row has the column `old`, or if we
    use the name `new` ourselves. Reads rows only until all old names are found."""
    missing = pairs_of("columns", columns)
    ours = [name for name in missing if name in OUR_COLUMNS]
    if ours:
        pair = f"--columns {ours[0]}={missing[ours[0]]}"
        raise ValueError(f"{pair}: {data} has a column {ours[0]} already")
    if not missing:
        return
    values: dict[str, object] = {}  # an example value of each column
    for row in rows:
        values |= {name: value for name, value in row.items() if values.get(name) is None}
        missing = {new: old for new, old in missing.items() if not _found(row, old)}
        if not missing:
            return
    new, old = next(iter(missing.items()))
    there = f"{data} has {', '.join(name for name in values if name not in OUR_COLUMNS)}"
    outer = old.partition(".")[0]
    if outer != old and outer in values:
        value = values[outer]
        keys = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
        there = f"{outer} is {'an object with ' if isinstance(value, dict) else ''}{keys}"
    raise ValueError(f"--columns {new}={old}: no column {old}; {there}")


# ---- the texts of a row ----


def prompt_digest(row: dict) -> bytes:
    """Return a digest of what the model is asked in a row: it finds prompts that are trained and
    held out. A text and a user's message with this text have the same digest. If no column holds
    the question, the digest is of the whole row."""
    asked = [
        row[name][:-1] if name in CONVERSATIONS and isinstance(row[name], list) else row[name]
        for name in PROMPT_PARTS
        if name in row
    ]  # without the last turn of a conversation, which is the answer
    texts = texts_of(asked)
    texts = texts or common_start(row.get("chosen"), row.get("rejected"))
    texts = texts or texts_of(row.get("text"))
    texts = texts or texts_of([row[name] for name in sorted(row) if name[0] != "_"])
    return hashlib.blake2b("\0".join(texts).encode(errors="replace"), digest_size=16).digest()


def common_start(chosen: object, rejected: object) -> list[str]:
    """Return the texts that both sides of a preference pair share at their start."""
    if isinstance(chosen, str) and isinstance(rejected, str):
        return texts_of(os.path.commonprefix([chosen, rejected]))
    if isinstance(chosen, list) and isinstance(rejected, list):
        pairs = zip(chosen, rejected, strict=False)
        return texts_of([x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)])
    return []


def texts_of(value: object) -> list[str]:
    """Return all texts in a value, stripped. Of messages only the contents count."""
    if isinstance(value, str):
        return [text] if (text := value.strip()) else []
    if isinstance(value, dict):
        is_message = "role" in value or "from" in value
        content = value.get("content", value.get("value")) if is_message else [*value.values()]
        return texts_of(content)
    if isinstance(value, list | tuple):
        return [text for member in value for text in texts_of(member)]
    if isinstance(value, bytes):
        return [hashlib.blake2b(value, digest_size=16).hexdigest()]
    return [] if value is None else [str(value)]
