"""The objective of grpo.py equals naive scalar code in float64, values and gradients, written from
the papers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import check, columns, rows

import grpo
from common.data.packing import pack
from common.data.sample import Sample
from common.objectives.importance import is_clipped

bounds = st.sampled_from([(0.2, 0.28, 0.0), (0.1, 0.4, 0.0), (0.2, 0.2, 3.0), (0.5, 5.0, 1.5)])
LONGEST = 16  # --max_new_tokens
POLICY, REFERENCE = (
    torch.tensor([0.5, -0.3, 1.2, 0.0]).double(),
    torch.tensor([0.1, 0.4, 0.2, -0.5]).double(),
)


def flags(**changed) -> grpo.Args:
    """Return flags of grpo.py without correction, also in combinations that the command line
    refuses."""
    args = grpo.Args(correction="none", max_new_tokens=LONGEST)
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def unbiased_kl(logprobs, ref_logprobs, old_logprobs, **changed):
    """Return the KL term of each token with --unbiased_kl."""
    args, zeros, ids = (
        flags(beta=1.0, unbiased_kl=True, **changed),
        torch.zeros_like(logprobs),
        torch.arange(len(logprobs)),
    )
    one = torch.tensor(1)
    _, logged = grpo.loss(
        logprobs,
        old_logprobs,
        old_logprobs,
        ref_logprobs,
        zeros,
        zeros,
        zeros == 0,
        ids,
        one,
        one,
        args,
    )
    return logged["kl"]


def test_engine_correction_multiplies_the_policy_loss_but_not_the_kl():
    logprobs, ids = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64), torch.arange(3)
    advantages, weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), [2.0, 0.5, 9.0]
    rollout_logprobs = logprobs - torch.tensor(weights, dtype=torch.float64).log()
    args = flags(correction="token", correction_high=4.0, beta=0.3, kl_estimator="k1")
    share_T, _ = grpo.loss(
        logprobs, logprobs, rollout_logprobs, logprobs - 1, torch.zeros(3), advantages, ids >= 0,
        ids, torch.tensor(3), torch.tensor(3), args,
    )  # fmt: skip
    policy = sum(-min(w, 4.0) * a for w, a in zip(weights, advantages.tolist(), strict=True))
    assert share_T.sum().item() == pytest.approx((policy + 3 * 0.3 * 1.0) / 3)


# ---- the loss of a token ----


@given(rows, bounds)
def test_clip_loss_equals_naive_code(rows, bounds):
    low, high, dual = bounds

    def naive(new, old, a):
        r = math.exp(new - old)
        if a > 0:
            return (-(1 + high) * a, 0.0) if r > 1 + high else (-r * a, -r * a)
        if r < 1 - low:
            return -(1 - low) * a, 0.0
        return (-dual * a, 0.0) if dual and r > dual else (-r * a, -r * a)

    args = flags(loss="clip", clip_low=low, clip_high=high, dual_clip=dual)
    check(lambda new, old, a: grpo.policy_loss(new - old, a, new, args), naive, rows)


def test_clip_bounds_are_asymmetric_and_one_sided():
    ratio = torch.tensor([1.29, 1.27, 0.79, 0.81, 1.29, 0.79], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    grpo.policy_loss(
        log_ratio, advantages, log_ratio, flags(clip_low=0.2, clip_high=0.28)
    ).sum().backward()
    assert (log_ratio.grad == 0).tolist() == [True, False, True, False, False, False]
    assert is_clipped(log_ratio, advantages, 0.2, 0.28).equal(log_ratio.grad == 0)


def test_dual_clip_bounds_only_the_loss_of_negative_advantages():
    log_ratio, advantages = (
        torch.full((2,), 10.0).double().log().requires_grad_(),
        torch.tensor([-1.0, 1.0]),
    )
    loss = grpo.policy_loss(
        log_ratio, advantages, log_ratio, flags(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    )
    assert loss.tolist() == pytest.approx([3.0, -1.28])
    loss.sum().backward()
    assert log_ratio.grad.tolist() == [0, 0]


@given(rows, bounds)
def test_clipped_tokens_are_those_without_gradient(rows, bounds):
    low, high, dual = bounds
    new, old, advantages = columns(
        [row for row in rows if abs(row[2]) > 1e-9] or [(-1.0, -1.0, 1.0)]
    )
    log_ratio, args = (
        (new - old).requires_grad_(),
        flags(clip_low=low, clip_high=high, dual_clip=dual),
    )
    (slopes,) = torch.autograd.grad(
        grpo.policy_loss(log_ratio, advantages, new, args).sum(), log_ratio
    )
    assert is_clipped(log_ratio, advantages, *bounds).equal(slopes == 0)


def test_clipped_tokens_include_dual_clip_and_exclude_zero_advantage():
    log_ratio = torch.tensor([4.0, 2.0, 4.0, 4.0, 0.1]).log()
    advantages = torch.tensor([-1.0, -1.0, 1.0, 0.0, 0.0])
    assert is_clipped(log_ratio, advantages, 0.2, 9.0).tolist() == [False] * 5
    assert is_clipped(log_ratio, advantages, 0.2, 9.0, 3.0).tolist() == [True] + [False] * 4


@given(rows, st.sampled_from(["tv", "kl"]), st.sampled_from([0.001, 0.05, 0.15, 0.4]))
def test_dppo_loss_equals_naive_code(rows, form, bound):
    """arXiv:2602.04879: two outcomes, the token and any other one; the weight is at most 10."""

    def naive(new, old, a):
        p, q, ratio = math.exp(new), math.exp(old), min(math.exp(new - old), 10.0)
        tv = abs(p - q)
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        far = (tv if form == "tv" else kl) > bound and (p - q) * a > 0
        return (0.0, 0.0) if far else (-ratio * a * new, -ratio * a)

    args = flags(loss="dppo", dppo_divergence=form, dppo_bound=bound)
    check(lambda new, old, a: grpo.policy_loss(new - old, a, new, args), naive, rows)


@pytest.mark.parametrize("form", ["tv", "kl"])
def test_dppo_without_a_bound_is_the_unclipped_ratio_in_gradient(form):
    """... up to a weight of 10."""
    _, expected = total_loss(dict(loss="clip", clip_low=0.999, clip_high=1e9))
    _, got = total_loss(dict(loss="dppo", dppo_divergence=form, dppo_bound=1e9))
    assert flat(got) == pytest.approx(flat(expected), rel=1e-9)


def test_dppo_bounds_probabilities_and_clip_bounds_ratios():
    """A rare token may become ten times as likely; a likely one may not lose a fifth."""
    new = torch.tensor([1e-3, 0.75]).double().log().requires_grad_()
    old = torch.tensor([1e-4, 0.92]).double().log()
    A = torch.tensor([1.0, -1.0]).double()
    for loss, expected in (("clip", [True, False]), ("dppo", [False, True])):
        stopped = grpo.is_stopped(new - old, A, new, flags(loss=loss))
        value = grpo.policy_loss(new - old, A, new, flags(loss=loss)).sum()
        (slopes,) = torch.autograd.grad(value, new)
        assert stopped.tolist() == expected == (slopes == 0).tolist()


@pytest.mark.parametrize("form", ["tv", "kl"])
def test_dppo_of_certain_tokens_is_finite(form):
    """In float32, 1 - pi is 0."""
    new = torch.tensor([0.0, -20.0, 0.0, -1e-9], requires_grad=True)
    log_rho = new - torch.tensor([0.0, 0.0, -20.0, 0.0])
    args = flags(loss="dppo", dppo_divergence=form)
    value = grpo.policy_loss(log_rho, torch.tensor([1.0, -1.0, 1.0, -1.0]), new, args)
    (slopes,) = torch.autograd.grad(value.sum(), new)
    assert slopes.tolist() == [-1.0, 0.0, 0.0, 1.0]


@given(rows)
def test_reinforce_loss_equals_naive_code(rows):
    args = flags(loss="reinforce")
    check(
        lambda new, old, a: grpo.policy_loss(new - old, a, new, args),
        lambda new, old, a: (-a * new, -a),
        rows,
    )


@given(rows, st.sampled_from([0.5, 4.0]))
def test_cispo_clips_weights_and_keeps_gradients(rows, high):
    def naive(new, old, a):
        weight = min(math.exp(new - old), 1 + high)
        return -weight * a * new, -weight * a

    args = flags(loss="cispo", cispo_high=high)
    check(lambda new, old, a: grpo.policy_loss(new - old, a, new, args), naive, rows)


@given(rows, st.sampled_from([(0.2, 0.28), (0.5, 3.0)]))
def test_mask_of_cispo_has_the_bounds_of_clip_on_both_sides(rows, mask):
    """arXiv:2506.13585 Eq. 6 and 7."""

    def naive(new, old, a):
        ratio = math.exp(new - old)
        if (a > 0 and ratio > 1 + mask[1]) or (a < 0 and ratio < 1 - mask[0]):
            return 0.0, 0.0
        return -min(ratio, 3.0) * a * new, -min(ratio, 3.0) * a

    args = flags(loss="cispo", cispo_high=2.0, cispo_mask=mask)
    check(lambda new, old, a: grpo.policy_loss(new - old, a, new, args), naive, rows)


@given(rows, st.sampled_from([(1.0, 1.05), (0.5, 4.0)]))
def test_sapo_loss_equals_naive_code(rows, taus):
    def naive(new, old, a):
        r, tau = math.exp(new - old), taus[0] if a > 0 else taus[1]
        gate = 1 / (1 + math.exp(-tau * (r - 1))) if tau * (r - 1) > -700 else 0.0
        return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a

    args = flags(loss="sapo", sapo_tau_positive=taus[0], sapo_tau_negative=taus[1])
    check(
        lambda new, old, a: grpo.policy_loss(new - old, a, new, args), naive, rows, rel=2e-6
    )  # tau is a float32


def test_sapo_closes_its_gate_on_both_sides():
    ratio = torch.tensor([0.05, 0.5, 1.0, 2.0, 20.0]).double().requires_grad_()
    args = flags(loss="sapo", sapo_tau_positive=4.0, sapo_tau_negative=4.0)
    grpo.policy_loss(ratio.log(), torch.ones(5), ratio, args).sum().backward()
    slopes = -ratio.grad
    assert slopes[2] == pytest.approx(1) and slopes.argmax() == 2
    assert slopes[0] < slopes[1] < 1 and slopes[4] < slopes[3] < 1


# ---- the loss of packed completions ----

LOSSES = {
    "clip": dict(loss="clip"),
    "dual_clip": dict(loss="clip", dual_clip=3.0),
    "cispo mask": dict(loss="cispo", cispo_mask=(0.2, 0.28)),
    "dppo kl": dict(loss="dppo", dppo_divergence="kl", dppo_bound=0.05),
    "old_beta": dict(loss="reinforce", old_beta=0.5),
    **{name: dict(loss=name) for name in ("reinforce", "cispo", "sapo", "dppo")},
}
REDUCTIONS = ("token", "sequence", "sequence_sum", "constant")
ADVANTAGES = (1.5, -0.7, 0.0, -2.0, 0.4, -1.1)
# Prompts have 2 tokens; the fourth completion has an environment's reply in its middle; the last is
# not trained.
MASKS = [torch.tensor([False] * 2 + [True] * length) for length in (5, 30, 1, 12, 20, 7)]
MASKS[3][5:8] = MASKS[5][:] = False
TRAINED = [mask for mask in MASKS if mask.any()]
ONE_PACK, MANY_PACKS = [[0, 1, 2, 3, 4, 5]], [[4], [], [5, 3, 0], [2], [1]]


def make_logprobs(drift, seed=3):
    """Return, per sequence, log-probs under the policy, with gradient, and under the old policy.
    With this seed whole completions exceed the clip bounds on both sides, and the probability of
    one with a negative advantage has increased."""
    generator, new, old = torch.Generator().manual_seed(seed), [], []
    for mask in MASKS:
        new.append(
            (-3 * torch.rand(len(mask), generator=generator, dtype=torch.float64)).requires_grad_()
        )
        old.append(
            new[-1].detach()
            + drift * torch.randn(len(mask), generator=generator, dtype=torch.float64)
        )
    return new, old


def total_loss(loss, reduction="sequence", drift=0.5, packs=ONE_PACK):
    """Return the loss of the global minibatch and its gradient with respect to every sequence's
    log-probs. `loss` is a name of the table, or flags."""
    args = flags(**(LOSSES[loss] if isinstance(loss, str) else loss), reduction=reduction)
    return total_of(grpo.loss, args, drift, packs)


def total_of(loss, args, drift, packs):
    new, old = make_logprobs(drift)
    tokens, sequences, total = sum(mask.sum() for mask in MASKS), torch.tensor(len(TRAINED)), 0.0
    for members in packs:
        lengths = torch.tensor([len(MASKS[n]) for n in members] or [1])
        filler, advantages = (
            torch.zeros(0 if members else 1),
            torch.tensor([ADVANTAGES[n] for n in members] or [0.0]),
        )
        logprobs_T, old_T, mask_T = (
            torch.cat([*(x[n] for n in members), filler.to(x[0])]) for x in (new, old, MASKS)
        )
        ids_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        total += loss(
            logprobs_T, old_T, old_T, None, torch.zeros_like(old_T),
            advantages.repeat_interleave(lengths), mask_T, ids_T, tokens, sequences, args,
        )[0].sum()  # fmt: skip
    return total.item(), [
        g.tolist() for g in torch.autograd.grad(total, new, materialize_grads=True)
    ]


def flat(gradients):
    return [x for gradient in gradients for x in gradient]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1e4, 100.0, -100.0, -1e4])
def test_extreme_ratios_do_not_overflow(loss, advantage, log_ratio):
    """In float32 e^89 is infinite, and its product with an advantage or weight of 0 would be
    NaN."""
    logprobs = torch.tensor([-2.0 + min(log_ratio, 0.0)], requires_grad=True)
    old = logprobs.detach() - log_ratio
    value = grpo.policy_loss(
        logprobs - old, torch.tensor([advantage]), logprobs, flags(**LOSSES[loss])
    )
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert (
        value.isfinite().all()
        and slope.isfinite().all()
        and (advantage or (value, slope) == (0, 0))
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_do_not_depend_on_the_packing(loss, reduction):
    one, many = total_loss(loss, reduction), total_loss(loss, reduction, packs=MANY_PACKS)
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert flat(many[1]) == pytest.approx(flat(one[1]), rel=1e-6)
    masks = [trained for mask in MASKS for trained in mask.tolist()]
    assert all(
        gradient == 0 for gradient, trained in zip(flat(one[1]), masks, strict=True) if not trained
    )
    assert any(gradient != 0 for gradient in flat(one[1]))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_reinforce_on_policy(loss):
    _, expected = total_loss("reinforce", drift=0.0)
    assert flat(total_loss(loss, drift=0.0)[1]) == pytest.approx(flat(expected), rel=1e-6)


def test_sapo_tends_to_the_unclipped_ratio_at_low_temperature():
    """4 / tau (sigmoid(tau (r - 1)) - 1 / 2) -> r - 1 as tau -> 0."""
    _, expected = total_loss(dict(loss="clip", clip_low=0.999, clip_high=1e9))
    _, got = total_loss(dict(loss="sapo", sapo_tau_positive=1e-3, sapo_tau_negative=1e-3))
    assert flat(got) == pytest.approx(flat(expected), rel=1e-3)


def test_penalty_to_the_old_policy_is_quadratic():
    """DRO (arXiv:2405.19107): -A log pi + old_beta / 2 (log pi - log pi_old)^2, summed over
    tokens."""
    expected, slopes = 0.0, []
    for mask, new, old, a in zip(MASKS, *make_logprobs(0.5), ADVANTAGES, strict=True):
        for trained, logprob, old_logprob in zip(mask, new.tolist(), old.tolist(), strict=True):
            d = logprob - old_logprob
            expected += trained * (-a * logprob + 0.3 / 2 * d * d) / 5
            slopes.append(trained * (-a + 0.3 * d) / 5)
    total, gradients = total_loss(dict(loss="reinforce", old_beta=0.3), "sequence_sum")
    assert total == pytest.approx(expected.item(), rel=1e-6)
    assert flat(gradients) == pytest.approx([float(slope) for slope in slopes], rel=1e-6)


@pytest.mark.parametrize("loss", ["clip", "sapo"])
def test_parameters_of_one_sign_affect_only_advantages_of_that_sign(loss):
    """A parameter for positive advantages does not change the gradient of negative ones."""
    positive, negative = dict(
        clip=("clip_high", "clip_low"), sapo=("sapo_tau_positive", "sapo_tau_negative")
    )[loss]
    _, base = total_loss(loss, drift=2.0)
    for name, sign in ((positive, 1), (negative, -1)):
        _, changed = total_loss(dict(loss=loss) | {name: 0.6}, drift=2.0)
        moved = {
            math.copysign(1, a) for a, x, y in zip(ADVANTAGES, base, changed, strict=True) if x != y
        }
        assert moved == {sign}


# ---- --unbiased_kl ----


@given(rows, st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([0.0, 0.7]))
def test_unbiased_kl_multiplies_the_clamped_estimate_by_the_ratio(rows, estimator, clamp):
    def naive(new, ref, old):
        d, r = new - ref, math.exp(new - old)
        value, slope = dict(
            k1=(d, 1.0), k2=(d * d / 2, d), k3=(math.exp(-d) - 1 + d, 1 - math.exp(-d))
        )[estimator]
        value, slope = (
            (math.copysign(clamp, value), 0.0) if clamp and abs(value) > clamp else (value, slope)
        )
        return r * value, r * value + r * slope

    far = [(a, b, c - 4) for a, b, c in rows]
    check(
        lambda new, ref, old: unbiased_kl(new, ref, old, kl_estimator=estimator, kl_clamp=clamp),
        naive,
        far,
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_kl_of_off_policy_samples_is_the_kl_by_enumeration(estimator):
    logits, logq, old = (
        POLICY.clone().requires_grad_(),
        REFERENCE.log_softmax(0),
        POLICY.flip(0).log_softmax(0),
    )
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - logq)).sum()
    expectation = (old.exp() * unbiased_kl(logp, logq, old, kl_estimator=estimator)).sum()
    (slopes,), (exact_slopes,) = (
        torch.autograd.grad(x, logits, retain_graph=True) for x in (expectation, exact)
    )
    torch.testing.assert_close(expectation, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slopes, exact_slopes, rtol=1e-12, atol=1e-12)


def test_unbiased_kl_of_an_extreme_token_is_finite():
    new = torch.tensor([-1.0], requires_grad=True)
    kl = unbiased_kl(new, torch.tensor([-1.0]), torch.tensor([-500.0]))
    kl.sum().backward()
    assert kl.tolist() == [0.0] and new.grad.isfinite().all()


# ---- the weight of a token ----

masks = st.lists(st.booleans(), min_size=2, max_size=9)


def weights_of(mb, reduction, tokens, sequences):
    """Return the weight of each token in the loss: the derivative of a loss of -A logp with A =
    -1."""
    logprobs_T = torch.zeros(len(mb.targets_T)).double().requires_grad_()
    tokens, sequences = tokens.clamp(min=1), sequences.clamp(min=1)
    args, zeros_T = flags(loss="reinforce", reduction=reduction), torch.zeros(len(mb.targets_T))
    share_T, _ = grpo.loss(
        logprobs_T, logprobs_T.detach(), logprobs_T.detach(), None, zeros_T, zeros_T - 1,
        mb.loss_mask_T, mb.sequence_ids_T, tokens, sequences, args,
    )  # fmt: skip
    return torch.autograd.grad(share_T.sum(), logprobs_T)[0]


def naive_weights(masks, reduction):
    """Return the weight of each target, by the id of the token: 100 * sequence + position."""
    trained = {n: [i for i in range(1, len(mask)) if mask[i]] for n, mask in enumerate(masks)}
    tokens = sum(len(positions) for positions in trained.values())
    sequences = sum(1 for positions in trained.values() if positions)
    out = {}
    for n, mask in enumerate(masks):
        for i in range(1, len(mask)):
            of_sequence = dict(
                sequence=1 / max(1, len(trained[n])), sequence_sum=1.0, constant=1 / LONGEST
            )
            weight = (
                1 / max(1, tokens)
                if reduction == "token"
                else of_sequence[reduction] / max(1, sequences)
            )
            out[100 * n + i] = weight if i in trained[n] else 0.0
    return out


@given(st.lists(masks, min_size=1, max_size=6), st.sampled_from(REDUCTIONS),
       st.sampled_from([8, 20, 1000]))  # fmt: skip
def test_reduction_weights_equal_naive_code(masks, reduction, pack_tokens):
    masks = [[False, *mask[1:]] for mask in masks]
    samples = [
        Sample([100 * n + i for i in range(len(mask))], mask) for n, mask in enumerate(masks)
    ]
    micro_batches = [
        *pack(samples, pack_tokens, torch.device("cpu")),
        *pack([], 10, torch.device("cpu")),
    ]  # a padding token
    tokens, sequences = torch.tensor(sum(map(sum, masks))), torch.tensor(sum(map(any, masks)))
    got = {}
    for mb in micro_batches:
        weights_T = weights_of(mb, reduction, tokens, sequences)
        assert mb.num_samples or weights_T.tolist() == [0.0]
        got |= zip(
            mb.targets_T.tolist() if mb.num_samples else [], weights_T.tolist(), strict=False
        )
    assert got == pytest.approx(naive_weights(masks, reduction), rel=1e-6)
    if reduction in ("token", "sequence") and any(map(any, masks)):
        assert sum(got.values()) == pytest.approx(
            1, rel=1e-6
        )  # a mean: the prompt is in neither numerator nor denominator


def test_reductions_agree_for_equal_lengths():
    samples = [Sample(list(range(6)), [False] * 3 + [True] * 3) for _ in range(4)]
    (mb,) = pack(samples, 100, torch.device("cpu"))
    token_T, sequence_T, sum_T, constant_T = (
        weights_of(mb, reduction, torch.tensor(12), torch.tensor(4)) for reduction in REDUCTIONS
    )
    torch.testing.assert_close(token_T.double(), sequence_T.double())
    torch.testing.assert_close(constant_T, sum_T / LONGEST)
    torch.testing.assert_close(sum_T.double(), 3 * sequence_T.double())
