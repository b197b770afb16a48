"""Advantages from rewards: naive formulas, exact zeros for equal rewards, and missing rewards."""

import math
import statistics
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dapo
import grpo
from common.objectives.advantages import (
    ADVANTAGES,
    Scores,
    best_of_k,
    centre_groups,
    gae,
    group_std,
    unequal,
    whiten,
)

NAN = float("nan")
reward = st.floats(-100, 100).map(lambda x: round(x, 3))
gappy = st.lists(st.lists(reward | st.just(NAN), min_size=3, max_size=3), min_size=1, max_size=4)


def group_advantages(rewards):
    return ADVANTAGES["group"](Scores(rewards))


def gdpo(parts, weights):
    total = parts.nansum(0).masked_fill(parts.isnan().all(0), NAN)
    return ADVANTAGES["gdpo"](Scores(total, parts, weights))


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def known(values):
    return [x for x in values if not math.isnan(x)]


def naive_std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def naive_centred(group):
    present = known(group)
    return [
        NAN if math.isnan(r) else 0.0 if len(set(present)) == 1 else r - statistics.fmean(present)
        for r in group
    ]


# ---- a group ----


@given(gappy)
def test_group_advantages_equal_the_naive_formula(rewards):
    """Of the table and of the scripts that state it. A group with fewer than two rewards has none
    to compare."""
    stds = group_std(double(rewards))[:, 0].tolist()
    centred = centre_groups(double(rewards)).tolist()
    by_grpo = grpo.advantages("group", Scores(double(rewards)))
    by_dapo = dapo.advantages(double(rewards))
    scaled = group_advantages(double(rewards))
    assert torch.equal(scaled, by_grpo) and torch.equal(scaled, by_dapo)
    for group, std, c, s in zip(rewards, stds, centred, scaled.tolist(), strict=True):
        expected = [0.0 if math.isnan(x) else x for x in naive_centred(group)]
        assert std == pytest.approx(naive_std(known(group)), abs=1e-9)
        assert c == pytest.approx(expected, abs=1e-9)
        assert s == pytest.approx([x / (std + 1e-6) for x in expected], rel=1e-6, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(2, 16), st.integers(1, 3))
def test_equal_rewards_give_exactly_zero_in_every_estimator(reward, n, groups):
    rewards = torch.full((groups, n), reward, dtype=torch.float64)
    tokens = torch.arange(1, n + 1).expand(groups, n)
    for name, advantages in ADVANTAGES.items():
        if name != "group_ratio" or reward >= 0:  # it refuses negative rewards
            found = advantages(Scores(rewards, rewards[None], [2.0], tokens))
            assert (found == 0).all() and found.dtype == torch.float64, name


def test_unequal_selects_groups_with_different_rewards():
    groups = double(
        [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1e-12, 0, 0, 0], [NAN, 1, 1, 1], [NAN, 1, 0, 1]]
    )
    assert unequal(groups).tolist() == [True, False, False, True, False, True]
    assert not unequal(double([[NAN, NAN], [1, NAN], [NAN, -1]])).any()


def test_missing_rewards_are_excluded_from_group_statistics():
    with_nan = group_advantages(torch.tensor([[1.0, NAN, 0.0, 0.0]]))
    without = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]))
    assert with_nan[0, 1] == 0
    torch.testing.assert_close(with_nan[:, [0, 2, 3]], without)
    for hopeless in ([NAN, NAN], [1.0, NAN]):
        assert (group_advantages(torch.tensor([hopeless])) == 0).all()


def test_advantages_depend_only_on_the_own_group():
    both = group_advantages(torch.tensor([[1.0, 0.0], [100.0, 50.0], [1.0, 0.0]]))
    torch.testing.assert_close(both[:1], group_advantages(torch.tensor([[1.0, 0.0]])))
    torch.testing.assert_close(both[2], both[0])


# ---- variants of a group ----

GROUPS = ([1.0, 0.0, 0.0, 0.0, 1.0], [0.25, 3.0, 0.25, 0.0, 1.5], [0.0] * 5, [2.0] * 5)


def of(name, rewards, **also):
    rewards = double(rewards)
    return ADVANTAGES[name](Scores(rewards, rewards[None], [1.0], **also))


def test_group_ratio_divides_by_the_mean():
    """MaxRL (arXiv:2602.02710 Algorithm 1), also with an unknown reward."""
    for group in (*GROUPS, [1.0, NAN, 0.0, 0.5, 0.5]):
        mean = statistics.fmean(known(group))
        (got,) = of("group_ratio", [group]).tolist()
        expected = [0.0 if math.isnan(r) or not mean else (r - mean) / mean for r in group]
        assert got == pytest.approx(expected, rel=1e-5)
        by_mean = of("group_mean", [group])[0] / (mean + 1e-6)
        assert got == pytest.approx(by_mean.tolist(), rel=1e-12)
    assert (of("group_ratio", [GROUPS[2], GROUPS[3]]) == 0).all()


def test_group_ratio_refuses_a_negative_reward():
    with pytest.raises(ValueError, match="^--advantage group_ratio: a reward"):
        of("group_ratio", [[0.0, -0.5]])


def test_mean_by_length_is_the_mean_reward_of_a_token():
    """OPO (arXiv:2505.23585)."""
    lengths = double([3.0, 1.0, 8.0, 2.0, 6.0])
    for group in GROUPS:
        mean = sum(n * r for n, r in zip(lengths.tolist(), group, strict=True)) / 20
        (got,) = of("group_mean_by_length", [group], tokens_BG=lengths[None]).tolist()
        assert got == pytest.approx([r - mean for r in group], abs=1e-12)
        equal = of("group_mean_by_length", [group], tokens_BG=torch.full((1, 5), 7))
        torch.testing.assert_close(equal, of("group_mean", [group]))
    got = of("group_mean_by_length", [[1.0, NAN, 0.0]], tokens_BG=torch.tensor([[1, 99, 3]]))
    assert got.tolist() == [[0.75, 0.0, -0.25]]


def naive_gain(group, k):
    """Return k times the best of each and k - 1 others, less the best of k others, on average."""
    found = []
    for i, r in enumerate(group):
        others = group[:i] + group[i + 1 :]
        with_it = [max((r, *chosen)) for chosen in combinations(others, k - 1)]
        without = [max(chosen) for chosen in combinations(others, k)]
        found.append(k * (statistics.fmean(with_it) - statistics.fmean(without)))
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_gain_of_the_best_of_k(k):
    """PKPO (arXiv:2505.15201 Eq. 29, with its baseline over n), by all subsets."""
    for group in GROUPS:
        expected = pytest.approx(naive_gain(group, k), abs=1e-12)
        assert best_of_k(double([group]), k)[0].tolist() == expected
    known_alone = best_of_k(double([[1.0, NAN, 0.25, 0.0, 0.5, NAN]]), k)[0].tolist()
    expected = naive_gain([1.0, 0.25, 0.0, 0.5], k) if k < 4 else [0.0] * 4
    assert [known_alone[n] for n in (0, 2, 3, 4)] == pytest.approx(expected, abs=1e-12)
    assert known_alone[1] == known_alone[5] == 0
    assert (best_of_k(double(GROUPS[2:]), k) == 0).all()


def test_pass_at_k_has_k_4_and_k_1_is_leave_one_out():
    assert torch.equal(of("pass_at_k", GROUPS), best_of_k(double(GROUPS), 4))
    torch.testing.assert_close(best_of_k(double(GROUPS), 1), of("leave_one_out", GROUPS))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_expected_gradient_of_pass_at_k_is_that_of_the_best_of_k(k):
    """Exact, over all groups of four from three arms."""
    logits, pays = double([0.3, -0.2, 0.1]).requires_grad_(), double([0.0, 0.5, 2.0])
    logp = logits.log_softmax(-1)
    total = 0.0
    for arms in torch.cartesian_prod(*[torch.arange(3)] * 4):
        A = best_of_k(pays[arms][None], k)[0]
        total = total + logp[arms].sum().exp().detach() * (A * logp[arms]).mean()
    sets = torch.cartesian_prod(*[torch.arange(3)] * k).reshape(-1, k)
    best = (logp[sets].sum(-1).exp() * pays[sets].amax(-1)).sum()
    slopes = [torch.autograd.grad(y, logits, retain_graph=True)[0] for y in (total, best)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)


# ---- the whole batch ----


def naive_whiten(values):
    """Return the whitened values of a flat list in which every value counts once."""
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(x - mean) / (std + 1e-6) for x in values]


@given(gappy)
def test_group_mean_batch_std_equals_naive_code(rewards):
    std = naive_std(known(r for group in rewards for r in group))
    got = ADVANTAGES["group_mean_batch_std"](Scores(double(rewards))).tolist()
    for group, advantages in zip(rewards, got, strict=True):
        expected = [0.0 if math.isnan(c) else c / (std + 1e-6) for c in naive_centred(group)]
        assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(gappy, gappy)
def test_gdpo_normalises_each_reward_then_their_sum(first, second):
    groups = min(len(first), len(second))
    parts, weights, sums = [first[:groups], second[:groups]], [0.5, 2.0], []
    for group in zip(*parts, strict=True):
        missing = [math.isnan(a) and math.isnan(b) for a, b in zip(*group, strict=True)]
        total = [0.0] * 3
        for weight, part in zip(weights, group, strict=True):
            centred = naive_centred(part)
            std = naive_std(known(centred))
            scaled = [0.0 if math.isnan(c) else weight * c / (std + 1e-6) for c in centred]
            total = [t + x for t, x in zip(total, scaled, strict=True)]
        sums += [NAN if gone else t for t, gone in zip(total, missing, strict=True)]
    whitened = iter(naive_whiten(known(sums)))
    expected = [0.0 if math.isnan(x) else next(whitened) for x in sums]
    got = gdpo(double(parts), weights).flatten().tolist()
    if naive_std(known(sums)) > 1e-9:  # otherwise both sides are rounding errors
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_gdpo_gives_zero_to_a_completion_without_a_reward():
    """Although all parts of the reward exist; they count in no statistic."""
    parts = double([[[1, 0, 0, 3], [2, 2, 1, 0]], [[-4, -9, -2, -1], [-8, -3, -1, -1]]])
    rewards = parts.sum(0)
    rewards[0, 1] = NAN
    found = ADVANTAGES["gdpo"](Scores(rewards, parts, [1.0, 2.0]))
    parts[:, 0, 1] = 7.0
    assert found[0, 1] == 0 != found[0, 0]
    assert torch.equal(found, ADVANTAGES["gdpo"](Scores(rewards, parts, [1.0, 2.0])))


@given(st.lists(st.tuples(reward, st.integers(0, 4)), min_size=1, max_size=8))
def test_whiten_weights_each_value_by_its_count(pairs):
    values, counts = zip(*pairs, strict=True)
    whitened = iter(naive_whiten([x for x, count in pairs for _ in range(count)]))
    expected = [[next(whitened) for _ in range(count)][0] if count else 0.0 for _, count in pairs]
    assert whiten(double(values), torch.tensor(counts)).tolist() == pytest.approx(
        expected, rel=1e-5, abs=1e-5
    )


# ---- one value per token ----

step = st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2))  # trained, reward, value
unit = st.sampled_from([0.0, 0.3, 0.95, 1.0])
# a prompt, then tokens of which some are not trained: tool output, or the whole of a masked
# completion
packed = st.lists(
    st.tuples(st.integers(0, 3), st.lists(step, min_size=1, max_size=7)),
    min_size=1,
    max_size=4,
)


def naive_gae(rewards, values, gamma, lam):
    """Return the sum over all later deltas of one sequence's trained tokens."""
    values = [*values, 0.0]  # no token follows the last one
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


@given(packed, unit, unit)
def test_gae_is_the_sum_over_discounted_deltas_of_trained_tokens(sequences, gamma, lam):
    stream, expected = [], []  # (reward, value, trained, sequence)
    for n, (prompt, steps) in enumerate(sequences):
        stream += [(7.0, -5.0, False, n)] * prompt + [(r, v, trained, n) for trained, r, v in steps]
        rewards, values = (
            [r for trained, r, _ in steps if trained],
            [v for trained, _, v in steps if trained],
        )
        advantages = iter(naive_gae(rewards, values, gamma, lam))
        expected += [0.0] * prompt + [
            next(advantages) if trained else 0.0 for trained, _, _ in steps
        ]
    rewards, values, mask, ids = zip(*stream, strict=True)
    where = torch.tensor(mask), torch.tensor(ids)
    got = gae(double(rewards), double(values), *where, lam, gamma)
    assert (
        got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9) and got.dtype == torch.float64
    )


def test_gae_equals_a_calculation_by_hand():
    """Two completions, the first with tool output; the value after the last token is 0 even for a
    truncated completion."""
    mask_T = torch.tensor([False, True, False, True, False, True])
    ids_T = torch.tensor([0, 0, 0, 0, 1, 1])
    rewards_T, values_T = (
        torch.tensor([9.0, 0, 9, 1, 9, 2]),
        torch.tensor([9.0, 0.5, 9, 0.25, 9, 1]),
    )
    got = gae(rewards_T, values_T, mask_T, ids_T, 0.5, 0.5)
    last = 1 - 0.25
    assert got.tolist() == [0, 0.5 * 0.25 - 0.5 + 0.25 * last, 0, last, 0, 2 - 1]


def test_gae_of_a_masked_sequence_is_zero():
    nan_T = torch.full((3,), NAN)
    none_T, ids_T = torch.zeros(3).bool(), torch.zeros(3).long()
    assert gae(nan_T, nan_T, none_T, ids_T, 1.0).tolist() == [0, 0, 0]
    one_T = torch.tensor([NAN, 1.0, NAN])
    got = gae(one_T, one_T, torch.tensor([False, True, False]), ids_T, 1.0)
    assert got.tolist() == [0, 0, 0]
