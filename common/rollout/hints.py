"""Prompts with a hint for a teacher, and packs of completions after both prompts."""

from collections.abc import Callable

from common.packs.packing import PackedBatch
from common.text.encode import Encoder
from common.text.filler import template_filler
from common.text.messages import messages_field, text_field

SAMPLED_HINTS = ("sibling", "feedback")  # these hints are no columns


def hint_filler(hint: str | None, template: str, rows: list[dict]) -> Callable[[dict], str]:
    """Return the function that fills `--hint_template` with a row, its prompt and a hint. Raises
    `ValueError` without `--hint`, if it is a column without any value, or for one of `rows` that
    the template cannot use."""
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
    """Return the text of a column; of messages, their contents; "" without a value."""
    messages = messages_field(row, column)
    if messages is not None:
        return "\n\n".join(message["content"] for message in messages)
    return "" if row.get(column) is None else str(row[column])


def hinted_prompt(
    encoder: Encoder, column: str, fill: Callable[[dict], str], row: dict, hint: str
) -> list[int]:
    """Return the ids of a row's prompt in `column` with a hint. The filled template replaces the
    text of the prompt, or of its last message from the user."""
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


def divide(mb: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """Split a micro-batch of pairs, packed `together`, into one of the first samples and one of the
    second, in the same order. A sample gets the index of its pair. Padding is in both."""
    if not mb.num_samples:
        return mb, mb
    assert mb.compact is None, "pairs with a shared prefix"
    halves = []
    for start in (0, 1):
        here_T = mb.sequence_ids_T % 2 == start
        half = PackedBatch(
            mb.input_ids_T[here_T], mb.targets_T[here_T], mb.position_ids_T[here_T],
            mb.lengths[start::2], loss_mask_T=mb.loss_mask_T[here_T],
            index_N=mb.index_N[start::2] // 2, datasets=mb.datasets[start::2],
        )  # fmt: skip
        half.is_last, half.shape_of_samples = mb.is_last, ()
        half.sent = {index // 2: s for index, s in mb.sent.items() if index % 2 == start}
        streams_T = {name: x_T[here_T] for name, x_T in vars(mb).items() if name not in vars(half)}
        halves.append(half.with_streams(**streams_T))
    return halves[0], halves[1]
