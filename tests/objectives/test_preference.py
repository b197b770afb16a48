"""Preference objectives equal their formulas in naive 100-digit arithmetic, values and gradients,
also at extremes."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import MPContext

import dpo
from common.objectives.preference import (
    READS,
    REFERENCE_FREE,
    Pairs,
    f_slope,
    implicit_rewards,
    preference_loss,
)

mp = MPContext()
mp.dps = 100
# step of central differences: exact beyond float64, even where third derivatives reach e^180
STEP = mp.mpf(10) ** -40

FLAGS = dict(beta=0.1, label_smoothing=0.0, f_divergence="reverse_kl")
# the objectives that read label_smoothing, and those that read f_divergence
SMOOTHED = {"sigmoid", "robust", "exo_pair"}
DIVERGENT = {"sigmoid", "robust", "hinge", "exo_pair", "discopop"}


# ---- the oracle: plain loops over numbers, from the formulas ----


def s(x):
    return 1 / (1 + mp.exp(-x))


def log_s(x):
    return -mp.log(1 + mp.exp(-x))


def naive_f(u, args):
    match args.f_divergence:
        case "js":
            return mp.log(2) + log_s(u)
        case "forward_kl":
            return 1 - mp.exp(min(-u, 60))
        case "reverse_kl":
            return u
    a = mp.mpf(-0.5)
    return (mp.exp(min(a * u, 60)) - 1) / a


def naive_log_odds(p):
    p = min(p, mp.mpf(-1e-9))
    return p - mp.log(1 - mp.exp(p))


def naive_loss(name, row, args):
    pc, pr, rc, rr, nc, nr = row
    lc, lr = pc - rc, pr - rr
    b, e, tau = mp.mpf(args.beta), mp.mpf(args.label_smoothing), mp.mpf(0.05)
    z = b * (naive_f(lc, args) - naive_f(lr, args))
    match name:
        case "sigmoid":
            return -(1 - e) * log_s(z) - e * log_s(-z)
        case "robust":
            return (-(1 - e) * log_s(z) + e * log_s(-z)) / (1 - 2 * e)
        case "hinge":
            return max(0, 1 - z)
        case "ipo":
            return (lc / nc - lr / nr - 1 / (2 * b)) ** 2
        case "sigmoid_norm":
            return -log_s(b * (lc / nc - lr / nr))
        case "exo_pair":
            return s(z) * (log_s(z) - mp.log(1 - e)) + s(-z) * (log_s(-z) - mp.log(e))
        case "nca_pair":
            return -log_s(b * lc) - log_s(-b * lc) / 2 - log_s(-b * lr) / 2
        case "bco_pair":
            return -log_s(b * lc) - log_s(-b * lr)
        case "sppo_hard":
            return (lc - 1 / (2 * b)) ** 2 + (lr + 1 / (2 * b)) ** 2
        case "apo_zero":
            return 1 - s(b * lc) + s(b * lr)
        case "apo_down":
            return s(b * lc) + 1 - s(b * (lc - lr))
        case "discopop":
            m = s(z / tau)
            return (1 - m) * -log_s(z) + m * mp.exp(-z)
        case "simpo":
            return -log_s(b * (pc / nc - pr / nr) - mp.mpf(0.5))
        case "orpo":
            return -pc / nc - b * log_s(naive_log_odds(pc / nc) - naive_log_odds(pr / nr))
        case "cpo":
            return -log_s(b * (pc - pr)) - pc / nc
    raise AssertionError(f"the oracle does not know {name}")


def assert_equals_naive(loss_N, inputs, naive, rows):
    """Compare each value, and the gradient of their sum with respect to `inputs`, which are the
    first columns of `rows`."""
    rows = [[mp.mpf(x) for x in row] for row in rows]

    def derivative(i, column):
        rows[i][column] += STEP
        above = mp.fsum(naive(rows))
        rows[i][column] -= 2 * STEP
        below = mp.fsum(naive(rows))
        rows[i][column] += STEP
        return (above - below) / (2 * STEP)

    compared = list(zip(loss_N.tolist(), naive(rows), strict=True))
    for column, grad in enumerate(torch.autograd.grad(loss_N.sum(), inputs)):
        compared += [(g, derivative(i, column)) for i, g in enumerate(grad.tolist())]
    for actual, expected in compared:
        assert math.isfinite(actual) and abs(actual - expected) <= 1e-9 * max(1, abs(expected))


# ---- inputs ----


def rows_of(logps, offset=0.0, max_size=3):
    """Draw pairs (pc, pr, rc, rr, nc, nr) whose log-probs subtract without rounding."""
    policy, lengths = logps.map(lambda logp: logp - offset), st.integers(1, 9)
    row = st.tuples(policy, policy, logps, logps, lengths, lengths)
    return st.lists(row, min_size=1, max_size=max_size)


LOGPS = st.integers(-20 * 64, 0).map(lambda k: k / 64)
ROWS = rows_of(LOGPS, max_size=4)
# The offset keeps exponents off the kink where they are clamped, at 60
EXTREME_ROWS = rows_of(st.integers(-100, 0) | st.integers(-10_000, 0), offset=0.25)
# Irrational: no z is on the kink of the hinge, at 1.
BETAS = st.integers(1, 60).map(lambda k: k / (10 * math.pi))


def arguments(*names, **flags):
    """Draw random flags among those that these objectives read."""
    drawn = {"beta": BETAS}
    if SMOOTHED & set(names):
        drawn["label_smoothing"] = st.floats(0.001 if "exo_pair" in names else 0, 0.45)
    drawn = st.fixed_dictionaries(drawn | {k: st.just(v) for k, v in flags.items()})
    divergences = st.just({})
    if DIVERGENT & set(names):
        kinds = ("reverse_kl", "forward_kl", "js", "alpha")
        divergences = st.sampled_from([{"f_divergence": kind} for kind in kinds])
    return st.builds(lambda one, other: flags_of(**one, **other), drawn, divergences)


def flags_of(**flags):
    """Return the flags as an argument parser would."""
    assert flags.keys() <= FLAGS.keys()
    return SimpleNamespace(**FLAGS | flags)


def bind(name, flags):
    """Return the objective with these flags."""
    if name == "sigmoid":
        one = dict(loss=(name,), loss_weights=())
        return lambda pairs: dpo.loss(pairs, SimpleNamespace(**one, **vars(flags)))[0]
    return partial(preference_loss, name, **vars(flags))


def smoothing(name):
    return 0.1 if name in SMOOTHED else 0.0


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def pairs_of(rows):
    chosen, rejected, *others = (tensor(column) for column in zip(*rows, strict=True))
    return Pairs(chosen.requires_grad_(), rejected.requires_grad_(), *others)


def check(name, rows, args):
    pairs = pairs_of(rows)
    inputs = pairs.chosen_logps, pairs.rejected_logps

    def naive(rows):
        return [naive_loss(name, row, args) for row in rows]

    assert_equals_naive(bind(name, args)(pairs), inputs, naive, rows)


# ---- every objective ----

every_objective = pytest.mark.parametrize("name", READS)


OTHERS = dict(beta=0.3, label_smoothing=0.2, f_divergence="js")


@every_objective
def test_table_lists_exactly_the_flags_that_change_an_objective(name):
    pairs = pairs_of([(-3, -5, -2.5, -4.5, 3, 4), (-2, -9, -4, -8, 2, 7)])
    base = flags_of(label_smoothing=0.1)
    changed = {
        flag
        for flag, value in OTHERS.items()
        if not torch.equal(
            bind(name, base)(pairs),
            bind(name, SimpleNamespace(**vars(base) | {flag: value}))(pairs),
        )
    }
    assert changed == {"beta", *READS[name]}


@every_objective
@settings(max_examples=12)
@given(data=st.data())
def test_value_and_gradient_equal_naive_code(name, data):
    check(name, data.draw(ROWS), data.draw(arguments(name)))


@every_objective
@settings(max_examples=10)
@given(data=st.data())
def test_value_and_gradient_at_extreme_logits_equal_naive_code(name, data):
    check(name, data.draw(EXTREME_ROWS), data.draw(arguments(name)))


@every_objective
def test_certain_completions_have_finite_losses_and_gradients(name):
    args = flags_of(label_smoothing=smoothing(name))
    for rows in ([(0, 0, 0, 0, 1, 1)], [(0, -1e4, -1e4, 0, 1, 1)], [(-1e4, 0, 0, -1e4, 1, 1)]):
        check(name, rows, args)


@pytest.mark.parametrize("name", sorted(REFERENCE_FREE))
@settings(max_examples=5)
@given(rows=ROWS, beta=BETAS)
def test_reference_free_objectives_do_not_depend_on_the_reference(name, rows, beta):
    loss = bind(name, flags_of(beta=beta))
    without = [(pc, pr, 0, 0, nc, nr) for pc, pr, _, _, nc, nr in rows]
    assert torch.equal(loss(pairs_of(rows)), loss(pairs_of(without)))


# ---- f-divergences ----


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js", "alpha"])
@settings(max_examples=12)
@given(u=st.lists(st.floats(-25, 25), min_size=1, max_size=6))
def test_f_divergence_value_and_gradient_equal_naive_code(kind, u):
    args, u_N = flags_of(f_divergence=kind), tensor(u).requires_grad_()
    assert_equals_naive(
        f_slope(u_N, kind),
        [u_N],
        lambda rows: [naive_f(u, args) for (u,) in rows],
        [(x,) for x in u],
    )


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "js", "alpha"])
def test_f_divergence_is_finite_and_monotone(kind):
    u_N = tensor(list(range(-10_000, 10_001))).requires_grad_()
    value_N = f_slope(u_N, kind)
    (grad_N,) = torch.autograd.grad(value_N.sum(), u_N)
    assert value_N.isfinite().all() and grad_N.isfinite().all()
    assert (value_N.diff() >= 0).all() and (grad_N >= 0).all()


# ---- implicit rewards ----


@pytest.mark.parametrize("name", READS)
@settings(max_examples=5)
@given(rows=ROWS, beta=BETAS)
def test_implicit_rewards_equal_naive_code(name, rows, beta):
    for side, reward_N in enumerate(implicit_rewards(name, pairs_of(rows), beta)):
        assert not reward_N.requires_grad
        for row, reward in zip(rows, reward_N.tolist(), strict=True):
            policy, reference, length = row[side::2]
            free = name in ("simpo", "orpo", "cpo")
            expected = policy if free else policy - reference
            if name in ("ipo", "sigmoid_norm", "simpo", "orpo"):
                expected /= length
            assert math.isclose(reward, beta * expected, rel_tol=1e-9, abs_tol=1e-9)
