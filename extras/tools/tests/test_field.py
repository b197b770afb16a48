"""Tool calls in the templates and tokenizers of real models: the parser reads what the template
writes, and an episode has the ids of the same conversation in sft.py."""

import functools
from collections import Counter

import pytest
from field.families import FAMILIES, TRL_FAMILIES, Family
from field.test_properties import encoder_of, few, turn, with_packages
from hypothesis import assume, given
from hypothesis import strategies as st

from common.text.chat import ChatTemplate
from extras.tools.parser import written_calls
from extras.tools.tests.episodes import assert_episode_equals_sft, call, parser_of

PROPERTIES = dict(
    number=dict(type="integer", description="a number"),
    text=dict(type="string", description="a text"),
    flag=dict(type="boolean", description="yes or no"),
    items=dict(type="array", items=dict(type="integer"), description="some numbers"),
)
PARAMETERS = dict(type="object", properties=PROPERTIES)
FUNCTION = dict(description="A tool.", parameters=PARAMETERS)
TOOLS = [dict(type="function", function=dict(name=n) | FUNCTION) for n in ("look_up", "add")]
TEXTS = ["7", "true", "a b", 'say "hi"', "it's", "l1\nl2", "{x: [1]}", "好 🙂", "x = 1\nprint(x)"]
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


CALLS = st.lists(
    st.builds(call, st.sampled_from(["look_up", "add"]), ARGUMENTS), min_size=1, max_size=2
).map(lambda drawn: [one | dict(id=f"call{number:05}") for number, one in enumerate(drawn)])


def require_typed(family: Family, calls: list[dict]) -> None:
    """Leave out texts that vLLM's parser of Muse reads as a number or a truth value, and quotes in
    one of several calls, which LFM2's template does not escape."""
    name = family.template.stem
    texts = [one["function"]["arguments"].get("text") for one in calls]
    assume(name != "muse_glimmer" or not {"7", "true"} & set(texts))
    assume(name not in ("lfm2_2_5", "lfm2_2_5_v2") or len(calls) == 1 or "it's" not in texts)


@pytest.mark.parametrize("family", with_packages(FAMILIES + TRL_FAMILIES))
def test_calls_are_read_as_written_and_an_episode_has_the_ids_of_sft(family):
    encoder, parser = prepared(family)
    if parser is None:
        pytest.skip("the template is refused with --tools")
    chat = ChatTemplate(encoder.tokenizer)
    ends = set(map(encoder.tokenizer.convert_tokens_to_ids, family.ends))
    counts = Counter()

    @few
    @given(CALLS, st.sampled_from(["7", "error: no", "l1\nl2", '{"a": [1]}']))
    def check(calls, result):
        require_typed(family, calls)
        try:
            prompt, text = written_calls(chat, dict(_source="x:1", tools=TOOLS), calls)
        except ValueError:  # the template refuses several calls
            assert len(calls) > 1
            return
        read = [(one.name, one.arguments) for one in parser.parse(text, TOOLS, prompt).calls]
        assert read == [(f["name"], f["arguments"]) for f in (one["function"] for one in calls)]
        counts["read"] += 1
        asked, said = turn("user", "What is it?"), turn("assistant", "It is 7.")
        results = [
            turn("tool", result, name=one["function"]["name"], tool_call_id=one["id"])
            for one in calls
        ]
        messages = [asked, turn("assistant", "", tool_calls=calls), *results, said]
        row = dict(messages=messages, tools=TOOLS, _source="x:1")
        try:
            sample, *_ = encoder.sft(row, ("messages",))
        except ValueError:  # the template refuses these results
            return
        if not sample.turns_left_out:
            assert_episode_equals_sft(encoder, parser, row, ends)
            counts["equal"] += 1

    check()
    # This template writes the head of an answer to results behind its prompt.
    is_left_out = family.template.stem == "diffusion_gemma"
    assert counts["read"] > 2 and (counts["equal"] or is_left_out)
