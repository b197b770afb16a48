"""Conversations refused in training are refused in sampling, in the same words; chat and evaluation
sample too."""

from collections.abc import Callable

import pytest
from field.families import STOP, Family, ours
from field.matrix import ASKED, CALL, TOOL, turn

from common.data.encode import Encoder
from common.data.pairs import encode_pair

SAID, WORSE = turn("assistant", "It is 7."), turn("assistant", "It is 8.")
CALLED = [ASKED, turn("assistant", "", tool_calls=[CALL]), turn("tool", "7", name="add")]
REFUSALS: dict[str, tuple[Family, list[dict], dict, str]] = {
    "by the template": (
        ours("gemma2", "gemma", ("<end_of_turn>",)), [turn("system", "Be brief."), ASKED], {},
        "x:1: the chat template refuses the messages: no system turn",
    ),
    "tools": (
        ours("zephyr", "mistral_v1", STOP), [ASKED], dict(tools=[TOOL]),
        "x:1: column tools: the chat template does not read it",
    ),
    "a role": (
        ours("zephyr", "mistral_v1", STOP), [ASKED, SAID, turn("tool", "7")], {},
        r"x:1: turn 3 \(tool\): the chat template leaves it out",
    ),
    "a call": (
        ours("zephyr", "mistral_v1", STOP), CALLED[:2] + [ASKED], {},
        r"x:1: turn 2 \(assistant\): the chat template omits the tool call of add",
    ),
}  # fmt: skip


def sft(encoder: Encoder, prompt: list[dict], row: dict) -> object:
    return encoder.sft(row | dict(messages=[*prompt, SAID]), ("messages",))


def completion(encoder: Encoder, prompt: list[dict], row: dict) -> object:
    return encoder.completion(row | dict(prompt=prompt, completion=[SAID]), "prompt", "completion")


def pair(encoder: Encoder, prompt: list[dict], row: dict) -> object:
    return encode_pair(
        encoder,
        row | dict(prompt=prompt, chosen=[SAID], rejected=[WORSE]),
        ("prompt", "chosen", "rejected"),
    )


def sampling(encoder: Encoder, prompt: list[dict], row: dict) -> object:
    return encoder.prompt(row | dict(prompt=prompt), ("prompt",))


@pytest.mark.parametrize("use", [sft, completion, pair, sampling])
@pytest.mark.parametrize("kind", REFUSALS)
def test_a_conversation_is_refused_alike(kind: str, use: Callable):
    family, prompt, columns, message = REFUSALS[kind]
    with pytest.raises(ValueError, match=message) as error:
        use(family.encoder(), prompt, dict(_source="x:1", **columns))
    assert "\n" not in str(error.value)
