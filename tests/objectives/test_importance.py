"""Importance weights of off-policy samples: naive ratios, bounds, whole completions, and
no gradient; the expected gradient of an enumerated policy."""

import itertools
import math

import pytest
import torch

from common.objectives.importance import Correction, importance_weights

# ---- a packed stream ----

# Two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have extreme ratios.
RATIOS = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3])
MASK = torch.tensor([False, True, True, True, False, True, True])
IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dict(level="none"), [1, 1, 1, 1, 1]),
        (dict(high=1e30), [1, 4, 0.5, 3, 3]),
        ({}, [1, 2, 0.5, 2, 2]),
        (dict(high=3.5), [1, 3.5, 0.5, 3, 3]),
        (dict(level="sequence", high=100.0), [2, 2, 2, 9, 9]),
        (dict(level="sequence", high=4.0), [2, 2, 2, 4, 4]),
        (dict(level="token_mask", high=1.5), [1, 0, 0, 0, 0]),
        (dict(level="token_mask", high=2.5), [1, 0, 0.5, 0, 0]),
        (dict(level="token_mask", high=3.5), [1, 0, 0.5, 3, 3]),
        (dict(level="sequence_mask", high=1.5), [0, 0, 0, 0, 0]),
        (dict(level="sequence_mask", high=4.0), [2, 2, 2, 0, 0]),
        (dict(level="sequence_mask", high=10.0), [2, 2, 2, 9, 9]),
    ],
)
def test_weights_follow_level_and_bounds(flags, expected):
    correction = Correction(**dict(level="token") | flags)
    old_T = RATIOS.log().requires_grad_()
    weights_T = importance_weights(old_T, torch.zeros(7), MASK, IDS, correction)
    assert weights_T[MASK].tolist() == pytest.approx(expected, rel=1e-5)
    assert not weights_T.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence", "token_mask", "sequence_mask"])
def test_weights_without_trained_tokens_are_finite(level):
    log_ratio_T = torch.tensor([-3.0, 1e4, 1.0])
    none_T = torch.zeros(3).bool()
    ids_T = torch.tensor([0, 0, 1])
    streams = log_ratio_T, torch.zeros(3), none_T, ids_T
    assert importance_weights(*streams, Correction(level)).isfinite().all()


# ---- an enumerated policy ----

LENGTH, VOCABULARY = 3, 3
COMPLETIONS = [*itertools.product(range(VOCABULARY), repeat=LENGTH)]
IDS_OF_ALL = torch.arange(len(COMPLETIONS)).repeat_interleave(LENGTH)


def logprobs(logits_LVV):
    """Return the log-prob of each token of each completion, [27, 3]: the token before it and its
    position have logits of their own."""
    all_LVV = logits_LVV.log_softmax(-1)
    found = [all_LVV[t, y[t - 1] if t else 0, y[t]] for y in COMPLETIONS for t in range(LENGTH)]
    return torch.stack(found).view(-1, LENGTH)


@pytest.mark.parametrize("level", ["token_mask", "sequence_mask"])
@pytest.mark.parametrize("high", [1.2, 1.6, 1e30])
def test_masks_have_the_exact_gradient_of_what_they_keep(level, high):
    """In expectation over the engine's completions, each token is drawn by the trainer with
    sequence_mask; with token_mask the token alone, and the others of its completion by the engine.
    Tokens or completions whose ratio is out of bounds are missing."""
    draw = torch.randn(3, LENGTH, VOCABULARY, VOCABULARY, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(3))  # fmt: skip
    logits, engine = draw[0].requires_grad_(), draw[0].detach() + 0.4 * draw[1]
    rewards_N = draw[2].flatten()
    old_NL, engine_NL = logprobs(logits), logprobs(engine)
    trainer, sampler = old_NL.exp().tolist(), engine_NL.exp().tolist()
    expected, dropped = 0.0, 0
    for n, t in itertools.product(range(len(COMPLETIONS)), range(LENGTH)):
        drawn = [trainer[n][s] if level == "sequence_mask" or s == t else sampler[n][s]
                 for s in range(LENGTH)]  # fmt: skip
        if 1 / high <= math.prod(drawn) / math.prod(sampler[n]) <= high:
            expected += math.prod(drawn) * rewards_N[n] * old_NL[n, t]
        else:
            dropped += 1
    is_trained_T = torch.ones_like(IDS_OF_ALL).bool()
    streams = old_NL.flatten(), engine_NL.flatten(), is_trained_T, IDS_OF_ALL
    c_NL = importance_weights(*streams, Correction(level, high)).view_as(old_NL)
    chances_N = engine_NL.sum(1).exp()
    found = ((chances_N * rewards_N)[:, None] * c_NL * old_NL).sum()
    got, naive = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found, expected))
    torch.testing.assert_close(got, naive, rtol=1e-12, atol=1e-15)
    assert (dropped > 0) == (high < 2) and dropped == (c_NL == 0).sum()
