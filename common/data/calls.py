"""Turns with tool calls: where they end in the text of a chat template."""

import os
import re

from common.data.chat import ASKED, CALL, SAID, ChatTemplate
from common.data.messages import named, texts_of

# the function of `CALL`, as the tools of a row
_PROBED = dict(
    name="probe",
    description="Probe.",
    parameters=dict(
        type="object",
        properties=dict(
            x=dict(type="integer", description="number"), s=dict(type="string", description="text")
        ),
    ),
)
PROBE = dict(_source="--tools", tools=[dict(type="function", function=_PROBED)])
PROBED_RESULT = dict(role="tool", name="probe", tool_call_id=CALL["id"], content="?")


def end_of_calls(
    chat: ChatTemplate, row: dict, text: str, messages: list[dict], i: int, start: int
) -> int | str:
    """Return the end of turn `i`, which begins at `start`, or why the text does not show it as it
    is sampled."""
    message = messages[i]
    end = _end(chat, row, text, messages, i)
    if end is None or end < start:
        return "the chat template puts no end-of-turn token after it"
    turn = text[start:end]
    if not all(part in turn for part in texts_of(message)):
        return "the chat template changes its text or drops its thought"
    if not _is_usual(chat, row, turn, message):
        return "the chat template writes other text into it"
    return end


def _end(chat: ChatTemplate, row: dict, text: str, messages: list[dict], i: int) -> int | None:
    """Return the end of turn `i`. Special tokens around the calls do not end it: the token that
    does follows the last call also where no result follows."""
    after = _after_calls(chat, row, messages, i)
    if chat.end is None or not text.endswith(after):
        return None
    shared = os.path.commonprefix([after, _after_calls(chat, row, messages[: i + 1], i)])
    tokens = chat.added_tokens(shared)
    if chat.end.appended:  # GLM: the token of the next role ends a turn
        behind = after[len(shared) :]
        tokens = [(token, len(shared) + end) for token, end in chat.added_tokens(behind)[:1]]
        if not behind.strip().startswith(tuple(token for token, _ in tokens)):
            return None
    ends = [end for token, end in tokens if token == chat.end.token] or [end for _, end in tokens]
    return len(text) - len(after) + ends[-1] if ends else None


def after_calls(
    chat: ChatTemplate, row: dict, calls: list[dict], results: list[dict]
) -> tuple[str, str]:
    """Return the token that ends a turn with these calls, and the text behind it: the results up to
    the start of the model's next turn. Raises `ValueError` if the template shows no such token."""
    messages = [ASKED, SAID | dict(content="", tool_calls=calls), *results]
    end = _end(chat, row, chat.render(row, messages), messages, 1)
    if end is None:
        raise ValueError("the chat template puts no end-of-turn token after a tool call")
    text = chat.render(row, messages, add_generation_prompt=True)
    token, _ = chat.added_tokens(text[:end])[-1]
    return token, text[end:]


def end_of_calls_token(tokenizer) -> int | None:
    """Return the token that the tokenizer's chat template writes at the end of a turn with calls,
    which may differ from that of other turns; None without one."""
    chat = ChatTemplate(tokenizer)
    if "tools" not in chat.reads:
        return None
    try:
        token, _ = after_calls(chat, PROBE, [CALL], [PROBED_RESULT])
    except ValueError:
        return None
    return tokenizer.convert_tokens_to_ids(token)


def _after_calls(chat: ChatTemplate, row: dict, messages: list[dict], i: int) -> str:
    """Return the text of a conversation behind the name of the last call in turn `i`."""
    mark = "marked_call"
    *calls, last = messages[i]["tool_calls"]
    turn = messages[i] | dict(tool_calls=[*calls, named(last, mark)])
    _, _, after = chat.render(row, [*messages[:i], turn, *messages[i + 1 :]]).partition(mark)
    return after.replace(mark, last["function"]["name"])  # some templates repeat it in the result


def _is_usual(chat: ChatTemplate, row: dict, turn: str, message: dict) -> bool:
    """Return whether a turn has the same text after a plain question, up to empty thoughts and
    blanks: then none of it is from another message."""
    messages = [ASKED, message, *[PROBED_RESULT] * chat.end.appended]
    try:
        prompt = chat.render(row, messages[:1], add_generation_prompt=True)
        text = chat.render(row, messages)
    except ValueError:
        return False
    end = _end(chat, row, text, messages, 1)
    return end is not None and _plain(text[len(prompt) : end]) == _plain(turn)


def _plain(text: str) -> str:
    return re.sub(r"</?think>|\s", "", text)
