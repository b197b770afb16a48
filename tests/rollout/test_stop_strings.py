"""Stop strings and stop tokens: a turn ends at the token that completes one, in both engines."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from field.real_tokenizers import tokenizer as real_tokenizer
from helpers import tiny_tokenizer
from in_process import NEW_TOKENS, Args
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.completions import complete
from common.data.encode import Encoder
from common.data.sample import Completion
from common.model.hub import eos_token_ids, load_tokenizer
from common.model.tiny import tiny_model
from common.rollout.engine import Engine, Request, empty_completion
from common.rollout.stop_strings import StopStrings

STRINGS = ("\nUser:", "###", "字", "é a", " b", "🙂.")
SEEN = [
    "\nUser",
    ":",
    " #",
    "##",
    "#",
    "字",
    "é",
    " a",
    "a",
    " b",
    "🙂",
    ".",
    "Ça",
    "\n",
    " ",
    "世",
]


def byte_level():
    """Return a tokenizer with a token for each byte and some for several: characters may be split
    anywhere."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "#"), ("#", "#"), ("Ċ", "U"), ("#", "ð"), ("Ã", "©"), ("Ġ", "b"), ("©", "Ġ")]
    vocabulary = {token: i for i, token in enumerate([*bytes_, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = dict(
    byte_fallback=tiny_tokenizer,
    byte_level=byte_level,
    sentencepiece=lambda: real_tokenizer("mistral_v1"),
)


def naive_end(tokenizer, turn: list[int], strings, silent_ids) -> int | None:
    """Return the number of tokens whose text first has a stop string."""
    for end in range(1, len(turn) + 1):
        text = tokenizer.decode([i for i in turn[:end] if i not in silent_ids])
        if any(string in text for string in strings):
            return end
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_turn_ends_at_the_token_that_completes_a_string(name):
    """Also where the string spans tokens, a token ends within a character, tokens without a text
    lie between, or tokens come several at a time."""
    tokenizer, rng, silent_ids = TOKENIZERS[name](), random.Random(0), {0}
    ends = []
    for _ in range(100):
        turn: list[int] = []
        for _ in range(rng.randrange(12)):
            ids = tokenizer(rng.choice(SEEN), add_special_tokens=False)["input_ids"]
            cut = rng.random() < 0.1  # a part of a character, for most tokenizers
            turn += ids[rng.randrange(len(ids)) :] if cut else ids
            turn += [0] * (rng.random() < 0.1)
        strings = rng.sample(STRINGS, rng.randrange(1, 3))
        stop_strings = StopStrings(strings, tokenizer, silent_ids)
        start, end = 3, None
        ids = [5, 5, 5]  # of the prompt
        while end is None and len(ids) < start + len(turn):
            before = len(ids)
            ids += turn[before - start :][: rng.randrange(1, 4)]
            end = stop_strings.end_of_turn(ids, start, before)
        expected = naive_end(tokenizer, turn, strings, silent_ids)
        assert (end and end - start) == expected
        ends.append(expected)
    assert 10 < sum(end is not None for end in ends) < 95


def test_text_ends_before_the_string():
    strings = StopStrings(("b", "##"), tiny_tokenizer(), set())
    assert strings.without_stop("a##b") == strings.without_stop("a") == "a"


# ---- both engines ----

TEXTS = ("1+1=", "123+4=", "a", "the quick brown fox jumps over")


def sampled(engine: Engine, n: int, temperature: float) -> list[Completion]:
    prompts = [engine.tokenizer(text)["input_ids"] for text in TEXTS]
    groups = complete(engine, prompts, n, [11, 12, 13, 14], temperature)
    return [completion for group in groups for completion in group]


@contextlib.contextmanager
def stopping(engine: Engine, strings: tuple[str, ...]) -> Iterator[None]:
    engine.stop_strings = StopStrings(strings, engine.tokenizer, engine.silent_ids)
    try:
        yield
    finally:
        engine.stop_strings = None


def expected(engine: Engine, whole: Completion, strings: tuple[str, ...]) -> dict:
    """Return the completion that ends at a stop string, from the one without."""
    turn = whole.completion_ids
    end = naive_end(engine.tokenizer, turn, strings, engine.silent_ids)
    size = whole.prompt_length + (end or len(turn))
    return dict(
        ids=whole.ids[:size],
        loss_mask=whole.loss_mask[:size],
        versions=whole.versions[:size],
        finish_reason=whole.finish_reason if end is None else "stop",
    )


def fields(completion: Completion) -> dict:
    names = ("ids", "loss_mask", "versions", "finish_reason")
    return {name: getattr(completion, name) for name in names}


def test_engine_cuts_at_a_stop_string(synced):
    whole = sampled(synced, 16, 1.0)
    texts = [completion.text for completion in whole]
    pairs = Counter(text[i : i + 2] for text in texts for i in range(len(text) - 1))
    strings = tuple([pair for pair, _ in pairs.most_common() if "\ufffd" not in pair][:12])
    with stopping(synced, strings):
        cut = sampled(synced, 16, 1.0)
    for completion, without in zip(cut, whole, strict=True):
        assert fields(completion) == expected(synced, without, strings)
        size = len(completion.ids)
        assert len(completion.rollout_logprobs) == size
        assert completion.rollout_logprobs == pytest.approx(
            without.rollout_logprobs[:size], abs=1e-5
        )
        assert not any(string in completion.text for string in strings)
        assert without.text.startswith(completion.text)
    ended = [c for c, without in zip(cut, whole, strict=True) if len(c.ids) < len(without.ids)]
    assert len(whole) > len(ended) > 5
    assert not synced.running and not synced.in_flight


def test_string_that_spans_an_interruption_ends_the_turn(synced):
    """Pieces of a greedy completion, sampled one after another, end where the whole one does."""
    whole = sampled(synced, 1, 0.0)
    strings = tuple({c.text[2:5] for c in whole if len(c.text) > 6})
    assert strings
    with stopping(synced, strings):
        empty = [empty_completion(completion.prompt_ids) for completion in whole]
        requests = [Request(completion, NEW_TOKENS, 0, 0.0) for completion in empty]
        for request in requests:
            synced.submit(request)
        while not all(request.has_ended for request in requests):
            synced.advance()
            synced.interrupt()
    for request, without in zip(requests, whole, strict=True):
        assert fields(request.completion) == expected(synced, without, strings)
    assert any(len(r.completion.ids) < len(c.ids) for r, c in zip(requests, whole, strict=True))


def test_reply_to_a_turn_without_its_end_begins_with_the_end():
    tokenizer = load_tokenizer(tiny_model())
    encoder, said = Encoder(tokenizer, Args()), [dict(role="user", content="on")]
    end = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    reply = encoder.reply(said)
    assert reply[0] != end and encoder.reply(said, end) == reply
    assert encoder.reply(said, tokenizer.convert_tokens_to_ids("a")) == [end, *reply]


def test_stop_tokens_are_ends():
    path = tiny_model()
    tokenizer = load_tokenizer(path, Args(stop_token_ids=(7, 5)))
    ends = eos_token_ids(path, tokenizer)
    assert set(eos_token_ids(path, tokenizer, "auto", (7, 5))) == {5, 7, *ends}
    size = len(tokenizer)
    with pytest.raises(ValueError, match=f"--stop_token_ids {size}: .* end at {size - 1}"):
        load_tokenizer(path, Args(stop_token_ids=(7, size)))
