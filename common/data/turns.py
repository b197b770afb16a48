"""Conversations -> text with the places of the model's turns, for training and for sampling.

A turn of the model is trained as it is sampled: from the end of its prompt up to the token that
ends it. A turn that the template shows in another form than the sampled one, such as an earlier
turn without its thought, is context."""

import os
from dataclasses import dataclass
from itertools import pairwise

from common.data.calls import end_of_calls
from common.data.chat import MARK, ChatTemplate
from common.data.messages import (
    closing,
    named,
    opened_thought,
    texts_of,
    tools_field,
    with_thought,
)

ANOTHER_FORM = "the chat template shows it in another form than the sampled one"


@dataclass(frozen=True)
class Turn:
    """A turn of the model in a text, as it is sampled: from the end of its prompt to the end of its
    last token."""

    start: int
    end: int
    trained: bool = False


@dataclass(frozen=True)
class Rendering:
    """Text of a conversation with the turns of the model that it shows as they are sampled."""

    text: str
    turns: list[Turn]
    context_turns: int = 0
    """turns that were to be trained and are context"""


def prompt_of(chat: ChatTemplate, row: dict, messages: list[dict]) -> Rendering:
    """Return the text from which the model's next turn is sampled. A turn of the model at the end
    of `messages` is continued. Raises `ValueError` if the template leaves a message out."""
    row = _with_tools(row)
    messages = chat.normal(messages)
    begun = messages.pop() if is_answer(messages) else None
    text = chat.render(row, messages, add_generation_prompt=True)
    require_shown(chat, row, messages, text)
    turns = []
    places = _model_turns(messages)
    if places:
        whole = chat.render(row, messages)
        shared = _shared(whole, text)
        turns = [_turn(chat, row, whole, messages, i, shared) for i in places]
    if begun:
        text = with_begun(chat, row, messages, text, begun)
    return Rendering(text, [turn for turn in turns if isinstance(turn, Turn)])


def conversation_of(
    chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int
) -> Rendering:
    """Return a conversation whose turns of the model from message `first_trained` on are trained.
    The first trained message continues the one before it if both are the model's. Raises
    `ValueError` if the template leaves a message out, or shows no turn as it is sampled."""
    row = _with_tools(row)
    if is_answer(messages[:first_trained]) and messages[first_trained]["role"] == "assistant":
        return continuation_of(chat, row, messages, first_trained)
    messages = chat.normal(messages)
    places = _model_turns(messages)
    if max(places, default=-1) < first_trained:
        raise ValueError(f"{row['_source']}: no message with the role assistant to train on")
    whole = chat.render(row, messages)
    require_shown(chat, row, messages, whole)
    text = _as_sampled(chat, row, whole, messages)
    shared = _shared(whole, text)
    turns: list[Turn] = []
    untrained: list[str] = []
    for i in places:
        if i == len(messages) - 1:
            turn = _turn(chat, row, text, messages, i, len(text))
        else:
            turn = _turn(chat, row, whole, messages, i, shared)
        if isinstance(turn, Turn):
            turns.append(Turn(turn.start, turn.end, i >= first_trained))
        elif i >= first_trained:
            untrained.append(f"turn {i + 1} (assistant): {turn}")
    if untrained and not any(turn.trained for turn in turns):
        raise ValueError(f"{row['_source']}: {untrained[-1]}")
    assert all(before.end <= after.start for before, after in pairwise(turns)), "two turns overlap"
    return Rendering(text, turns, len(untrained))


def _with_tools(row: dict) -> dict:
    if not row.get("tools"):
        return row
    return row | dict(tools=tools_field(row))


# ---- turns of the model ----


def is_answer(messages: list[dict]) -> bool:
    """Return whether the last message is text of the model, which it can continue."""
    if not messages or messages[-1]["role"] != "assistant":
        return False
    return not messages[-1].get("tool_calls")


def _model_turns(messages: list[dict]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _turn(
    chat: ChatTemplate, row: dict, text: str, messages: list[dict], i: int, limit: int
) -> Turn | str:
    """Return turn `i` of a conversation, or why the first `limit` characters of its text do not
    show it as it is sampled."""
    try:
        prompt = chat.render(row, messages[:i], add_generation_prompt=True)
    except ValueError:
        return "it has no prompt"
    start = len(prompt)
    if not text.startswith(prompt):
        same = _shared(prompt, text)
        forms = f"the prompt goes on with {prompt[same:][:20]!r}, the turn with"
        return f"{ANOTHER_FORM}: {forms} {text[same:][:20]!r}"
    if messages[i].get("tool_calls"):
        end = end_of_calls(chat, row, text, messages, i, start)
    else:
        end = _end(chat, text, start, messages[i], is_last=i == len(messages) - 1)
    if isinstance(end, str):
        return end
    return Turn(start, end) if end <= limit else f"{ANOTHER_FORM}: it ends in another way"


def _end(chat: ChatTemplate, text: str, start: int, message: dict, is_last: bool) -> int | str:
    """Return the end of the turn that begins at `start`: its thought, its answer, the token that
    ends it, and between them only what the template writes into each turn."""
    place = start
    for part in texts_of(message):
        place = chat.markup.match(text, place).end()
        if not text.startswith(part, place):
            return "the chat template changes its text, drops its thought or adds other text"
        place += len(part)
    token = chat.end and (chat.end.last if is_last else chat.end.earlier)
    end = text.find(token, place) if token else -1
    if end < 0 or not chat.markup.fullmatch(text, place, end):
        return "the chat template puts no end-of-turn token after it"
    return end + len(token)


def _as_sampled(chat: ChatTemplate, row: dict, text: str, messages: list[dict]) -> str:
    """Return the text of a conversation with the token that ends the model's last turn. A template
    may open a thought in the prompt and leave it out of the turn: then the prompt and the turn are
    put together here."""
    if chat.end is None or not is_answer(messages):
        return text
    *before, last = messages
    if before and opened_thought(chat.header):
        prompt = chat.render(row, before, add_generation_prompt=True)
        if opened_thought(prompt) and not text.startswith(prompt):
            return prompt + after_prompt(prompt, last) + chat.end.tail
    return text + chat.end.token if chat.end.appended else text


def after_prompt(prompt: str, message: dict) -> str:
    """Return a message as the model writes it after `prompt`, which may have opened the thought."""
    thought = message.get("reasoning_content")
    answer = message["content"]
    tag = opened_thought(prompt)
    if tag is None:
        return with_thought(thought, answer) if thought else answer
    if not thought and closing(tag) in answer and tag not in answer:
        return answer
    if not thought and answer.lstrip().startswith(tag):
        return answer.lstrip().removeprefix(tag).removeprefix("\n" if prompt.endswith("\n") else "")
    return f"{thought or ''}\n{closing(tag)}\n\n{answer}"


def _shared(a: str, b: str) -> int:
    """Return the number of characters that two texts have in common at their start."""
    return len(os.path.commonprefix([a, b]))


# ---- messages that the template leaves out ----


def require_shown(chat: ChatTemplate, row: dict, messages: list[dict], text: str) -> None:
    """Raise `ValueError` if the template leaves out a message or a tool call. Conversations of one
    structure are shown alike, so each structure is probed once, with a mark in place of each
    content and of each call's name."""
    structure = (bool(row.get("tools")), *map(_structure, messages))
    if structure in chat.shown:
        return
    marked = [_marked(message, i) for i, message in enumerate(messages)]
    try:
        shown = chat.render(row, marked)
    except ValueError:  # the template reads the content; then the text itself must be there
        shown = text
        marked = messages
    shown = shown.lower()  # some templates change the case
    for number, (message, mark) in enumerate(zip(messages, marked, strict=True), 1):
        problem = ""
        if mark["content"].strip().lower() not in shown:
            problem = "leaves it out; change the role"
        for call, marked_call in zip(_calls(message), _calls(mark), strict=True):
            if marked_call["name"].lower() not in shown:
                problem = f"omits the tool call of {call['name']}"
                break
        if problem:
            turn = f"turn {number} ({message['role']})"
            raise ValueError(f"{row['_source']}: {turn}: the chat template {problem}")
    chat.shown.add(structure)


def _structure(message: dict) -> tuple[str, bool, bool, int]:
    """Return what decides whether a template shows a message."""
    has_thought = "reasoning_content" in message
    return message["role"], bool(message["content"].strip()), has_thought, len(_calls(message))


def _calls(message: dict) -> list[dict]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _marked(message: dict, number: int) -> dict:
    """Return a message with marks in place of its content and of the names of its calls."""
    content = f"(this is turn {number})" if message["content"].strip() else ""
    if not message.get("tool_calls"):
        return message | dict(content=content)
    calls = [named(call, f"turn_{number}_call_{i}") for i, call in enumerate(message["tool_calls"])]
    return message | dict(content=content, tool_calls=calls)


# ---- a turn of the model that a prompt begins and a completion continues ----


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
