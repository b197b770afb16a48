"""A turn of the model that a prompt begins and a completion continues."""

from common.data.chat import MARK, ChatTemplate
from common.data.turns import Rendering, Turn, after_prompt, prompt_of


def with_begun(
    chat: ChatTemplate, row: dict, messages: list[dict], prompt: str, begun: dict
) -> str:
    """Return a prompt with the beginning of the model's turn, behind what the template writes
    before the answer."""
    if not begun["content"].lstrip().startswith("<think>"):
        text = chat.render(row, [*messages, begun | dict(content=MARK)])
        head, mark, _ = text.partition(MARK)
        if mark and head.startswith(prompt):
            return head + begun["content"]
    return prompt + after_prompt(prompt, begun)


def continuation_of(
    chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int
) -> Rendering:
    """Return a conversation whose only trained message continues the turn before it."""
    number = first_trained + 1
    if len(messages) > number:
        problem = f"turn {number + 1}: no turn may follow one that is continued"
        raise ValueError(f"{row['_source']}: {problem}")
    completion = messages[first_trained]
    if completion.get("tool_calls") or completion.get("reasoning_content") or chat.end is None:
        problem = f"turn {number}: only text can continue a turn of the model"
        raise ValueError(f"{row['_source']}: {problem}")
    prompt = prompt_of(chat, row, messages[:first_trained])
    (completion,) = chat.normal([completion])
    text = prompt.text + completion["content"]
    turn = Turn(len(prompt.text), len(text) + len(chat.end.last), trained=True)
    return Rendering(text + chat.end.tail, [*prompt.turns, turn])
