"""Prompts with a hint for a teacher, from the prompts of rows."""

from collections.abc import Callable

from common.data.encode import Encoder
from common.data.messages import messages_field, text_field

SAMPLED = ("sibling", "feedback")  # hints that are no column


def require_hints(hint: str | None, rows: list[dict]) -> None:
    """Raise `ValueError` without `--hint`, or if it is a column without any value."""
    if hint is None:
        raise ValueError("--hint: there is none; name a column, sibling or feedback")
    if hint not in SAMPLED and not any(hint_of_row(row, hint) for row in rows):
        columns = ", ".join(column for column in rows[0] if not column.startswith("_"))
        problem = f"no row has this column; the dataset has {columns}"
        raise ValueError(f"--hint {hint}: {problem}")


def hint_of_row(row: dict, column: str) -> str:
    """Return the text of a column; of messages, their contents; "" without a value."""
    messages = messages_field(row, column)
    if messages is not None:
        return "\n\n".join(message["content"] for message in messages)
    return "" if row.get(column) is None else str(row[column])


def hinted_prompt(
    encoder: Encoder, row: dict, column: str, fill: Callable[[dict], str], hint: str
) -> list[int]:
    """Return the ids of a row's prompt in `column` with a hint. `fill` makes its text, or that of
    its last message from the user, of the row with {prompt} and {hint}."""
    messages = messages_field(row, column)
    if messages is None:
        text = fill(row | dict(prompt=text_field(row, column), hint=hint))
        return encoder.prompt(row | {column: text}, (column,))
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise ValueError(f"{row['_source']}: --hint needs a prompt with a message from the user")
    asked = messages[users[-1]]
    messages[users[-1]] = asked | dict(content=fill(row | dict(prompt=asked["content"], hint=hint)))
    return encoder.prompt(row | {column: messages}, (column,))
