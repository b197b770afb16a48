"""reinforce.py: the advantages of tokens against naive formulas. tests/test_grpo_objective.py has
the loss."""

import itertools
import math
import statistics
import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import double, naive_centred

import reinforce
from common.packs.packing import PackedBatch, pack_minibatches
from common.packs.sample import Completion

CPU, NAN = torch.device("cpu"), math.nan
NAMES = typing.get_args(typing.get_type_hints(reinforce.Args)["advantage"])


# ---- tokens ----

reward = st.floats(-100, 100).map(lambda x: round(x, 3)) | st.just(NAN)
groups = st.lists(st.lists(reward, min_size=3, max_size=3), min_size=1, max_size=4)


def completion(sampled: int, said: int = 0) -> Completion:
    """Return a completion with `sampled` sampled tokens. An environment's reply follows the
    first."""
    mask = [False] * 2 + [True] * min(sampled, 1) + [False] * said + [True] * (sampled - 1)
    mask = mask if sampled else [False] * 3
    return Completion([0] * len(mask), mask, prompt_length=2)


PLAYED = [
    [completion(4, 3), completion(9), completion(2, 5)],
    [completion(5, 2), completion(1), completion(7, 1)],
]


def packs(groups, pack_tokens=10_000) -> list[list[PackedBatch]]:
    return pack_minibatches(groups, range(len(groups)), 1, pack_tokens, CPU)


def on_trained_tokens(minibatches) -> list[list[float]]:
    """Return the advantages of the trained tokens of each completion."""
    found = {}
    for mb in itertools.chain(*minibatches):
        assert (mb.advantages_T[~mb.loss_mask_T] == 0).all()
        for n, index in enumerate(mb.index_N.tolist()):
            trained_T = mb.loss_mask_T & (mb.sequence_ids_T == n)
            found[index] = mb.advantages_T[trained_T].tolist()
    return [found[index] for index in sorted(found)]


def advantages(name, rewards, groups) -> list[list[float]]:
    args = reinforce.Args(advantage=name)
    minibatches = packs(groups)
    return on_trained_tokens(reinforce.with_advantages(minibatches, rewards, args))


def naive_whiten(values):
    """Return the whitened values of a flat list in which every value counts once."""
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(x - mean) / (std + 1e-6) for x in values]


@given(groups, st.booleans(), st.lists(st.integers(0, 7), min_size=12, max_size=12))
def test_rewards_are_whitened_over_trained_tokens(device, rewards, baseline, trained):
    """A completion without trained tokens, or without a reward, is in no statistic over tokens."""
    values = [r for group in rewards for r in (naive_centred(group) if baseline else group)]
    trained = trained[: len(values)]
    counts = [0 if math.isnan(x) else count for x, count in zip(values, trained, strict=True)]
    whitened = iter(
        naive_whiten([x for x, count in zip(values, counts, strict=True) for _ in range(count)])
    )
    expected = [[next(whitened) for _ in range(count)] for count in counts]
    expected = [x or [0.0] * count for x, count in zip(expected, trained, strict=True)]
    name = "reinforce++_baseline" if baseline else "reinforce++"
    made = iter(map(completion, trained))
    got = advantages(name, double(rewards), [[next(made) for _ in group] for group in rewards])
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_equal_and_missing_rewards_give_exactly_zero(device, name):
    for equal in (torch.full((2, 3), 0.1).double(), torch.full((2, 3), NAN).double()):
        assert {x for tokens in advantages(name, equal, PLAYED) for x in tokens} == {0.0}


def with_logprobs(groups, pack_tokens=10_000) -> list[list[PackedBatch]]:
    """Return packs with random log-probs of the old policy and of the reference, which only depend
    on the completion, not on the pack."""

    def random_logprobs(mb: PackedBatch, seed: int) -> torch.Tensor:
        each = zip(mb.index_N.tolist(), mb.lengths, strict=True)
        seeds = [(torch.Generator().manual_seed(10 * i + seed), size) for i, size in each]
        return torch.cat([torch.randn(size, generator=generator) for generator, size in seeds])

    def with_both(mb: PackedBatch) -> PackedBatch:
        old_T, ref_T = random_logprobs(mb, 0), random_logprobs(mb, 1)
        return mb.with_streams(old_logprobs_T=old_T, ref_logprobs_T=ref_T)

    return [[with_both(mb) for mb in mbs] for mbs in packs(groups, pack_tokens)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pack_tokens", [10_000, 24])
def test_token_advantages_equal_naive_code(device, name, pack_tokens):
    """The KL of later trained tokens is subtracted. The third completion has no reward."""
    rewards = [[1.0, 0.0, NAN], [0.5, 2.0, 0.0]]
    minibatches, beta = with_logprobs(PLAYED, pack_tokens), 0.3
    args = reinforce.Args(advantage=name, kl_estimator="k1", beta=beta)
    present = [r for r in rewards[0] + rewards[1] if not math.isnan(r)]
    less = {"reinforce++": [[r - statistics.fmean(present) for r in group] for group in rewards]}
    less["reinforce++_baseline"] = [naive_centred(group) for group in rewards]
    less["leave_one_out"] = [
        [r * n / (n - 1) for r in group]
        for group, n in zip(less["reinforce++_baseline"], (2, 3), strict=True)
    ]
    raw = {}
    for mb in itertools.chain(*minibatches):
        for n, index in enumerate(mb.index_N.tolist()):
            trained = (mb.loss_mask_T & (mb.sequence_ids_T == n)).nonzero()[:, 0].tolist()
            gaps = [(mb.old_logprobs_T[t] - mb.ref_logprobs_T[t]).item() for t in trained]
            reward = less[name][index // 3][index % 3]
            raw[index] = [reward - beta * math.fsum(gaps[t:]) for t in range(len(gaps))]
    unscored = raw.pop(2)
    expected = [x for index in sorted(raw) for x in raw[index]]
    expected = expected if name == "leave_one_out" else naive_whiten(expected)
    got = on_trained_tokens(reinforce.with_advantages(minibatches, double(rewards), args))
    assert got.pop(2) == [0.0] * len(unscored)
    assert sum(got, []) == pytest.approx(expected, rel=1e-5, abs=1e-5)
