"""Conversations -> text with the places of the model's turns, for training and for sampling.

A turn of the model is trained as it is sampled: from the end of its prompt up to the token that ends it. A turn that
the template shows in another form than the sampled one, such as an earlier turn without its thought, is context.
"""

import os
import re
from dataclasses import dataclass
from itertools import pairwise

from common.data.chat import ASKED, MARK, ChatTemplate, closing, opened_thought, with_thought
from common.data.messages import tools_field


@dataclass(frozen=True)
class Turn:
    """A turn of the model in a text, as it is sampled: from the end of its prompt to the end of its last token."""

    start: int
    end: int
    trained: bool


@dataclass(frozen=True)
class Rendering:
    """Text of a conversation with the turns of the model that it shows as they are sampled."""

    text: str
    turns: list[Turn]
    context_turns: int = 0
    """turns that were to be trained and are context"""


def prompt_of(chat: ChatTemplate, row: dict, messages: list[dict]) -> Rendering:
    """Return the text from which the model's next turn is sampled. A turn of the model at the end of `messages` is
    continued. Raises `ValueError` if the template leaves a message out."""
    row = row | dict(tools=tools_field(row))
    messages = chat.normal(messages)
    begun = messages.pop() if _is_continued(messages) else None
    text = chat.render(row, messages, add_generation_prompt=True)
    _require_shown(chat, row, messages, text)
    turns = []
    if places := _places(messages):
        whole = chat.render(row, messages)
        shared = len(os.path.commonprefix([whole, text]))
        turns = [_turn(chat, row, whole, messages, i) for i in places]
        turns = [turn for turn in turns if isinstance(turn, Turn) and turn.end <= shared]
    return Rendering(_with_begun(chat, row, messages, text, begun) if begun else text, turns)


def _with_begun(chat: ChatTemplate, row: dict, messages: list[dict], prompt: str, begun: dict) -> str:
    """Return a prompt with the beginning of the model's turn, behind what the template writes before the answer."""
    if not begun["content"].lstrip().startswith("<think>"):
        head, mark, _ = chat.render(row, [*messages, begun | dict(content=MARK)]).partition(MARK)
        if mark and head.startswith(prompt):
            return head + begun["content"]
    return prompt + _after_prompt(prompt, begun)


def conversation_of(chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int) -> Rendering:
    """Return a conversation whose turns of the model from message `first_trained` on are trained. The first trained
    message continues the one before it if both are the model's. Raises `ValueError` if the template leaves a
    message out, or shows no turn as it is sampled."""
    row = row | dict(tools=tools_field(row))
    if _is_continued(messages[:first_trained]) and messages[first_trained]["role"] == "assistant":
        return _continuation(chat, row, messages, first_trained)
    messages = chat.normal(messages)
    if not any(i >= first_trained for i in _places(messages)):
        raise ValueError(f"{row['_source']}: no message with the role assistant to train on")
    whole = chat.render(row, messages)
    _require_shown(chat, row, messages, whole)
    text = _as_sampled(chat, row, whole, messages)
    shared = len(os.path.commonprefix([whole, text]))
    turns: list[Turn] = []
    untrained: list[str] = []
    for i in _places(messages):
        shown = text if i == len(messages) - 1 else whole
        turn = _turn(chat, row, shown, messages, i, trained=i >= first_trained)
        if isinstance(turn, Turn) and (shown is text or turn.end <= shared):
            turns.append(turn)
        elif i >= first_trained:
            untrained.append(f"turn {i + 1} (assistant): {turn}")
    if untrained and not any(turn.trained for turn in turns):
        raise ValueError(f"{row['_source']}: {untrained[-1]}")
    assert all(before.end <= after.start for before, after in pairwise(turns)), "two turns overlap"
    return Rendering(text, turns, len(untrained))


def _continuation(chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int) -> Rendering:
    """Return a conversation whose only trained message continues the turn before it."""
    if len(messages) > first_trained + 1:
        raise ValueError(f"{row['_source']}: turn {first_trained + 2}: no turn may follow one that is continued")
    completion = messages[first_trained]
    if completion.get("tool_calls") or completion.get("reasoning_content") or chat.end is None:
        raise ValueError(f"{row['_source']}: turn {first_trained + 1}: only text can continue a turn of the model")
    prompt = prompt_of(chat, row, messages[:first_trained])
    (completion,) = chat.normal([completion])
    text = prompt.text + completion["content"] + chat.end.tail
    end = len(text) - len(chat.end.tail) + len(chat.end.last)
    return Rendering(text, [*prompt.turns, Turn(len(prompt.text), end, trained=True)])


def _as_sampled(chat: ChatTemplate, row: dict, text: str, messages: list[dict]) -> str:
    """Return the text of a conversation with the token that ends the model's last turn. A template may open a
    thought in the prompt and leave it out of the turn: then the prompt and the turn are put together here."""
    if chat.end is None or not _is_continued(messages):
        return text
    *before, last = messages
    if before and chat.opens_thought:
        prompt = chat.render(row, before, add_generation_prompt=True)
        if opened_thought(prompt) and not text.startswith(prompt):
            return prompt + _after_prompt(prompt, last) + chat.end.tail
    return text + chat.end.token if chat.end.appended else text


def _places(messages: list[dict]) -> list[int]:
    """Return the indices of the model's turns."""
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _turn(
    chat: ChatTemplate, row: dict, text: str, messages: list[dict], i: int, trained: bool = False
) -> Turn | str:  # fmt: skip
    """Return turn `i` of a conversation, or why the text does not show it as it is sampled."""
    another = "the chat template shows it in another form than the sampled one"
    try:
        prompt = chat.render(row, messages[:i], add_generation_prompt=True)
    except ValueError:
        return "it has no prompt"
    if not text.startswith(prompt):
        same = len(os.path.commonprefix([prompt, text]))
        return f"{another}: the prompt goes on with {prompt[same:][:20]!r}, the turn with {text[same:][:20]!r}"
    repeated = chat.header and text.startswith(chat.header, len(prompt))
    if repeated and not messages[i]["content"].startswith(chat.header):
        return f"{another}: the prompt lacks {chat.header[:20]!r}"
    content_end = _content_end(chat, row, text, messages, i, len(prompt))
    if content_end is None or content_end < len(prompt):
        return "the chat template changes its text"
    extra = _beside(text[len(prompt) : content_end], messages[i])
    if extra is None:
        return "the chat template changes its text or drops its thought"
    if not _is_usual(chat, extra, messages[i]):
        return f"the chat template writes other text into it: {extra.strip()[:40]!r}"
    if messages[i].get("tool_calls"):
        end = _end_of_calls(chat, row, text, messages, i)
        if end is not None and not _is_usual_call(chat, row, text[len(prompt) : end], messages[i]):
            return "the chat template writes other text into it"
    else:
        written = chat.end.last if i == len(messages) - 1 else chat.end.earlier
        end = content_end + len(written) if written and text.startswith(written, content_end) else None
    if end is None or end < content_end:
        return "the chat template puts no end-of-turn token after it"
    return Turn(len(prompt), end, trained)


def _is_usual(chat: ChatTemplate, extra: str, message: dict) -> bool:
    """Return whether the template writes `extra`, such as empty thoughts, into a turn also after a plain question: then
    it is not from another message or from the tools. Each text is tried once."""
    if not extra.strip() or extra in chat.usual:
        return True
    row = dict(_source="a question")
    try:
        prompt = chat.render(row, [ASKED], add_generation_prompt=True)
        alone = _as_sampled(chat, row, chat.render(row, [ASKED, message]), [ASKED, message])
    except ValueError:
        return False
    end = _content_end(chat, row, alone, [ASKED, message], 1, len(prompt))
    if end is None or not alone.startswith(prompt) or _beside(alone[len(prompt) : end], message) != extra:
        return False
    chat.usual.add(extra)
    return True


def _is_usual_call(chat: ChatTemplate, row: dict, said: str, message: dict) -> bool:
    """Return whether a turn with calls has the same text after a plain question, up to empty thoughts and blanks: then
    none of it is from another message."""
    messages = [ASKED, message]
    try:
        prompt = chat.render(row, messages[:1], add_generation_prompt=True)
        alone = chat.render(row, messages)
    except ValueError:
        return False
    end = _end_of_calls(chat, row, alone, messages, 1)
    plain = re.compile(r"</?think>|\s")
    return end is not None and plain.sub("", alone[len(prompt) : end]) == plain.sub("", said)


def _content_end(
    chat: ChatTemplate, row: dict, text: str, messages: list[dict], i: int, start: int
) -> int | None:  # fmt: skip
    """Return the place where the content of turn `i` ends, which is sampled from `start` on."""
    message = messages[i]
    if message.get("tool_calls") and not message["content"].strip():
        thought = (message.get("reasoning_content") or "").strip()
        place = text.find(thought, start)
        return place + len(thought) if thought and place >= 0 else start
    if i == len(messages) - 1 and not message.get("tool_calls"):
        return len(text) - len(chat.end.tail) if chat.end and text.endswith(chat.end.tail) else None
    if chat.end and chat.end.earlier and not message.get("tool_calls"):
        end = text.find(chat.end.earlier, start)
        if end >= 0 and _beside(text[start:end], message) is not None:
            return end
    mark = MARK
    while mark in text:
        mark += ")"
    marked = [*messages[:i], message | dict(content=mark), *messages[i + 1 :]]
    try:
        _, found, after = chat.render(row, marked).partition(mark)
    except ValueError:
        return None
    return len(text) - len(after) if found and text.endswith(after) else None


def _end_of_calls(chat: ChatTemplate, row: dict, text: str, messages: list[dict], i: int) -> int | None:
    """Return the end of turn `i`, which has tool calls. Special tokens around the calls do not end it: the token that
    does follows the last call also where no result follows."""
    after = _after_calls(chat, row, messages, i)
    if chat.end is None or chat.end.appended or not text.endswith(after):
        return None
    shared = os.path.commonprefix([after, _after_calls(chat, row, messages[: i + 1], i)])
    tokens = chat.added_tokens(shared)
    ends = [end for token, end in tokens if token == chat.end.token] or [end for _, end in tokens]
    return len(text) - len(after) + ends[-1] if ends else None


def _after_calls(chat: ChatTemplate, row: dict, messages: list[dict], i: int) -> str:
    """Return the text of a conversation behind the name of the last call in turn `i`."""
    *calls, last = messages[i]["tool_calls"]
    marked = last | dict(function=last["function"] | dict(name="marked_call"))
    turn = messages[i] | dict(tool_calls=[*calls, marked])
    _, _, after = chat.render(row, [*messages[:i], turn, *messages[i + 1 :]]).partition("marked_call")
    return after.replace("marked_call", last["function"]["name"])  # some templates repeat it in the result


def _require_shown(chat: ChatTemplate, row: dict, messages: list[dict], text: str) -> None:
    """Raise `ValueError` if the template leaves out a message or a tool call. Conversations of one structure are
    shown alike, so each structure is probed once, with a mark in place of each content and of each call's name."""
    structure = (bool(row.get("tools")), *(_structure(message) for message in messages))
    if structure in chat.shown:
        return
    marked = [_marked(message, i) for i, message in enumerate(messages)]
    try:
        shown = chat.render(row, marked).lower()  # some templates change the case
    except ValueError:  # the template reads the content; then the text itself must be there
        shown, marked = text.lower(), messages
    for number, (message, given) in enumerate(zip(marked, messages, strict=True), 1):
        names = [call["name"] for call in _calls(message)]
        omitted = [call["name"] for call, name in zip(_calls(given), names, strict=True) if name.lower() not in shown]
        problem = f"omits the tool call of {omitted[0]}" if omitted else "leaves it out; change the role"
        if omitted or message["content"].strip().lower() not in shown:
            raise ValueError(f"{row['_source']}: turn {number} ({given['role']}): the chat template {problem}")
    chat.shown.add(structure)


# ---- messages ----


def _structure(message: dict) -> tuple[str, bool, bool, int]:
    """Return what decides whether a template shows a message."""
    return message["role"], bool(message["content"].strip()), "reasoning_content" in message, len(_calls(message))


def _calls(message: dict) -> list[dict]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _marked(message: dict, number: int) -> dict:
    """Return a message with marks in place of its content and of the names of its calls."""
    marked = message | dict(content=f"(this is turn {number})" if message["content"].strip() else "")
    if calls := message.get("tool_calls"):
        names = (f"turn_{number}_call_{i}" for i in range(len(calls)))
        functions = (call["function"] | dict(name=name) for call, name in zip(calls, names, strict=True))
        marked["tool_calls"] = [call | dict(function=f) for call, f in zip(calls, functions, strict=True)]
    return marked


def _is_continued(messages: list[dict]) -> bool:
    """Return whether the model is to continue the last message."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def _after_prompt(prompt: str, message: dict) -> str:
    """Return a message as the model writes it after `prompt`, which may have opened the thought."""
    thought, answer = message.get("reasoning_content"), message["content"]
    tag = opened_thought(prompt)
    if tag is None:
        return with_thought(thought, answer) if thought else answer
    close = closing(tag)
    if not thought and close in answer and tag not in answer:
        return answer
    if not thought and answer.lstrip().startswith(tag):
        return answer.lstrip().removeprefix(tag).removeprefix("\n" if prompt.endswith("\n") else "")
    return f"{thought or ''}\n{close}\n\n{answer}"


def _beside(said: str, message: dict) -> str | None:
    """Return what a turn's text has beside the message's thought and answer; None unless it ends with the answer."""
    parts = [message.get("reasoning_content") or "", *re.split("</?think>", message["content"])]
    parts = [part.strip() for part in parts if part.strip()]
    rest = said.rstrip()
    while parts and rest.endswith(("<think>", "</think>")):
        rest = rest.removesuffix("<think>").removesuffix("</think>").rstrip()
    if parts and not rest.endswith(parts[-1]):
        return None
    extra = ""
    for part in reversed(parts):
        if part not in rest:
            return None
        rest, _, after = rest.rpartition(part)
        extra = after + extra
    return rest + extra
