"""Tool calls in the templates and tokenizers of real models: the parser reads what the template
writes, and an episode has the ids of the same conversation in sft.py."""

import functools
from collections import Counter

import pytest
from field.families import FAMILIES, TRL_FAMILIES, Family
from field.matrix import turn
from field.test_properties import encoder_of, few, with_packages
from hypothesis import assume, given
from hypothesis import strategies as st

from extras.tools.tests.episodes import assert_episode_equals_sft, call, parser_of, written_and_read

TOOLS = [
    dict(
        type="function",
        function=dict(
            name=name,
            description="A tool.",
            parameters=dict(
                type="object",
                properties=dict(
                    number=dict(type="integer", description="a number"),
                    text=dict(type="string", description="a text"),
                    flag=dict(type="boolean", description="yes or no"),
                    items=dict(
                        type="array", items=dict(type="integer"), description="some numbers"
                    ),
                ),
            ),
        ),
    )
    for name in ("look_up", "add")
]
TEXTS = [
    "7",
    "true",
    "a b",
    'say "hi"',
    "it's",
    "l1\nl2",
    "{x: [1]}",
    "好 🙂",
    "x = 1\nprint(x)",
    "",
]
# templates that show a turn with calls in another form than the sampled one: sft.py refuses it
ONLY_CONTEXT = {
    "qwq", "diffusion_gemma", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra",
    "nemotron_3_5_lightning",
}  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional=dict(
        number=st.integers(-(10**6), 10**6),
        text=st.sampled_from(TEXTS),
        flag=st.booleans(),
        items=st.lists(st.integers(-9, 9), max_size=3),
    ),
).filter(bool)


@functools.cache
def prepared(family: Family) -> tuple:
    return encoder_of(family), parser_of(encoder_of(family).tokenizer)


def several(draw_calls: list[dict]) -> list[dict]:
    """Return calls with ids of their own."""
    return [one | dict(id=f"call{number:05}") for number, one in enumerate(draw_calls)]


CALLS = st.lists(
    st.builds(call, st.sampled_from(["look_up", "add"]), ARGUMENTS),
    min_size=1,
    max_size=2,
).map(several)


def require_typed(family: Family, calls: list[dict]) -> None:
    """Leave out texts that vLLM's parser of Muse reads as a number or a truth value."""
    texts = [one["function"]["arguments"].get("text") for one in calls]
    assume(family.template.stem != "muse_glimmer" or not {"7", "true"} & set(texts))


with_tools = pytest.mark.parametrize("family", with_packages(FAMILIES + TRL_FAMILIES))


@with_tools
def test_the_parser_reads_the_calls_that_the_template_writes(family):
    encoder, parser = prepared(family)
    if parser is None:
        pytest.skip("the template is refused with --tools")
    counts = Counter()

    @few
    @given(CALLS)
    def check(calls):
        require_typed(family, calls)
        try:
            read = written_and_read(encoder.tokenizer, parser, TOOLS, calls)
        except ValueError:  # the template refuses several calls
            assert len(calls) > 1
            return
        wanted = [(one["function"]["name"], one["function"]["arguments"]) for one in calls]
        assert read == wanted
        counts["read"] += 1

    check()
    assert counts["read"] > 2


@with_tools
def test_an_episode_has_the_ids_of_the_same_conversation_in_sft(family):
    encoder, parser = prepared(family)
    if parser is None:
        pytest.skip("the template is refused with --tools")
    ends = set(map(encoder.tokenizer.convert_tokens_to_ids, family.ends))
    counts = Counter()

    @few
    @given(CALLS, st.sampled_from(["7", "error: no", "l1\nl2", '{"a": [1]}']))
    def check(calls, result):
        require_typed(family, calls)
        asked, said = turn("user", "What is it?"), turn("assistant", "It is 7.")
        results = [
            turn("tool", result, name=one["function"]["name"], tool_call_id=one["id"])
            for one in calls
        ]
        messages = [asked, turn("assistant", "", tool_calls=calls), *results, said]
        row = dict(messages=messages, tools=TOOLS, _source="x:1")
        try:
            sample = encoder.sft(row, ("messages",))
        except ValueError:
            counts["refused"] += 1
            return
        if sample.context_turns:
            counts["context"] += 1
            return
        assert_episode_equals_sft(encoder, parser, row, ends)
        counts["equal"] += 1

    check()
    assert counts["equal"] or family.template.stem in ONLY_CONTEXT
