r"""Conversations -> text with the places of the model's turns, for training and for sampling.

A turn of the model is trained as it is sampled: what the chat template writes after its prompt
when the turn is the last one, up to the token that ends it. A turn that the whole text shows in
another form, such as an earlier turn without its thought, is context.

For example, Qwen3's template drops earlier thoughts. Two rounds, the first with a thought:

    user: 2+3?    assistant: (a sum) 5    user: Twice?    assistant: 10

    whole text    <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n
                  <|im_start|>user\nTwice?<|im_end|>\n<|im_start|>assistant\n
                  <think>\n\n</think>\n\n10<|im_end|>\n
    sampled       <think>\na sum\n</think>\n\n5<|im_end|>     the text has no such turn: context
                  <think>\n\n</think>\n\n10<|im_end|>        trained, but not the \n after it
"""

import contextlib
import re
from typing import NamedTuple

from common.text.chat import ASKED, MARK, ChatTemplate
from common.text.messages import (
    bad_row,
    closing,
    opened_thought,
    tools_field,
    with_results_in_order,
    with_thought,
)

ANOTHER_FORM = "the chat template shows it in another form than the sampled one"


class Turn(NamedTuple):
    """A turn of the model in a text, as it is sampled: from the end of its prompt to the end of its
    last token."""

    start: int
    end: int
    trained: bool = False


class Rendering(NamedTuple):
    """Text of a conversation with the turns of the model that it shows as they are sampled."""

    text: str
    turns: list[Turn]
    context_turns: int = 0  # turns that were to be trained, but are shown in another form


class Sampled(NamedTuple):
    """A conversation when the model has sampled its last message."""

    prompt: str | None  # text before its last message; None if the template refuses it
    text: str | None  # text with its last message; None if the template refuses it
    token: str  # the token that ends the turn; empty if there is none


def prompt_of(chat: ChatTemplate, row: dict, messages: list[dict]) -> Rendering:
    """Return the text from which the model's next turn is sampled. A turn of the model at the end
    of `messages` is continued. Raises `ValueError` if the template leaves a message out."""
    row, messages = _as_template_reads(chat, row, messages)
    begun = messages.pop() if is_answer(messages) else None
    text = chat.render(row, messages, add_generation_prompt=True)
    require_shown(chat, row, messages, text)
    turns, _ = _turns(chat, row, text, messages, _sampled_turns(chat, row, messages))
    text = _with_begun(chat, row, messages, text, begun) if begun else text
    return Rendering(text, [*turns.values()])


def conversation_of(
    chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int = 0,
    train_on_all: bool = False,
) -> Rendering:  # fmt: skip
    """Return a conversation whose turns of the model from message `first_trained` on are trained,
    except those with `weight` 0. The first trained message continues the one before it if both are
    the model's. With `train_on_all` the text is trained as it is, and its turns are not looked for.
    Raises `ValueError` if the template leaves a message out, or shows no turn as it is sampled."""
    if is_answer(messages[:first_trained]) and messages[first_trained]["role"] == "assistant":
        return _continuation_of(chat, row, messages, first_trained)
    row, messages = _as_template_reads(chat, row, messages)
    sampled = _sampled_turns(chat, row, messages)
    last = sampled.get(len(messages) - 1)
    text = last.text if last and last.text else chat.render(row, messages)
    require_shown(chat, row, messages, text)
    if train_on_all:
        return Rendering(text, [])
    if not any(i >= first_trained for i in sampled):
        raise bad_row(row, "no message with the role assistant to train on")
    wanted = [
        i
        for i in sampled
        if i >= first_trained and all(messages[i].get(key, True) for key in ("weight", "train"))
    ]
    turns, problems = _turns(chat, row, text, messages, sampled)
    untrained = [i for i in wanted if i in problems]
    if untrained and untrained == wanted:
        i = untrained[-1]
        raise bad_row(row, f"turn {i + 1} (assistant): {problems[i]}")
    turns = [turn._replace(trained=i in wanted) for i, turn in turns.items()]
    return Rendering(text, turns, len(untrained))


def reply_of(chat: ChatTemplate, row: dict, turn: dict, messages: list[dict]) -> tuple[str, str]:
    """Return the token that ends a turn of the model like `turn`, and the text after it:
    `messages`, up to the start of the model's next turn. Raises `ValueError` if the template writes
    no such token or leaves a message out."""
    row, messages = _as_template_reads(chat, row, [ASKED, turn, *messages])
    text = chat.render(row, messages, add_generation_prompt=True)
    require_shown(chat, row, messages, text)
    sampled = as_sampled(chat, row, messages[:2])
    if sampled.text and sampled.token:
        done, token, _ = sampled.text.rpartition(sampled.token)
        if token and text.startswith(done + token):
            return token, text[len(done + token) :]
    with contextlib.suppress(ValueError):  # without an empty thought
        return sampled.token, text[_turn(chat, row, text, messages[:2], sampled).end :]
    if turn.get("tool_calls") or MARK not in text:
        raise ValueError("the chat template puts no end-of-turn token after a turn of the model")
    _, _, text = text.partition(MARK)  # another token ends earlier turns
    ends = [end for _, end in chat.added_tokens(text)]
    return sampled.token, text[ends[0] :] if ends else text


def is_answer(messages: list[dict]) -> bool:
    """Return whether the last message is text of the model, which it can continue."""
    if not messages or messages[-1]["role"] != "assistant":
        return False
    return not messages[-1].get("tool_calls")


def _as_template_reads(
    chat: ChatTemplate, row: dict, messages: list[dict]
) -> tuple[dict, list[dict]]:
    """Return the row with its tools as schemas, and the messages as the template has them."""
    if row.get("tools"):
        row = row | dict(tools=tools_field(row))
    return row, with_results_in_order(row, chat.normal(messages))


# ---- turns of the model ----


def _sampled_turns(chat: ChatTemplate, row: dict, messages: list[dict]) -> dict[int, Sampled]:
    """Return the conversation after each turn of the model, by the turn's number."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return {i: as_sampled(chat, row, messages[: i + 1]) for i in turns}


def as_sampled(chat: ChatTemplate, row: dict, messages: list[dict]) -> Sampled:
    """Return a conversation when the model has sampled its last message. A template may leave out
    the token that ends the turn, or a thought that it opens in the prompt: then the prompt and the
    turn are put together here."""
    prompt = text = None
    with contextlib.suppress(ValueError):
        prompt = chat.render(row, messages[:-1], add_generation_prompt=True)
    with contextlib.suppress(ValueError):
        text = chat.render(row, messages)
    end = chat.end_of_calls if messages[-1].get("tool_calls") else chat.end
    if end is None or text is None:
        return Sampled(prompt, text, "")
    if prompt and is_answer(messages) and opened_thought(prompt) and not text.startswith(prompt):
        return Sampled(prompt, prompt + after_prompt(prompt, messages[-1]) + end.tail, end.token)
    return Sampled(prompt, text + end.token if end.appended else text, end.token)


def _turns(
    chat: ChatTemplate, row: dict, text: str, messages: list[dict], sampled: dict[int, Sampled]
) -> tuple[dict[int, Turn], dict[int, ValueError]]:
    """Return the turns of the model that the text shows as they are sampled, by the number of the
    message, and why it does not show the others so."""
    turns: dict[int, Turn] = {}
    problems: dict[int, ValueError] = {}
    for i in sampled:
        try:
            turns[i] = _turn(chat, row, text, messages[: i + 1], sampled[i])
        except ValueError as problem:
            problems[i] = problem
    return turns, problems


def _turn(chat: ChatTemplate, row: dict, text: str, messages: list[dict], sampled: Sampled) -> Turn:
    """Return the turn at the end of `messages`, the start of a conversation with this text. Raises
    `ValueError` if the text does not show the turn as it is sampled."""
    turn = _text_of_turn(sampled)
    place = 0
    thought = messages[-1].get("reasoning_content") or ""
    for part in (thought, *re.split("</?think>", messages[-1]["content"])):
        part = part.strip()
        place = turn.find(part, place) + len(part)
        if place < len(part):
            raise ValueError("the chat template changes its text or drops its thought")
    structure = _structure(row, messages)
    if structure not in chat.usual:  # none of the turn is from another message
        tools = row.get("tools") if messages[-1].get("tool_calls") else None
        alone = as_sampled(chat, row | dict(tools=tools), [ASKED, messages[-1]])
        chat.usual[structure] = _squeezed(turn) in _squeezed(_text_of_turn(alone))
    if not chat.usual[structure]:
        raise ValueError("the chat template writes other text into it")
    start = end = len(sampled.prompt)
    while text.startswith(sampled.prompt) and (end := text.find(sampled.token, end)) >= 0:
        end += len(sampled.token)
        if _squeezed(text[start:end]) == _squeezed(turn):
            return Turn(start, end)
    raise ValueError(ANOTHER_FORM)


def _text_of_turn(sampled: Sampled) -> str:
    """Return the turn from the end of its prompt to the end of its last token."""
    prompt, text, token = sampled
    if prompt is None or text is None:
        raise ValueError("it has no prompt")
    if not text.startswith(prompt):
        raise ValueError(ANOTHER_FORM)
    end = text.rfind(token, len(prompt)) + len(token)
    if not token or end < len(token):
        raise ValueError("the chat template changes its text or puts no end-of-turn token after it")
    return text[len(prompt) : end]


def _squeezed(text: str) -> str:
    """Return a text without blanks and the tags of an empty thought, which earlier turns lack."""
    return re.sub(r"\s|</?think>", "", text)


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


# ---- messages that the template leaves out ----


def require_shown(chat: ChatTemplate, row: dict, messages: list[dict], text: str) -> None:
    """Raise `ValueError` if the template leaves out a message or a tool call. Conversations of one
    structure are shown alike, so each structure is probed once, with a mark in place of each
    content and of each call's name."""
    structure = _structure(row, messages)
    if structure in chat.shown:
        return
    marked = [_marked(message, i) for i, message in enumerate(messages)]
    try:
        text = chat.render(row, marked)
    except ValueError:  # the template reads the content; then the text itself must be there
        marked = messages
    text = text.lower()  # some templates change the case
    for number, (message, mark) in enumerate(zip(messages, marked, strict=True), 1):
        turn = f"turn {number} ({message['role']}): the chat template"
        if mark["content"].strip().lower() not in text:
            raise bad_row(row, f"{turn} leaves it out; change the role")
        calls = zip(message.get("tool_calls", ()), mark.get("tool_calls", ()), strict=True)
        for call, marked_call in calls:
            if marked_call["function"]["name"].lower() not in text:
                raise bad_row(row, f"{turn} omits the tool call of {call['function']['name']}")
    chat.shown.add(structure)


def _structure(row: dict, messages: list[dict]) -> tuple:
    """Return what decides whether a template shows the messages."""
    flags = (bool(row.get("tools")), str(row.get("chat_template_kwargs")))
    for m in messages:
        flags += (m["role"], bool(m["content"].strip()), "reasoning_content" in m)
        flags += (len(m.get("tool_calls", ())),)
    return flags


def _marked(message: dict, number: int) -> dict:
    """Return a message with marks in place of its content and of the names of its calls."""
    marked = message | dict(content=f"(turn {number})" if message["content"].strip() else "")
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            call | dict(function=call["function"] | dict(name=f"turn_{number}_call_{i}"))
            for i, call in enumerate(calls)
        ]
    return marked


# ---- a turn of the model that a prompt begins and a completion continues ----


def _with_begun(
    chat: ChatTemplate, row: dict, messages: list[dict], prompt: str, begun: dict
) -> str:
    """Return a prompt with the beginning of the model's turn, after what the template writes
    before the answer. `continue_final_message` would drop blanks at its end."""
    if not begun["content"].lstrip().startswith("<think>"):
        text = chat.render(row, [*messages, begun | dict(content=MARK)])
        head, mark, _ = text.partition(MARK)
        if mark and head.startswith(prompt):
            return head + begun["content"]
    return prompt + after_prompt(prompt, begun)


def _continuation_of(
    chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int
) -> Rendering:
    """Return a conversation whose only trained message continues the turn before it."""
    turn = f"turn {first_trained + 1}"
    completion = messages[first_trained]
    if len(messages) > first_trained + 1:
        raise bad_row(row, f"{turn}: no further turn may follow one that is continued")
    if completion.get("tool_calls") or completion.get("reasoning_content") or chat.end is None:
        raise bad_row(row, f"{turn}: only text can continue a turn of the model")
    prompt = prompt_of(chat, row, messages[:first_trained])
    (completion,) = chat.normal([completion])
    text = prompt.text + completion["content"]
    added = Turn(len(prompt.text), len(text) + len(chat.end.last), trained=True)
    return Rendering(text + chat.end.tail, [*prompt.turns, added])
