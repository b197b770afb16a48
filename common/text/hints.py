"""Prompts with a hint, which the teacher of self_distill.py reads and the student does not."""

from collections.abc import Callable

from common.text.encode import Encoder
from common.text.filler import template_filler
from common.text.messages import messages_field, text_field

SAMPLED_HINTS = ("sibling", "feedback")  # these hints come from completions, not from a column


def hint_filler(hint: str | None, template: str, rows: list[dict]) -> Callable[[dict], str]:
    """Return a function that fills `--hint_template` with a row, its prompt and a hint. Raises
    `ValueError` if `--hint` is not set, if it names a column in which no row has a value, or if the
    template cannot use one of `rows`."""
    if hint is None:
        raise ValueError("--hint: there is none; name a column, sibling or feedback")
    if hint not in SAMPLED_HINTS and not any(hint_of_row(row, hint) for row in rows):
        columns = ", ".join(column for column in rows[0] if not column.startswith("_"))
        problem = f"no row has a value in this column; the dataset has {columns}"
        raise ValueError(f"--hint {hint}: {problem}")
    fill = template_filler("--hint_template", template.replace("\\n", "\n"))
    for row in rows:
        fill(row | dict(prompt="", hint=""))
    return fill


def hint_of_row(row: dict, column: str) -> str:
    """Return a column as text: of messages, the contents; "" if the row has no value."""
    messages = messages_field(row, column)
    if messages is not None:
        return "\n\n".join(message["content"] for message in messages)
    return "" if row.get(column) is None else str(row[column])


def hinted_prompt(
    encoder: Encoder, column: str, fill: Callable[[dict], str], row: dict, hint: str
) -> list[int]:
    """Return the ids of a row's prompt, from `column`, with a hint. The filled template replaces
    the prompt's text, or the last message from the user if the prompt is a list of messages."""
    messages = messages_field(row, column)
    if messages is None:
        text = fill(row | dict(prompt=text_field(row, column), hint=hint))
        return [*encoder.prompt(row | {column: text}, (column,))]
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise ValueError(f"{row['_source']}: --hint needs a prompt with a message from the user")
    asked = messages[users[-1]]
    messages[users[-1]] = asked | dict(content=fill(row | dict(prompt=asked["content"], hint=hint)))
    return [*encoder.prompt(row | {column: messages}, (column,))]
