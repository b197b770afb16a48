"""`--thinking_budget`: forced marks have no loss, and everything else is sampled by the trainer's
distribution."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_tokenizer
from in_process import Args

from common.metrics.meter import Meter
from common.packs.packing import pack
from common.packs.sample import Completion
from common.rollout.episodes import Episodes, PromptRequest
from common.rollout.thinking import ThinkingBudget
from common.rollout.weights import whole_weights

BUDGET, TOKENS = 6, 24


def forced(sample: Completion) -> list[tuple[int, list[int]]]:
    """Return each run of tokens that were not sampled: its place in the completion, and its ids."""
    mask, runs = sample.loss_mask[sample.prompt_length :], []
    for i, (token, sampled) in enumerate(zip(sample.completion_ids, mask, strict=True)):
        if not sampled and i and not mask[i - 1]:
            runs[-1][1].append(token)
        elif not sampled:
            runs.append((i, [token]))
    return runs


@torch.no_grad()
def test_a_thought_is_closed_at_its_limit(engine, policy, device):
    """The prompt opens a thought that the untrained model never closes."""
    engine.load_weights(whole_weights(policy, engine.dtype), 3)
    args = Args(max_new_tokens=TOKENS, thinking_budget=BUDGET)
    tokenizer = engine.tokenizer
    mark = tokenizer("</think>", add_special_tokens=False)["input_ids"]
    groups = {}
    for opening in ("<think>\n", ""):
        ids = tokenizer(f"1+1={opening}")["input_ids"]
        episodes = Episodes(engine, args)
        request = PromptRequest(0, ids, {}, 7, 8, 1.0)
        ((_, groups[opening]),) = episodes.generate([request], Meter())
        episodes.close()
    assert not any(map(forced, groups[""]))
    for sample in groups["<think>\n"]:
        if len(sample.completion_ids) >= BUDGET + len(mark):
            assert forced(sample) == [(BUDGET, mark)]
            assert "</think>" in sample.text and len(sample.completion_ids) <= TOKENS
        assert sample.turns == 1 and sample.finish_reason in ("stop", "length")
        assert len(sample.versions) == len(sample.ids) == len(sample.rollout_logprobs)
    assert any(map(forced, groups["<think>\n"]))
    for mb in pack([*groups[""], *groups["<think>\n"]], 1000, device):
        logprobs_T, *_ = policy(mb)
        assert ((logprobs_T - mb.rollout_logprobs_T).abs() * mb.loss_mask_T).max() < 1e-4


@pytest.mark.parametrize(
    ("before", "turn", "mark", "length"),
    [
        ("1<think>\n", "abc", "</think>", 3),
        ("1<think>\n", "abc</think>d", "", 0),
        ("1", "abc", "", 0),
        ("1", "ab<think>cde", "</think>", 3),
        ("1", "<think>a</think>b<think>cd", "</think>", 2),
        ("1<think>", "a</think>b<think>cd", "</think>", 2),
        ("1<think></think>", "abc", "", 0),
        ("1", "", "", 0),
    ],
)
def test_tokens_of_an_open_thought_are_counted(before, turn, mark, length):
    tokenizer = tiny_tokenizer()

    def ids(text: str) -> list[int]:
        return [i for c in text for i in tokenizer(c, add_special_tokens=False)["input_ids"]]

    budget = ThinkingBudget(5, SimpleNamespace(tokenizer=tokenizer))
    assert budget.open_thought(ids(before), ids(turn)) == (mark, length)
