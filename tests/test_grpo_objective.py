"""The objective of grpo.py and the policy losses of the table equal naive scalar code in float64,
values and gradients, written from the papers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import check, rows

import dapo
import grpo
import ppo
import reinforce
from common.data.packing import pack
from common.data.sample import Sample
from common.objectives.importance import is_clipped
from common.objectives.policy import BY_COMPLETION, BY_TOKEN, POLICY_LOSSES, Tokens

LONGEST = 16  # --max_new_tokens
POLICY, REFERENCE = (
    torch.tensor([0.5, -0.3, 1.2, 0.0]).double(),
    torch.tensor([0.1, 0.4, 0.2, -0.5]).double(),
)


def flags(**changed) -> grpo.Args:
    return grpo.Args(**dict(correction="none", max_new_tokens=LONGEST) | changed)


def tokens(new, old, A, low=0.2, high=0.28, lengths=None) -> Tokens:
    """Return trained tokens, each a completion of its own unless the completions have `lengths`."""
    ids = torch.arange(len(new))
    if lengths is not None:
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return Tokens(new, old, A, torch.ones(len(new)).bool(), ids, low, high)


# ---- losses by token ----

bounds = st.sampled_from([(0.2, 0.28), (0.1, 0.4), (0.5, 5.0)])


def naive_clip(new, old, a, low, high):
    r = math.exp(new - old)
    if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low):
        return -(1 + high if a > 0 else 1 - low) * a, 0.0
    return -r * a, -r * a


def naive_dppo(new, old, a, *_):
    """Total variation at most 0.15; the weight is at most 10."""
    p, q, ratio = math.exp(new), math.exp(old), min(math.exp(new - old), 10.0)
    far = abs(p - q) > 0.15 and (p - q) * a > 0
    return (0.0, 0.0) if far else (-ratio * a * new, -ratio * a)


def naive_cispo(new, old, a, *_):
    weight = min(math.exp(new - old), 5.0)
    return -weight * a * new, -weight * a


def naive_sapo(new, old, a, *_):
    r, tau = math.exp(new - old), 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (r - 1))) if tau * (r - 1) > -700 else 0.0
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a


NAIVE = dict(
    clip=naive_clip,
    dppo=naive_dppo,
    cispo=naive_cispo,
    sapo=naive_sapo,
    reinforce=lambda new, old, a, *_: (-a * new, -a),
)


def test_every_loss_has_naive_code():
    assert BY_TOKEN.keys() == NAIVE.keys()
    assert BY_COMPLETION.keys() == {"gspo", "sequence_clip", "gmpo", "topr", "vespo"}


@pytest.mark.parametrize("loss", NAIVE)
@given(rows=rows, bounds=bounds)
def test_losses_by_token_equal_naive_code(loss, rows, bounds):
    rel = 2e-6 if loss == "sapo" else 1e-9  # tau is a float32
    for policy_loss in (
        lambda x: POLICY_LOSSES[loss](x), *(
            lambda x, script=script: script.policy_loss(loss, x)
            for script in (grpo, dapo, ppo, reinforce)
        ),
    ):  # fmt: skip
        check(
            lambda new, old, a, f=policy_loss: f(tokens(new, old, a, *bounds)).loss_T,
            lambda new, old, a: NAIVE[loss](new, old, a, *bounds),
            rows,
            rel=rel,
        )


def test_clip_bounds_are_asymmetric_and_one_sided():
    ratio = torch.tensor([1.29, 1.27, 0.79, 0.81, 1.29, 0.79], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    x = tokens(log_ratio, torch.zeros(6).double(), advantages)
    grpo.policy_loss("clip", x).loss_T.sum().backward()
    assert (log_ratio.grad == 0).tolist() == [True, False, True, False, False, False]
    assert is_clipped(log_ratio, advantages, 0.2, 0.28).equal(log_ratio.grad == 0)


@pytest.mark.parametrize("loss", ["clip", "dppo"])
@given(rows, bounds)
def test_stopped_tokens_are_those_without_gradient(loss, rows, bounds):
    rows = [row for row in rows if abs(row[2]) > 1e-9] or [(-1.0, -1.0, 1.0)]
    new, old, A = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    new.requires_grad_()
    found = POLICY_LOSSES[loss](tokens(new, old, A, *bounds))
    (slopes,) = torch.autograd.grad(found.loss_T.sum(), new)
    assert found.stopped_T.equal(slopes == 0)


def test_no_token_of_zero_advantage_is_clipped():
    log_ratio = torch.tensor([4.0, 0.1]).log()
    assert is_clipped(log_ratio, torch.zeros(2), 0.2, 0.28).tolist() == [False, False]


def test_dppo_bounds_probabilities_and_clip_bounds_ratios():
    """A rare token may become ten times as likely; a likely one may not lose a fifth."""
    new = torch.tensor([1e-3, 0.75]).double().log().requires_grad_()
    old = torch.tensor([1e-4, 0.92]).double().log()
    A = torch.tensor([1.0, -1.0]).double()
    for loss, expected in (("clip", [True, False]), ("dppo", [False, True])):
        found = POLICY_LOSSES[loss](tokens(new, old, A))
        (slopes,) = torch.autograd.grad(found.loss_T.sum(), new)
        assert found.stopped_T.tolist() == expected == (slopes == 0).tolist()


def test_dppo_of_certain_tokens_is_finite():
    """In float32, 1 - pi is 0."""
    new = torch.tensor([0.0, -20.0, 0.0, -1e-9], requires_grad=True)
    old = torch.tensor([0.0, 0.0, -20.0, 0.0]).add(new.detach() * 0)
    A = torch.tensor([1.0, -1.0, 1.0, -1.0])
    (slopes,) = torch.autograd.grad(POLICY_LOSSES["dppo"](tokens(new, old, A)).loss_T.sum(), new)
    assert slopes.tolist() == [-1.0, 0.0, 0.0, 1.0]


def test_sapo_closes_its_gate_on_both_sides():
    ratio = torch.tensor([0.01, 0.5, 1.0, 2.0, 20.0]).double().requires_grad_()
    x = tokens(ratio.log(), torch.zeros(5).double(), torch.ones(5))
    POLICY_LOSSES["sapo"](x).loss_T.sum().backward()
    slopes = -ratio.grad
    assert slopes[2] == pytest.approx(1) and slopes.argmax() == 2
    assert slopes[0] < slopes[1] < 1 and slopes[4] < slopes[3] < 1


# ---- losses by completion ----


def naive_completion(loss, new, old, a, low, high):
    """Return value and slope of each token of a completion."""
    d, n = [x - y for x, y in zip(new, old, strict=True)], len(new)
    rho = math.exp(sum(d))
    if loss in ("gspo", "sequence_clip"):  # one ratio; all tokens are clipped, or none
        power = 1 / n if loss == "gspo" else 1.0
        s = rho**power
        if (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low):
            return [(-(1 + high if a > 0 else 1 - low) * a, 0.0)] * n
        return [(-s * a, -s * a * power * n)] * n  # the slope of all n losses
    if loss == "gmpo":  # log-ratios of tokens, each clipped on the side of the advantage
        kept = [max(x, -low) if a < 0 else min(x, high) for x in d]
        s = math.exp(sum(kept) / n)
        return [(-s * a, -s * a if x == y else 0.0) for x, y in zip(d, kept, strict=True)]
    if loss == "topr":
        weight = 1.0 if a >= 0 else min(1.0, rho)
    else:
        k, decay = (2, 3) if a >= 0 else (3, 2)
        weight = rho**k * math.exp(decay * (1 - rho))
    return [(-weight * a * x, -weight * a) for x in new]


completion = st.tuples(
    st.lists(st.tuples(st.floats(-3, -1e-3), st.floats(-3, -1e-3)), min_size=1, max_size=4),
    st.sampled_from([0.0, 1.0, -1.0, 2.5, -0.3]),
)


@pytest.mark.parametrize("loss", BY_COMPLETION)
@given(completions=st.lists(completion, min_size=1, max_size=4))
def test_losses_by_completion_equal_naive_code(loss, completions):
    low, high = grpo.CLIP_BOUNDS.get(loss, (0, 0))
    new, old, A, expected = [], [], [], []
    for pairs, a in completions:
        columns = [list(column) for column in zip(*pairs, strict=True)]
        new += columns[0]
        old += columns[1]
        A += [a] * len(pairs)
        expected += naive_completion(loss, *columns, a, low, high)
    new, old, A = (torch.tensor(x, dtype=torch.float64) for x in (new, old, A))
    lengths = [len(pairs) for pairs, _ in completions]
    x = tokens(new.requires_grad_(), old, A, low, high, lengths)
    found = grpo.policy_loss(loss, x)
    (slopes,) = torch.autograd.grad(found.loss_T.sum(), new)
    got = list(zip(found.loss_T.tolist(), slopes.tolist(), strict=True))
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("advantage", "peak"), [(1.0, 2 / 3), (-1.0, 3 / 2)])
def test_vespo_weight_is_1_on_policy_largest_at_k_over_lambda_and_has_no_gradient(advantage, peak):
    ratios = torch.tensor([1e-3, peak - 0.01, peak, peak + 0.01, 1.0, 100.0]).double()
    logprobs = ratios.log().requires_grad_()
    x = tokens(logprobs, torch.zeros(6).double(), torch.full((6,), advantage))
    POLICY_LOSSES["vespo"](x).loss_T.sum().backward()
    weights = (-advantage * logprobs.grad).tolist()
    assert weights[4] == 1 and max(weights) == weights[2] and max(weights[0], weights[5]) < 1e-4


@given(rows)
def test_gmpo_of_one_token_is_clip_in_log_space(rows):
    """... whose bounds are exp(-low) and exp(high)."""
    new, old, A = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    found = []
    for loss, bounds in (("gmpo", (0.3, 0.4)), ("clip", (1 - math.exp(-0.3), math.exp(0.4) - 1))):
        leaf = new.clone().requires_grad_()
        value = POLICY_LOSSES[loss](tokens(leaf, old, A, *bounds)).loss_T
        found.append((value, *torch.autograd.grad(value.sum(), leaf)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", ["gspo", "sequence_clip"])
@given(rows, bounds)
def test_completions_of_one_token_have_the_loss_of_clip(loss, rows, bounds):
    new, old, A = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    x = tokens(new, old, A, *bounds)
    torch.testing.assert_close(POLICY_LOSSES[loss](x), POLICY_LOSSES["clip"](x))


# ---- the loss of packed completions ----

LOSSES = {name: dict(loss=name) for name in POLICY_LOSSES}
LOSSES["gspo"] |= dict(clip_low=0.002, clip_high=0.003)
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
        total += grpo.loss(
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
    x = tokens(logprobs, logprobs.detach() - log_ratio, torch.tensor([advantage]))
    value = grpo.policy_loss(loss, x).loss_T
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all() and slope.isfinite().all()
    assert advantage or (value, slope) == (0, 0)


def reductions_of(loss):
    if loss in ("sequence_clip", "gmpo"):
        return ("sequence",)
    return ("sequence", "sequence_sum") if loss in BY_COMPLETION else REDUCTIONS


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_do_not_depend_on_the_packing(loss, reduction):
    if reduction not in reductions_of(loss):
        with pytest.raises(ValueError, match="a loss by completion needs sequence"):
            total_loss(loss, reduction)
        return
    one = total_loss(loss, reduction, drift=0.1)
    many = total_loss(loss, reduction, drift=0.1, packs=MANY_PACKS)
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert flat(many[1]) == pytest.approx(flat(one[1]), rel=1e-6)
    masks = [trained for mask in MASKS for trained in mask.tolist()]
    assert all(
        gradient == 0 for gradient, trained in zip(flat(one[1]), masks, strict=True) if not trained
    )
    assert any(gradient != 0 for gradient in flat(one[1]))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_reinforce_on_policy(loss):
    """With a ratio of the whole completion, of that with sums."""
    _, expected = total_loss(
        "reinforce", "sequence_sum" if loss == "sequence_clip" else "sequence", drift=0.0
    )
    assert flat(total_loss(loss, drift=0.0)[1]) == pytest.approx(flat(expected), rel=1e-6)


def test_dppo_far_below_its_bounds_is_the_unclipped_ratio_in_gradient():
    _, expected = total_loss(dict(loss="clip", clip_low=0.999, clip_high=1e9), drift=0.01)
    _, got = total_loss("dppo", drift=0.01)
    assert flat(got) == pytest.approx(flat(expected), rel=1e-9)


def test_topr_of_positive_completions_equals_reinforce_off_policy():
    good = [n for n, advantage in enumerate(ADVANTAGES) if advantage > 0]
    _, reinforced = total_loss("reinforce", drift=3.0)
    _, topr = total_loss("topr", drift=3.0)
    assert [topr[n] for n in good] == [reinforced[n] for n in good] and topr != reinforced


def test_luspo_is_gspo_with_each_loss_times_its_length():
    """arXiv:2602.05261."""
    _, gspo_gradients = total_loss("gspo", drift=0.05)
    _, luspo_gradients = total_loss("gspo", "sequence_sum", drift=0.05)
    for mask, one, other in zip(MASKS, gspo_gradients, luspo_gradients, strict=True):
        assert other == pytest.approx([x * int(mask.sum()) for x in one], rel=1e-6)
    assert flat(gspo_gradients) != flat(luspo_gradients)


@pytest.mark.parametrize(("name", "sign"), [("clip_high", 1), ("clip_low", -1)])
def test_a_clip_bound_affects_only_advantages_of_its_sign(name, sign):
    _, base = total_loss("clip", drift=2.0)
    _, changed = total_loss({"loss": "clip", name: 0.6}, drift=2.0)
    moved = {
        math.copysign(1, a) for a, x, y in zip(ADVANTAGES, base, changed, strict=True) if x != y
    }
    assert moved == {sign}


@pytest.mark.parametrize("loss", ["gspo", "sequence_clip", "gmpo"])
def test_stopped_tokens_of_completions_are_those_without_gradient(loss):
    new, old = make_logprobs(0.5)
    lengths = torch.tensor([len(mask) for mask in MASKS])
    ids, mask = torch.arange(len(MASKS)).repeat_interleave(lengths), torch.cat(MASKS)
    A = torch.tensor(ADVANTAGES).repeat_interleave(lengths)
    new, old = torch.cat(new), torch.cat(old)
    zeros, one = torch.zeros_like(new), torch.tensor(1)
    args = flags(**LOSSES[loss], reduction="sequence")
    share, logged = grpo.loss(new, old, old, None, zeros, A, mask, ids, one, one, args)
    (slopes,) = torch.autograd.grad(share.sum(), new)
    stopped = logged["clip_ratio/region_mean"]
    moves = mask & (A != 0)
    assert (slopes == 0)[moves].equal(stopped[moves]) and stopped[moves].any()
    assert not stopped[A == 0].any()


# ---- importance weights ----


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


def test_losses_by_completion_have_the_weight_of_all_tokens():
    logprobs, ids = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.tensor([0, 0, 1])
    advantages, ratios = torch.tensor([1.0, 1.0, -2.0]).double(), torch.tensor([2.0, 1.5, 0.25])
    args = flags(loss="gspo", reduction="sequence", correction=None, correction_high=2.5, beta=0.3,
                 kl_estimator="k2")  # fmt: skip
    share_T, _ = grpo.loss(
        logprobs, logprobs, logprobs - ratios.double().log(), logprobs - 1, torch.zeros(3),
        advantages, ids >= 0, ids, torch.tensor(3), torch.tensor(2), args,
    )  # fmt: skip
    assert share_T.sum().item() == pytest.approx((-2.5 * 1.0 + 0.25 * 2.0) / 2 + 0.3 / 2)
    with pytest.raises(ValueError, match="--correction token: a completion has one weight"):
        flags(loss="gspo", reduction="sequence", correction="token")


def test_default_bounds_are_those_of_the_loss():
    found = {
        loss: flags(loss=loss, reduction=reductions_of(loss)[0]).clip_bounds
        for loss in grpo.CLIP_BOUNDS
    }
    assert found == dict(
        clip=(0.2, 0.28), gspo=(3e-4, 4e-4), sequence_clip=(0.2, 0.2), gmpo=(0.4, 0.4)
    )
    assert flags(clip_low=0.1).clip_bounds == (0.1, 0.28)


# ---- --unbiased_kl ----


def unbiased_kl(logprobs, ref_logprobs, old_logprobs, **changed):
    """Return the KL term of each token with --unbiased_kl."""
    args, zeros, ids = (
        flags(beta=1.0, unbiased_kl=True, **changed),
        torch.zeros_like(logprobs),
        torch.arange(len(logprobs)),
    )
    one = torch.tensor(1)
    _, logged = grpo.loss(
        logprobs, old_logprobs, old_logprobs, ref_logprobs, zeros, zeros, zeros == 0, ids, one, one,
        args,
    )  # fmt: skip
    return logged["kl"]


@pytest.mark.parametrize("loss", [{}, dict(loss="gspo", reduction="sequence")])
@given(rows, st.sampled_from(["k1", "k2", "k3"]))
def test_unbiased_kl_multiplies_the_estimate_by_the_ratio(loss, rows, estimator):
    def naive(new, ref, old):
        d, r = new - ref, math.exp(new - old)
        value, slope = dict(
            k1=(d, 1.0), k2=(d * d / 2, d), k3=(math.exp(-d) - 1 + d, 1 - math.exp(-d))
        )[estimator]
        return r * value, r * value + r * slope

    far = [(a, b, c - 4) for a, b, c in rows]
    check(
        lambda new, ref, old: unbiased_kl(new, ref, old, kl_estimator=estimator, **loss), naive, far
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
