"""Stop strings and stop tokens: a turn ends at the token that completes one, in both engines."""

from collections import Counter

import pytest
from engines import stopping
from in_process import Args

from bench.completions import complete
from common.model.loading import load_config
from common.model.tiny import tiny_model
from common.packs.sample import Completion
from common.rollout.engine import Engine
from common.rollout.prompts import load_prompts
from common.text.tokenizer import eos_token_ids, load_tokenizer

TEXTS = ("1+1=", "123+4=", "a", "the quick brown fox jumps over")


def sampled(engine: Engine) -> list[Completion]:
    prompts = [engine.tokenizer(text)["input_ids"] for text in TEXTS]
    groups = complete(engine, prompts, 16, [11, 12, 13, 14], 1.0)
    return [completion for group in groups for completion in group]


def end_of(engine: Engine, turn: list[int], strings: tuple[str, ...]) -> int | None:
    """Return the number of tokens whose text first has a stop string."""
    for end in range(1, len(turn) + 1):
        text = engine.tokenizer.decode([i for i in turn[:end] if i not in engine.silent_ids])
        if any(string in text for string in strings):
            return end
    return None


def test_engine_cuts_at_a_stop_string(synced):
    whole = sampled(synced)
    texts = [completion.text for completion in whole]
    pairs = Counter(text[i : i + 2] for text in texts for i in range(len(text) - 1))
    # To vLLM padding inside a turn is text: no string may be a part of its name.
    names = synced.tokenizer.decode([*synced.silent_ids]) + "\ufffd"
    strings = tuple([pair for pair, _ in pairs.most_common() if not {*pair} & {*names}][:40])
    with stopping(synced, strings):
        cut = sampled(synced)
    for completion, without in zip(cut, whole, strict=True):
        end = end_of(synced, without.completion_ids, strings)
        size = len(without.ids) if end is None else without.prompt_length + end
        for name in ("ids", "loss_mask", "versions"):
            assert getattr(completion, name) == getattr(without, name)[:size]
        assert completion.finish_reason == (without.finish_reason if end is None else "stop")
        logprobs = pytest.approx(without.rollout_logprobs[:size], abs=1e-5)
        assert completion.rollout_logprobs == logprobs
        assert not any(string in completion.text for string in strings)
        assert without.text.startswith(completion.text)
    ended = [c for c, without in zip(cut, whole, strict=True) if len(c.ids) < len(without.ids)]
    assert len(whole) > len(ended) > 5
    assert not synced.running


def test_stop_tokens_are_ends():
    path = tiny_model()
    tokenizer = load_tokenizer(path)
    ends = eos_token_ids(path, tokenizer)
    assert set(eos_token_ids(path, tokenizer, "auto", (7, 5))) == {5, 7, *ends}
    size = load_config(path).get_text_config().vocab_size
    with pytest.raises(ValueError, match=f"--stop_token_ids: .* end at {size - 1}"):
        load_prompts(Args(stop_token_ids=(7, size)), tokenizer, 100)
