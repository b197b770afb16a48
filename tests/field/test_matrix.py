"""The 41 templates of real models in TRL: every conversation is encoded as its model would sample
it, or refused."""

from collections import Counter

import pytest
from field.families import TRL, TRL_FAMILIES
from field.matrix import CONVERSATIONS, MORE, TOOL
from field.oracle import Wrong, check_sft

pytestmark = pytest.mark.skipif(
    not TRL.is_dir(), reason="the templates of TRL are not here; run make field"
)


def test_every_template_is_in_the_matrix():
    files = {file for file in TRL.glob("*.jinja") if not file.stem.endswith("_training")}
    assert {family.template for family in TRL_FAMILIES} == files


REFUSED = {
    "column tools: the chat template does not read it": 13,
    "the chat template refuses the messages": 6,
    "(assistant): the chat template shows it in another form than the sampled one": 4,
    "(assistant): the chat template omits the tool call": 1,
}


def test_no_conversation_is_silently_wrong():
    refused = Counter()
    for family in TRL_FAMILIES:
        encoder = family.encoder()
        for name, messages in CONVERSATIONS.items():
            columns = dict(tools=[TOOL]) if name == "tools" else {}
            try:
                check_sft(family, encoder, messages, **columns)
            except ValueError as error:
                refused[next(reason for reason in REFUSED if reason in str(error))] += 1
            except Wrong as error:
                pytest.fail(f"{family.name}, {name}: {error}")
    assert refused == REFUSED


def test_content_behind_the_calls_of_two_rounds():
    """gemma4_v2 writes the calls of a turn in front of its content."""
    (family,) = [family for family in TRL_FAMILIES if family.template.stem == "gemma4_v2"]
    asked, called, told, said = CONVERSATIONS["tools"]
    called = called | dict(content="Let me add.")
    messages = [asked, called, told, said, *MORE[:1], called, told, said]
    check_sft(family, family.encoder(), messages, tools=[TOOL])
