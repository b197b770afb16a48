"""The 41 templates of real models in TRL: every conversation is encoded as its model would sample
it, or refused."""

from collections import Counter

import pytest
from field.families import TRL, TRL_FAMILIES
from field.matrix import CONVERSATIONS, MORE, TOOL, verdicts
from field.oracle import check_sft

pytestmark = pytest.mark.skipif(
    not TRL.is_dir(), reason="the templates of TRL are not here; run make field"
)


def test_every_template_is_in_the_matrix():
    files = {file for file in TRL.glob("*.jinja") if not file.stem.endswith("_training")}
    assert {family.template for family in TRL_FAMILIES} == files


def test_no_conversation_is_silently_wrong():
    found = verdicts(TRL_FAMILIES)
    refused = Counter(verdict for verdict in found.values() if verdict.startswith("refused"))
    assert not [place for place, verdict in found.items() if verdict.startswith("wrong")]
    assert refused == {
        "refused: column tools: the chat template does not read it": 13,
        "refused: the chat template refuses the messages": 6,
        "refused: assistant: the chat template shows it in another form than the sampled one": 4,
        "refused: assistant: the chat template omits the tool call": 1,
    }


def test_content_behind_the_calls_of_two_rounds():
    """gemma4_v2 writes the calls of a turn in front of its content."""
    (family,) = [family for family in TRL_FAMILIES if family.template.stem == "gemma4_v2"]
    asked, called, told, said = CONVERSATIONS["tools"]
    called = called | dict(content="Let me add.")
    messages = [asked, called, told, said, *MORE[:1], called, told, said]
    check_sft(family, family.encoder(), messages, tools=[TOOL])
