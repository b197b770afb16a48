r"""Conversations -> for each turn of the model, the prompt before it and the text that it says.

A turn is trained in the form in which the model would sample it. Its prompt is what an engine would
get. Its text is what the chat template writes after this prompt if the turn is the last one, up to
the end token. This matters because templates rewrite earlier turns. Qwen3's, for example, drops
earlier thoughts. Two rounds, the first with a thought:

    user: 2+3?    assistant: (a sum) 5    user: Twice?    assistant: 10

    prompt  <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n
    text    <think>\na sum\n</think>\n\n5<|im_end|>

    prompt  <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n
            <|im_start|>user\nTwice?<|im_end|>\n<|im_start|>assistant\n
    text    <think>\n\n</think>\n\n10<|im_end|>

With most templates, the next prompt begins with all the text so far: then the turns are trained as
one sequence."""

import os
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


class Said(NamedTuple):
    """A turn of the model."""

    prompt: str  # what an engine gets before the turn
    text: str  # what the model says, with the token that ends the turn
    number: int  # index of the turn's message


def template_form(chat: ChatTemplate, row: dict, messages: list[dict]) -> tuple[dict, list[dict]]:
    """Return the row with its tools as schemas, and the messages as the template expects them."""
    if row.get("tools"):
        row = row | dict(tools=tools_field(row))
    return row, with_results_in_order(row, chat.normal(messages))


def is_answer(messages: list[dict]) -> bool:
    """Return whether the last message is text of the model, so that the model can continue it."""
    if not messages or messages[-1]["role"] != "assistant":
        return False
    return not messages[-1].get("tool_calls")


# The functions below take the row and the messages as `template_form` returns them.


def prompt_of(chat: ChatTemplate, row: dict, messages: list[dict]) -> str:
    """Return the text after which the model's next turn is sampled. If the last of `messages` is
    the model's, the model continues it: the prompt then ends with its text, without an end token.
    (transformers' `continue_final_message` would drop blanks at its end.)

    Raises `ValueError` if the template leaves a message out."""
    begun = messages[-1] if is_answer(messages) else None
    asked = messages[:-1] if begun else messages
    require_shown(chat, row, asked)
    prompt = chat.render(row, asked, add_generation_prompt=True)
    if begun is None:
        return prompt
    if not begun["content"].lstrip().startswith("<think>"):
        text = chat.render(row, [*asked, begun | dict(content=MARK)])
        head, mark, _ = text.partition(MARK)
        if mark and head.startswith(prompt):
            return head + begun["content"]
    return prompt + _begun_after(prompt, begun)


def _begun_after(prompt: str, message: dict) -> str:
    """Return the text of a begun message after `prompt`, which may have opened a thought."""
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


def turns_of(
    chat: ChatTemplate,
    row: dict,
    messages: list[dict],
    first_trained: int = 0,
    last_alone: bool = False,
) -> tuple[list[Said], list[ValueError]]:
    """Return the turns of the model from message `first_trained` on (`last_alone`: only the last),
    and an error for each turn that cannot be trained, because the template does not write it after
    its prompt. Turns with `weight` 0 are left out. So is the first message of a conversation, since
    nobody asked for it. If the first trained message and the one before it are both text of the
    model, the model continues its own turn.

    Raises `ValueError` if the template leaves a message out, or if there is no turn to train. If
    every turn has an error, raises the last one."""
    if _is_continued(messages, first_trained):
        return [_continuation(chat, row, messages, first_trained)], []
    require_shown(chat, row, messages)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_trained]
    if not turns:
        raise bad_row(row, "no message with the role assistant to train on")
    if turns == [0]:
        raise bad_row(row, "turn 1 (assistant): nothing asks for it")
    wanted = [i for i in turns if i > 0 and is_wanted(messages[i])]
    said: list[Said] = []
    errors: list[ValueError] = []
    for i in wanted[-1:] if last_alone else wanted:
        try:
            prompt = chat.render(row, messages[:i], add_generation_prompt=True)
            said.append(Said(prompt, said_of(chat, row, messages[: i + 1], prompt), i))
        except ValueError as error:
            errors.append(error)
    if errors and not said:
        raise errors[-1]
    return said, errors


def is_wanted(message: dict) -> bool:
    """Return whether this turn is trained: `weight` (OpenAI) or `train` (Axolotl) may be false."""
    return all(message.get(key, True) for key in ("weight", "train"))


def _is_continued(messages: list[dict], first_trained: int) -> bool:
    """Return whether the first trained message continues the one before it."""
    begun, completion = messages[:first_trained], messages[first_trained]
    return is_answer(begun) and completion["role"] == "assistant"


def _continuation(chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int) -> Said:
    """Return the trained message that continues the turn before it. It must be the last."""
    turn = f"turn {first_trained + 1}"
    completion = messages[first_trained]
    if len(messages) > first_trained + 1:
        raise bad_row(row, f"{turn}: no further turn may follow one that is continued")
    if completion.get("tool_calls") or completion.get("reasoning_content") or chat.end is None:
        raise bad_row(row, f"{turn}: only text can continue a turn of the model")
    prompt = prompt_of(chat, row, messages[:first_trained])
    return Said(prompt, completion["content"] + chat.end.last, first_trained)


def said_of(chat: ChatTemplate, row: dict, messages: list[dict], prompt: str) -> str:
    """Return the text of the last of `messages` as the model says it after `prompt`, with its end
    token. Raises `ValueError` if the template writes something else."""
    turn = messages[-1]
    where = f"turn {len(messages)} (assistant): the"
    tag = opened_thought(prompt)
    before = prompt[: prompt.rfind(tag)] if tag else prompt
    text = chat.render(row, messages)
    if not text.startswith(prompt):
        text = _after_header(chat, row, turn, prompt) or text
    if text.startswith(prompt):
        said = text[len(prompt) :]
    elif tag and text.startswith(before):  # the template leaves out the thought that it opens
        said = _with_thought_opened(tag, turn, text[len(before) :])
    elif _has_thought(turn) and re.search(r"(</[\w:]+>|\[/THINK\])\s*$", prompt):
        switch = "set --template_kwargs enable_thinking=true, or "
        advice = f"{switch if 'enable_thinking' in chat.variables else ''}take it out"
        raise bad_row(row, f"{where} prompt ends the thought, the row has one; {advice}")
    else:
        raise bad_row(row, f"{where} chat template does not go on from its prompt")
    header = chat.header.strip()
    if header and said.lstrip().startswith(header):
        raise bad_row(row, f"{where} chat template writes the head of the turn behind its prompt")
    end = chat.end_of(turn)
    if end is None or not end.token:
        raise bad_row(row, f"{where} chat template changes its text or does not end it")
    said = said + end.token if end.appended else said
    said, token, _ = said.rpartition(end.token)
    place = 0
    for part in (turn.get("reasoning_content") or "", *re.split("</?think>", turn["content"])):
        at = said.find(part.strip(), place)
        if not token or at < 0:
            problem = "chat template changes its text, drops its thought or does not end it"
            raise bad_row(row, f"{where} {problem}")
        place = at + len(part.strip())
    return said + token


def _after_header(chat: ChatTemplate, row: dict, turn: dict, prompt: str) -> str | None:
    """Return `prompt` and then `turn`, written as the template writes it after a single question;
    None if the prompt does not end like the prompt of a single question. Some templates join two
    turns of the model into one, so the conversation itself does not show the turn alone."""
    asked = chat.render(row, [ASKED], add_generation_prompt=True)
    alone = chat.render(row, [ASKED, turn])
    header = asked.rpartition(ASKED["content"])[2]
    if alone.startswith(asked) and prompt.endswith(header):
        return prompt + alone[len(asked) :]
    return None


def _has_thought(turn: dict) -> bool:
    return bool(turn.get("reasoning_content")) or turn["content"].lstrip().startswith("<think>")


def _with_thought_opened(tag: str, turn: dict, shown: str) -> str:
    """Return what the model says in a turn if the prompt has already opened a thought: the thought,
    the closing tag and the answer. `shown`: the turn as the template writes it, with or without a
    thought."""
    pattern = rf"(?:\s*{re.escape(tag)}\n?)?(.*?)\n*{re.escape(closing(tag))}"
    inline = re.match(pattern, turn["content"], re.DOTALL)
    thought = turn.get("reasoning_content") or (inline[1] if inline else "")
    head, closed, rest = shown.partition(closing(tag))
    if closed and (inline or head.lstrip().startswith(tag)):
        shown = rest
    if inline or turn.get("tool_calls"):
        shown = shown.lstrip("\n")
    return f"{thought}\n{closing(tag)}\n\n{shown}"


def whole_of(chat: ChatTemplate, row: dict, messages: list[dict], first_trained: int = 0) -> str:
    """Return the text of a whole conversation, with an end token if the model has the last turn.
    Raises `ValueError` if the template leaves a message out."""
    if _is_continued(messages, first_trained):
        said = _continuation(chat, row, messages, first_trained)
        return said.prompt + said.text
    require_shown(chat, row, messages)
    text = chat.render(row, messages)
    end = chat.end_of(messages[-1])
    is_appended = messages[-1]["role"] == "assistant" and end is not None and end.appended
    return text + end.token if is_appended else text


def reply_of(chat: ChatTemplate, row: dict, turn: dict, messages: list[dict]) -> tuple[str, str]:
    """Return the token that ends turns of the model like `turn`, and the text that follows it:
    `messages`, and the start of the model's next turn. Raises `ValueError` if the template writes
    no such token, or leaves a message out."""
    row, messages = template_form(chat, row, [ASKED, turn, *messages])
    require_shown(chat, row, messages)
    texts = []
    for word in ("here", "there!"):  # what two different turns have in common is what follows them
        said = messages[1] | dict(content=word)
        if calls := turn.get("tool_calls"):
            function = calls[-1]["function"] | dict(arguments=dict(x=word))
            said = messages[1] | dict(tool_calls=[*calls[:-1], calls[-1] | dict(function=function)])
        conversation = [messages[0], said, *messages[2:]]
        texts.append(chat.render(row, conversation, add_generation_prompt=True)[::-1])
    following = os.path.commonprefix(texts)[::-1]
    end = chat.end_of(turn)
    tokens = chat.added_tokens(following)
    if end is None or not end.token or not following or (turn.get("tool_calls") and not tokens):
        raise ValueError("the chat template puts no end-of-turn token after a turn of the model")
    if turn.get("tool_calls") or following.startswith(end.last):
        _, token, rest = following.partition(end.token)
        if token:
            return token, rest
    # The template ends earlier turns with another token than the last turn: with one of its own, or
    # with that of the next role.
    token, place = tokens[0] if tokens else ("", 0)
    if end.appended and not turn.get("tool_calls") and following[:place].strip() != token:
        place = 0  # it writes no end token; this one belongs to a message
    return end.token, following[place:]


# ---- messages that the template leaves out ----


def require_shown(chat: ChatTemplate, row: dict, messages: list[dict]) -> None:
    """Raise `ValueError` if the template leaves out a message or a tool call. To find out, render
    the conversation with a mark in place of each content and of each call's name."""
    marked = [_marked(message, i) for i, message in enumerate(messages)]
    try:
        text = chat.render(row, marked)
    except ValueError:  # the template needs the real content: look for that instead
        marked = messages
        text = chat.render(row, messages)
    text = text.lower()  # some templates change the case
    for number, (message, mark) in enumerate(zip(messages, marked, strict=True), 1):
        turn = f"turn {number} ({message['role']}): the chat template"
        if mark["content"].strip().lower() not in text:
            raise bad_row(row, f"{turn} leaves it out; change the role")
        calls = zip(message.get("tool_calls", ()), mark.get("tool_calls", ()), strict=True)
        for call, marked_call in calls:
            if marked_call["function"]["name"].lower() not in text:
                raise bad_row(row, f"{turn} omits the tool call of {call['function']['name']}")


def _marked(message: dict, number: int) -> dict:
    """Return a message with marks in place of its content and of the names of its calls."""
    marked = message | dict(content=f"(turn {number})" if message["content"].strip() else "")
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            call | dict(function=call["function"] | dict(name=f"turn_{number}_call_{i}"))
            for i, call in enumerate(calls)
        ]
    return marked
