"""Conversations that chat templates are known to treat differently."""


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
