"""Conversations that chat templates are known to treat differently."""

import re

from field.families import Family
from field.oracle import Wrong, check_sft

from common.data.encode import Encoder


def turn(role: str, content: str, **more: object) -> dict:
    return dict(role=role, content=content, **more)


NUMBER = dict(a=dict(type="integer", description="first"))
PARAMETERS = dict(type="object", properties=NUMBER, required=["a"])
ADD = dict(name="add", description="Add numbers.", parameters=PARAMETERS)
TOOL = dict(type="function", function=ADD)
CALL = dict(type="function", id="abcdefghi", function=dict(name="add", arguments=dict(a=7)))
ASKED, SYSTEM = turn("user", "What is 3+4?"), turn("system", "Be brief.")
THOUGHT = turn("assistant", "It is 7.", reasoning_content="Add them.")
MORE = [turn("user", "And 5+5?"), turn("assistant", "That is 10.")]
CONVERSATIONS: dict[str, list[dict]] = {
    "plain": [ASKED, turn("assistant", "It is 7.")],
    "system": [SYSTEM, ASKED, turn("assistant", "It is 7.")],
    "three turns": [
        *(ASKED, turn("assistant", "It is 7."), *MORE),
        *(turn("user", "Sure?"), turn("assistant", "Yes!")),
    ],
    "thought": [ASKED, THOUGHT],
    "inline thought": [ASKED, turn("assistant", "<think>\nAdd them.\n</think>\n\nIt is 7.")],
    "answer in question": [turn("user", "Is 3 in 43?"), turn("assistant", "in")],
    "answer in thought": [ASKED, turn("assistant", "7", reasoning_content="3+4 is 7, so 7.")],
    "blanks": [turn("user", "  3+4? "), turn("assistant", " It is\n 7. \n")],
    "unicode": [turn("user", "Ça va, 世界 🙂?"), turn("assistant", "Très bien 👍🏽 – 好 é")],
    "thoughts": [ASKED, THOUGHT, MORE[0], MORE[1] | dict(reasoning_content="Twice five.")],
    "assistant first": [turn("assistant", "Hello there."), ASKED, turn("assistant", "It is 7.")],
    "developer": [turn("developer", "Be brief."), ASKED, turn("assistant", "It is 7.")],
    "tools": [
        ASKED,
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "7", name="add", tool_call_id="abcdefghi"),
        turn("assistant", "It is 7."),
    ],
}


# Reasons of refusals; what follows them names words of the row.
REASONS = (
    "column tools: the chat template does not read it",
    "the chat template refuses the messages",
    "assistant: the chat template shows it in another form than the sampled one",
    "assistant: the chat template omits the tool call",
)


def reason_of(error: ValueError) -> str:
    text = re.sub(r"turn \d+ \((\w+)\)", r"\1", str(error).removeprefix("x:1: "))
    return next((reason for reason in REASONS if text.startswith(reason)), text)


def verdict(family: Family, encoder: Encoder, conversation: str) -> str:
    """Return `right`, `refused: REASON` or `wrong: REASON`."""
    row = dict(tools=[TOOL]) if conversation == "tools" else {}
    try:
        check_sft(family, encoder, CONVERSATIONS[conversation], **row)
    except ValueError as error:
        return f"refused: {reason_of(error)}"
    except Wrong as error:
        return f"wrong: {error}"
    return "right"


def verdicts(families: list[Family]) -> dict[tuple[str, str], str]:
    """Return the verdict for each template and conversation."""
    found = {}
    for family in families:
        encoder = family.encoder()
        for conversation in CONVERSATIONS:
            found[family.name, conversation] = verdict(family, encoder, conversation)
    return found
