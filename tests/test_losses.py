"""Objectives equal naive scalar code in float64, values and gradients, written from the papers' formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.losses import (
    cispo_loss,
    clip_policy_loss,
    clip_value_loss,
    importance_weights,
    kl_estimate,
    reduction_weights,
    reinforce_loss,
    sapo_loss,
    topr_loss,
)
from common.packing import Sample, pack

logprob = st.floats(-8, -1e-3)
advantage = st.floats(-5, 5) | st.sampled_from([0.0, 1.0, -1.0])
rows = st.lists(st.tuples(logprob, logprob, advantage), min_size=1, max_size=8)  # new, old, advantage
bounds = st.sampled_from([(0.2, 0.28, 0.0), (0.1, 0.4, 0.0), (0.2, 0.2, 3.0), (0.5, 5.0, 1.5)])


def columns(rows):
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def check(function, naive, rows, rel=1e-9):
    """`function` of columns, of which the first has the gradient; `naive` of one row gives (value, derivative)."""
    first, *others = columns(rows)
    first.requires_grad_()
    values = function(first, *others)
    assert values.shape == first.shape
    (slopes,) = torch.autograd.grad(values.sum(), first)
    for row, value, slope in zip(rows, values.tolist(), slopes.tolist(), strict=True):
        assert (value, slope) == pytest.approx(naive(*row), rel=rel, abs=1e-9), row


# ---- policy ----


@given(rows, bounds)
def test_clip_policy_loss(rows, bounds):
    low, high, dual = bounds

    def naive(new, old, a):
        r = math.exp(new - old)
        if a > 0:
            return (-(1 + high) * a, 0.0) if r > 1 + high else (-r * a, -r * a)
        if r < 1 - low:
            return -(1 - low) * a, 0.0
        return (-dual * a, 0.0) if dual and r > dual else (-r * a, -r * a)

    check(lambda new, old, a: clip_policy_loss(new, old, a, low, high, dual), naive, rows)


def test_clip_bounds_are_asymmetric_and_one_sided():
    ratio = torch.tensor([1.29, 1.27, 0.79, 0.81, 1.29, 0.79], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    new = ratio.log().requires_grad_()
    clip_policy_loss(new, torch.zeros(6, dtype=torch.float64), advantage, 0.2, 0.28).sum().backward()
    assert (new.grad == 0).tolist() == [True, False, True, False, False, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone():
    new, old = torch.tensor([2.0, 2.0]).log().double().requires_grad_(), torch.tensor([0.2, 0.2]).log().double()
    loss = clip_policy_loss(new, old, torch.tensor([-1.0, 1.0]), 0.2, 0.28, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.28])  # the ratio is 10
    loss.sum().backward()
    assert new.grad.tolist() == [0, 0]


@given(rows)
def test_reinforce_loss(rows):
    check(lambda new, old, a: reinforce_loss(new, a), lambda new, old, a: (-a * new, -a), rows)


@given(rows, st.sampled_from([0.5, 4.0]))
def test_cispo_clips_weights_and_never_gradients(rows, high):
    def naive(new, old, a):
        weight = min(math.exp(new - old), 1 + high)
        return -weight * a * new, -weight * a

    check(lambda new, old, a: cispo_loss(new, old, a, high), naive, rows)


@given(rows, st.sampled_from([(1.0, 1.05), (0.5, 4.0)]))
def test_sapo_loss(rows, taus):
    def naive(new, old, a):
        r, tau = math.exp(new - old), taus[0] if a > 0 else taus[1]
        gate = 1 / (1 + math.exp(-tau * (r - 1))) if tau * (r - 1) > -700 else 0.0
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a

    check(lambda new, old, a: sapo_loss(new, old, a, *taus), naive, rows, rel=2e-6)  # tau is a float32


def test_sapo_closes_its_gate_on_both_sides():
    ratio = torch.tensor([0.05, 0.5, 1.0, 2.0, 20.0]).double().requires_grad_()
    sapo_loss(ratio.log(), torch.zeros(5), torch.ones(5), 4.0, 4.0).sum().backward()
    slopes = -ratio.grad
    assert slopes[2] == pytest.approx(1) and slopes.argmax() == 2
    assert slopes[0] < slopes[1] < 1 and slopes[4] < slopes[3] < 1


@given(rows)
def test_topr_imitates_the_good_and_truncates_the_bad(rows):
    def naive(new, log_ratio, a):
        weight = 1.0 if a >= 0 else min(1.0, math.exp(log_ratio))
        return -weight * a * new, -weight * a

    check(topr_loss, naive, [(new, new - old, a) for new, old, a in rows])


def test_topr_weight_has_no_gradient():
    logprobs = torch.tensor([-1.0, -2.0]).double().requires_grad_()
    topr_loss(logprobs, logprobs.sum().expand(2) - 1, torch.tensor([-1.0, 1.0])).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([math.exp(-4), -1.0])


# ---- KL to the reference ----


@given(rows, st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([0.0, 0.7]))
def test_kl_estimate(rows, estimator, clamp):
    def naive(new, ref, _):
        d = new - ref
        value, slope = dict(k1=(d, 1.0), k2=(d * d / 2, d), k3=(math.exp(-d) - 1 + d, 1 - math.exp(-d)))[estimator]
        return (math.copysign(clamp, value), 0.0) if clamp and abs(value) > clamp else (value, slope)

    check(lambda new, ref, _: kl_estimate(new, ref, estimator, clamp), naive, rows)


def test_kl_k3_is_accurate_in_float32_where_the_policies_agree():
    new, ref = torch.tensor([-1.0]), torch.tensor([-1.0 + 1e-3])
    exact = math.expm1(ref.double().item() - new.double().item()) - (ref.double().item() - new.double().item())
    assert abs(kl_estimate(new, ref).item() / exact - 1) < 1e-3


def test_kl_k3_of_a_token_that_the_policy_gave_up_is_finite_in_float32():
    new = torch.tensor([-500.0], requires_grad=True)
    kl = kl_estimate(new, torch.tensor([-1.0]))
    (kl * 0).sum().backward()  # a masked token
    assert kl.isfinite().all() and new.grad.tolist() == [0.0]


POLICY, REFERENCE = torch.tensor([0.5, -0.3, 1.2, 0.0]).double(), torch.tensor([0.1, 0.4, 0.2, -0.5]).double()


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_k1_and_k3_estimate_the_kl_by_enumeration(estimator, unbiased):
    logp, logq = POLICY.log_softmax(0), REFERENCE.log_softmax(0)
    expectation, exact = (logp.exp() * kl_estimate(logp, logq, estimator)).sum(), (logp.exp() * (logp - logq)).sum()
    assert bool((expectation - exact).abs() < 1e-12) == unbiased


@pytest.mark.parametrize(("estimator", "factor"), [("k1", 0.0), ("k2", 1.0)])
def test_expected_gradient_of_k2_is_that_of_the_kl_and_of_k1_nothing(estimator, factor):
    logits, logq = POLICY.clone().requires_grad_(), REFERENCE.log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    samples = logp.detach().exp() * kl_estimate(logp, logq, estimator)
    (estimated,) = torch.autograd.grad(samples.sum(), logits)
    torch.testing.assert_close(estimated, factor * exact, rtol=1e-12, atol=1e-12)


# ---- value ----


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8),
       st.sampled_from([0.0, 0.2, 1.0]))  # fmt: skip
def test_clip_value_loss(rows, clip):
    def naive(value, old, target):
        nearer = min(max(value, old - clip), old + clip)
        plain, clipped = (value - target) ** 2 / 2, (nearer - target) ** 2 / 2
        return (clipped, 0.0) if clip and clipped > plain else (plain, value - target)

    rows = [row for row in rows if abs(abs(row[0] - row[1]) - clip) > 1e-6] or [(0.0, 0.1, 1.0)]  # not at a kink
    check(lambda *columns: clip_value_loss(*columns, clip), naive, rows)


def test_value_loss_has_no_gradient_beyond_the_trust_region_but_comes_back():
    values = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)  # moved by 1 from 0; the clip is 0.2
    loss = clip_value_loss(values, torch.zeros(2), torch.tensor([2.0, -2.0]), 0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([1.8**2 / 2, 3**2 / 2])
    assert values.grad.tolist() == [0.0, 3.0]  # towards its return: held; past it: pulled back


# ---- engine against trainer ----


@given(rows, st.sampled_from([(0.0, 2.0), (0.5, 5.0)]), st.sampled_from(["truncate", "mask"]))
def test_importance_weights(rows, bounds, mode):
    low, high = bounds
    trainer, engine, _ = columns(rows)
    weights = importance_weights((trainer - engine).requires_grad_(), mode, low, high)
    assert not weights.requires_grad
    for (t, e, _), weight in zip(rows, weights.tolist(), strict=True):
        ratio = math.exp(t - e)
        outside = min(max(ratio, low), high) if mode == "truncate" else 0.0
        assert weight == pytest.approx(ratio if low <= ratio <= high else outside, rel=1e-12)


def test_importance_weights_keep_the_bounds_themselves():
    log_ratio = torch.tensor([0.5, 2.0]).double().log()
    low, high = log_ratio.exp().tolist()
    assert importance_weights(log_ratio, "mask", low, high).tolist() == [low, high]


def test_an_absurd_ratio_is_truncated_or_dropped_and_not_infinite():
    weights = [importance_weights(torch.tensor([200.0]), mode, 0.0, 2.0).item() for mode in ("truncate", "mask")]
    assert weights == [2.0, 0.0]


# ---- what a token counts ----

LONGEST = 16
masks = st.lists(st.booleans(), min_size=2, max_size=9)


def naive_weights(masks, reduction):
    """Weight of each target, by the id of the token: 100 * sequence + position."""
    trained = {n: [i for i in range(1, len(mask)) if mask[i]] for n, mask in enumerate(masks)}
    tokens = sum(len(positions) for positions in trained.values())
    sequences = sum(1 for positions in trained.values() if positions)
    out = {}
    for n, mask in enumerate(masks):
        for i in range(1, len(mask)):
            of_sequence = dict(sequence=1 / max(1, len(trained[n])), sequence_sum=1.0, constant=1 / LONGEST)
            weight = 1 / max(1, tokens) if reduction == "token" else of_sequence[reduction] / max(1, sequences)
            out[100 * n + i] = weight if i in trained[n] else 0.0
    return out


@given(st.lists(masks, min_size=1, max_size=6), st.sampled_from(["token", "sequence", "sequence_sum", "constant"]),
       st.sampled_from([8, 20, 1000]))  # fmt: skip
def test_reduction_weights_of_every_token_of_a_global_minibatch(masks, reduction, pack_tokens):
    masks = [[False, *mask[1:]] for mask in masks]
    samples = [Sample([100 * n + i for i in range(len(mask))], mask) for n, mask in enumerate(masks)]
    micro_batches = [*pack(samples, pack_tokens, torch.device("cpu")), *pack([], 10, torch.device("cpu"))]  # a filler
    tokens, sequences = torch.tensor(sum(map(sum, masks))), torch.tensor(sum(map(any, masks)))
    got = {}
    for mb in micro_batches:
        weights_T = reduction_weights(mb, reduction, tokens, sequences, LONGEST)
        assert mb.samples or weights_T.tolist() == [0.0]
        got |= zip(mb.targets_T.tolist() if mb.samples else [], weights_T.tolist(), strict=False)
    assert got == pytest.approx(naive_weights(masks, reduction), rel=1e-6)
    if reduction in ("token", "sequence") and any(map(any, masks)):
        assert sum(got.values()) == pytest.approx(1, rel=1e-6)  # a mean: the prompt is in neither part of it


def test_token_and_sequence_means_are_one_when_lengths_are_and_constant_is_the_sum_over_longest():
    samples = [Sample(list(range(6)), [False] * 3 + [True] * 3) for _ in range(4)]
    (mb,) = pack(samples, 100, torch.device("cpu"))
    token_T, sequence_T, sum_T, constant_T = (
        reduction_weights(mb, reduction, torch.tensor(12), torch.tensor(4), LONGEST)
        for reduction in ("token", "sequence", "sequence_sum", "constant")
    )
    torch.testing.assert_close(token_T.double(), sequence_T.double())
    torch.testing.assert_close(constant_T, sum_T / LONGEST)
    torch.testing.assert_close(sum_T.double(), 3 * sequence_T.double())
