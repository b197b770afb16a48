"""The policy losses and the objectives of the scripts equal naive scalar code in float64, written
from the papers: values and gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naive import check, double, rows, tokens

import dapo
import distill
import grpo
import ppo
import reinforce
from common.config.parse import parse
from common.objectives.importance import importance_weights
from common.objectives.policy import BY_COMPLETION, BY_TOKEN, PolicyInputs
from common.packs.packing import pack
from common.packs.sample import Sample

LONGEST = 16  # --max_new_tokens


def flags(**changed) -> grpo.Args:
    return grpo.Args(**dict(correction="none", max_new_tokens=LONGEST) | changed)


# ---- losses by token ----

bounds = st.sampled_from([(0.2, 0.28), (0.1, 0.4), (0.5, 5.0)])


def naive_clip(new, old, a, low, high):
    r = math.exp(new - old)
    if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low):
        return -(1 + high if a > 0 else 1 - low) * a, 0.0
    return -r * a, -r * a


def naive_dppo(new, old, a, *_):
    """The total variation may be 0.15 at most, the weight 10 at most."""
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
    assert NAIVE.keys() == {"clip", *BY_TOKEN}
    assert BY_COMPLETION.keys() == {"gspo", "gmpo", "topr"}


@pytest.mark.parametrize("loss", NAIVE)
@given(rows=rows, bounds=bounds)
def test_losses_by_token_equal_naive_code(loss, rows, bounds):
    rel = 2e-6 if loss == "sapo" else 1e-9  # tau is a float32
    scripts = (grpo, dapo, ppo, reinforce, distill)
    for policy_loss in {script.LOSSES[loss] for script in scripts}:
        check(
            lambda new, old, a, f=policy_loss: f(tokens(new, old, a, *bounds)).loss_T,
            lambda new, old, a: NAIVE[loss](new, old, a, *bounds),
            rows,
            rel=rel,
        )


@pytest.mark.parametrize("loss", grpo.LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1e4, 100.0, -100.0, -1e4])
def test_extreme_ratios_do_not_overflow(loss, advantage, log_ratio):
    """In float32 e^89 is infinite. Times an advantage or a weight of 0 it would be NaN."""
    logprobs = torch.tensor([-2.0 + min(log_ratio, 0.0)], requires_grad=True)
    x = tokens(logprobs, logprobs.detach() - log_ratio, torch.tensor([advantage]))
    value = grpo.LOSSES[loss](x).loss_T
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all() and slope.isfinite().all()
    assert advantage or (value, slope) == (0, 0)


# ---- losses by completion ----


def naive_completion(loss, new, old, a, low, high):
    """Return the value and the slope of each trained token of a completion."""
    d, n = [x - y for x, y in zip(new, old, strict=True)], len(new)
    rho = math.exp(sum(d))
    if loss == "gspo":  # one ratio; all tokens are clipped, or none
        s = rho ** (1 / n)
        if (a > 0 and s > 1 + high) or (a < 0 and s < 1 - low):
            return [(-(1 + high if a > 0 else 1 - low) * a, 0.0)] * n
        return [(-s * a, -s * a)] * n  # the slope of all n losses
    if loss == "gmpo":  # log-ratios of tokens, each clipped on the side of the advantage
        kept = [max(x, -low) if a < 0 else min(x, high) for x in d]
        s = math.exp(sum(kept) / n)
        return [(-s * a, -s * a if x == y else 0.0) for x, y in zip(d, kept, strict=True)]
    weight = 1.0 if a >= 0 else min(1.0, rho)  # topr
    return [(-weight * a * x, -weight * a) for x in new]


logprob = st.floats(-3, -1e-3)
completion = st.tuples(
    st.lists(st.tuples(logprob, logprob, st.booleans()), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, -1.0, 2.5, -0.3]),
)
completions = st.lists(completion, min_size=1, max_size=4)


def stream(completions, low, high) -> PolicyInputs:
    """Return the tokens of completions; some of these tokens come from an environment."""
    made = [(*token, a, n) for n, (some, a) in enumerate(completions) for token in some]
    new, old, mask, A, ids = zip(*made, strict=True)
    new, old, A = double(new).requires_grad_(), double(old), double(A)
    return tokens(new, old, A, low, high, torch.tensor(mask), torch.tensor(ids))


@pytest.mark.parametrize("loss", BY_COMPLETION)
@given(completions=completions)
def test_losses_by_completion_equal_naive_code(loss, completions):
    low, high = grpo.CLIP_BOUNDS.get(loss, (0, 0))
    x, expected = stream(completions, low, high), []
    for some, a in completions:
        trained = [(new, old) for new, old, is_trained in some if is_trained]
        if trained:
            expected += naive_completion(loss, *zip(*trained, strict=True), a, low, high)
    losses_T = grpo.LOSSES[loss](x).loss_T * x.mask_T
    (slopes_T,) = torch.autograd.grad(losses_T.sum(), x.logprobs_T)
    assert not slopes_T[~x.mask_T].any()
    got = zip(losses_T[x.mask_T].tolist(), slopes_T[x.mask_T].tolist(), strict=True)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("loss", ["clip", "dppo", "gspo", "gmpo"])
@given(completions, bounds)
def test_stopped_tokens_are_those_without_gradient(loss, completions, bounds):
    x = stream(completions, *bounds)
    found = grpo.LOSSES[loss](x)
    (slopes_T,) = torch.autograd.grad((found.loss_T * x.mask_T).sum(), x.logprobs_T)
    moves_T = x.mask_T & (x.A_T != 0)
    assert found.stopped_T[moves_T].equal((slopes_T == 0)[moves_T])
    assert not found.stopped_T[x.A_T == 0].any()


def test_every_loss_has_the_gradient_of_reinforce_on_policy():
    some = [([(-1.0, -1.0, True), (-0.5, -0.5, False), (-2.0, -2.0, True)], 1.5),
            ([(-0.3, -0.3, True)], -0.7)]  # fmt: skip
    for loss in grpo.LOSSES:
        x = stream(some, 0.2, 0.28)
        total = (grpo.LOSSES[loss](x).loss_T * x.mask_T).sum()
        (slopes_T,) = torch.autograd.grad(total, x.logprobs_T)
        torch.testing.assert_close(slopes_T, -x.A_T * x.mask_T, msg=loss)


# ---- the objectives of the scripts ----

# Two completions, the first with tool output in its middle, and a third one without trained tokens.
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]).bool()
IDS = torch.tensor([0] * 7 + [1] * 4 + [2] * 2)
A = double([0, 1.5, 0.4, 0, 0, 0.3, 0.9, 0, -0.7, 0.2, -1.1, 0, 0])
TOKENS, SEQUENCES = torch.tensor(17), torch.tensor(5)  # of the global minibatch


def streams() -> list[torch.Tensor]:
    """Return log-probs of the policy, with a gradient, of the old policy, the engine and the
    reference, and entropies."""
    generator = torch.Generator().manual_seed(4)
    new, *drifts = torch.randn(5, len(MASK), generator=generator, dtype=torch.float64)
    new = -2 + 0.5 * new
    old = new + 0.8 * drifts[0]
    entropy = drifts[3].abs().requires_grad_()
    return [new.requires_grad_(), old, old + 0.9 * drifts[1], new.detach() + drifts[2], entropy]


def with_all(script, x, args):
    return script.loss(*x, A, MASK, IDS, TOKENS, SEQUENCES, args)


def of_dapo(_, x, args):
    return dapo.loss(*x[:3], A, MASK, IDS, TOKENS, args)


def of_ppo(_, x, args):
    new, old, engine, _, entropy = x
    weights = importance_weights(
        old, engine, MASK, IDS, args.correction_form(args.loss in BY_COMPLETION)
    )
    return ppo.loss(new, old, entropy, A, weights, MASK, IDS, TOKENS, args)


PENALTIES = dict(beta=0.3, kl_estimator="k2", entropy_coef=0.2)


@pytest.mark.parametrize(
    ("script", "call", "changed", "bounds"),
    [
        (grpo, with_all, dict(correction="token", **PENALTIES), (0.2, 0.28)),
        (reinforce, with_all, dict(loss="clip", kl_in="loss", **PENALTIES), (0.2, 0.2)),
        (reinforce, with_all, dict(loss="reinforce", reduction="sequence_sum", kl_in="loss",
                                   **PENALTIES), (0.2, 0.2)),
        (reinforce, with_all, dict(kl_in="return", **PENALTIES), (0.2, 0.2)),
        (dapo, of_dapo, {}, (0.2, 0.28)),
        (ppo, of_ppo, dict(entropy_coef=0.2, clip_low=0.1, clip_high=0.3), (0.1, 0.3)),
    ],
)  # fmt: skip
def test_objective_equals_naive_code(script, call, changed, bounds):
    """The importance weight, at most 2, multiplies the policy loss but not the other terms."""
    args, x = script.Args(**changed), streams()
    new, old, engine, ref, entropy = x
    beta = 0 if changed.get("kl_in") == "return" else changed.get("beta", 0)
    bonus, count = changed.get("entropy_coef", 0), TOKENS
    if changed.get("reduction"):
        count = SEQUENCES
    expected, slopes, clipped = 0.0, [0.0] * len(MASK), []
    for t in MASK.nonzero()[:, 0].tolist():
        value, slope = NAIVE[args.loss](new[t].item(), old[t].item(), A[t].item(), *bounds)
        weight, d = min(math.exp(old[t] - engine[t]), 2.0), (new[t] - ref[t]).item()
        clipped.append(slope == 0)
        expected += (weight * value + beta * d * d / 2 - bonus * entropy[t].item()) / count.item()
        slopes[t] = (weight * slope + beta * d) / count.item()
    share_T, logged = call(script, x, args)
    of_new, of_entropy = torch.autograd.grad(share_T.sum(), (new, entropy), materialize_grads=True)
    assert share_T.sum().item() == pytest.approx(expected, rel=1e-6)
    assert of_new.tolist() == pytest.approx(slopes, rel=1e-6)
    assert of_entropy.tolist() == pytest.approx((-bonus / count * MASK).tolist(), rel=1e-6)
    assert logged["clip_ratio/region_mean"][MASK].tolist() == clipped
    assert any(clipped) == (args.loss == "clip") and not all(clipped)


def test_losses_by_completion_have_the_weight_of_all_tokens():
    logprobs, ids = double([-1.0, -2.0, -3.0]), torch.tensor([0, 0, 1])
    advantages, ratios = double([1.0, 1.0, -2.0]), double([2.0, 1.5, 0.25])
    args = flags(loss="gspo", reduction="sequence", correction=None, correction_high=2.5, beta=0.3,
                 kl_estimator="k2")  # fmt: skip
    share_T, _ = grpo.loss(
        logprobs, logprobs, logprobs - ratios.log(), logprobs - 1, torch.zeros(3),
        advantages, ids >= 0, ids, torch.tensor(3), torch.tensor(2), args,
    )  # fmt: skip
    assert share_T.sum().item() == pytest.approx((-2.5 * 1.0 + 0.25 * 2.0) / 2 + 0.3 / 2)


def test_default_bounds_are_those_of_the_loss():
    bounds = dict(clip=(0.2, 0.28), gspo=(3e-4, 4e-4), gmpo=(0.4, 0.4))
    for loss, expected in bounds.items():
        reduction = "token" if loss == "clip" else "sequence"
        assert flags(loss=loss, reduction=reduction).clip_bounds == expected
    assert flags(clip_low=0.1).clip_bounds == (0.1, 0.28)


@pytest.mark.parametrize(
    ("script", "preset"),
    [(script, preset) for script in (grpo, reinforce) for preset in script.Args.PRESETS],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_presets_have_a_finite_objective(script, preset):
    """No flag of a preset contradicts another one or lacks an effect: parsing takes them all."""
    args = parse(script.Args, ["--preset", preset, "--max_new_tokens", str(LONGEST)])
    flags = script.Args.PRESETS[preset]
    assert {name: getattr(args, name) for name in flags} == flags
    new, old, *rest = streams()
    share_T, _ = with_all(script, [new, old, *rest], args)
    (slopes_T,) = torch.autograd.grad(share_T.sum(), new)
    assert share_T.isfinite().all() and slopes_T.isfinite().all() and slopes_T[MASK].any()


# ---- the weight of a token, in any packs ----

REDUCTIONS = ("token", "sequence", "sequence_sum", "constant")
masks = st.lists(st.booleans(), min_size=2, max_size=9)


def weights_of(mb, reduction, num_tokens, num_sequences):
    """Return the weight of each token in the loss: the derivative of a loss of -A logp with A =
    -1."""
    logprobs_T = torch.zeros(len(mb.targets_T)).double().requires_grad_()
    num_tokens, num_sequences = num_tokens.clamp(min=1), num_sequences.clamp(min=1)
    args, zeros_T = flags(loss="reinforce", reduction=reduction), torch.zeros(len(mb.targets_T))
    share_T, _ = grpo.loss(
        logprobs_T, logprobs_T.detach(), logprobs_T.detach(), None, zeros_T, zeros_T - 1,
        mb.loss_mask_T, mb.sequence_ids_T, num_tokens, num_sequences, args,
    )  # fmt: skip
    return torch.autograd.grad(share_T.sum(), logprobs_T)[0]


def naive_weight(mask, reduction, num_tokens, num_sequences):
    """Return the weight of each trained token of a sequence."""
    if reduction == "token":
        return 1 / num_tokens
    shares = dict(sequence=1 / max(1, sum(mask)), sequence_sum=1.0, constant=1 / LONGEST)
    return shares[reduction] / num_sequences


@given(st.lists(masks, min_size=1, max_size=6), st.sampled_from(REDUCTIONS),
       st.sampled_from([8, 20, 1000]))  # fmt: skip
def test_reduction_weights_equal_naive_code(masks, reduction, pack_tokens):
    """A token's id is 100 * sequence + position. A pack without sequences has a token of weight
    0."""
    masks = [[False, *mask[1:]] for mask in masks]
    made = [Sample([100 * n + i for i in range(len(m))], m) for n, m in enumerate(masks)]
    num_tokens, num_sequences = sum(map(sum, masks)), sum(map(any, masks))
    got = {}
    for mb in (*pack(made, pack_tokens, torch.device("cpu")), *pack([], 10, torch.device("cpu"))):
        weights_T = weights_of(mb, reduction, torch.tensor(num_tokens), torch.tensor(num_sequences))
        if mb.num_samples:
            got |= zip(mb.targets_T.tolist(), weights_T.tolist(), strict=True)
        else:
            assert weights_T.tolist() == [0.0]
    expected = {}
    for n, mask in enumerate(masks):
        weight = naive_weight(mask, reduction, max(1, num_tokens), max(1, num_sequences))
        expected |= {100 * n + i: weight * mask[i] for i in range(1, len(mask))}
    assert got == pytest.approx(expected, rel=1e-6)
