"""gspo.py: the objective equals naive scalar code in float64, values and gradients, written from
the papers; the gradient of a run does not depend on ranks."""

import math

import pytest
import torch
from helpers import assert_close_metrics, metrics, run
from hypothesis import given
from hypothesis import strategies as st
from naive import check, rows
from test_grpo import REWARD, SAME, samples
from test_grpo_objective import (
    ADVANTAGES,
    LONGEST,
    MANY_PACKS,
    MASKS,
    ONE_PACK,
    flat,
    make_logprobs,
    total_of,
)
from test_grpo_objective import flags as grpo_flags
from test_grpo_objective import total_loss as grpo_loss

import grpo
import gspo

LOSSES = {
    "gspo": dict(clip_low=0.002, clip_high=0.003),
    "dual_clip": dict(loss="sequence_clip", dual_clip=1.5),
    "sequence_clip": {},
    "gmpo": {},
    "topr": {},
    "vespo": {},
}
SUMS = ("gspo", "topr", "vespo")  # with --reduction sequence_sum


def flags(**changed) -> gspo.Args:
    return gspo.Args(**dict(correction="none", max_new_tokens=LONGEST) | changed)


def total_loss(loss, reduction="sequence", drift=0.5, packs=ONE_PACK):
    """Return the loss of the global minibatch and its gradient with respect to every sequence's
    log-probs. `loss` is a name of the table, or flags."""
    chosen = dict(loss=loss) | LOSSES[loss] if isinstance(loss, str) else loss
    return total_of(gspo.loss, flags(**chosen, reduction=reduction), drift, packs)


# ---- the loss of a token ----


@given(rows)
def test_topr_imitates_positive_and_truncates_negative_completions(rows):
    def naive(new, log_ratio, a):
        weight = 1.0 if a >= 0 else min(1.0, math.exp(log_ratio))
        return -weight * a * new, -weight * a

    rows = [(new, new - old, a) for new, old, a in rows]
    args = flags(loss="topr")
    check(lambda new, log_ratio, a: gspo.policy_loss(log_ratio, a, new, args), naive, rows)


def test_topr_weight_has_no_gradient():
    logprobs = torch.tensor([-1.0, -2.0]).double().requires_grad_()
    log_ratio, args = logprobs.sum().expand(2) - 1, flags(loss="topr")
    gspo.policy_loss(log_ratio, torch.tensor([-1.0, 1.0]), logprobs, args).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([math.exp(-4), -1.0])


@given(rows, st.sampled_from([{}, dict(vespo_k_positive=0.7, vespo_lambda_negative=0.0)]))
def test_vespo_loss_equals_naive_code(rows, changed):
    def naive(new, log_ratio, a):
        k, decay = (
            (changed.get("vespo_k_positive", 2), 3)
            if a >= 0
            else (3, changed.get("vespo_lambda_negative", 2))
        )
        weight = math.exp(log_ratio) ** k * math.exp(decay * (1 - math.exp(log_ratio)))
        return -weight * a * new, -weight * a

    rows = [(new, new - old, a) for new, old, a in rows]
    args = flags(loss="vespo", **changed)
    check(lambda new, log_ratio, a: gspo.policy_loss(log_ratio, a, new, args), naive, rows)


@pytest.mark.parametrize(("advantage", "peak"), [(1.0, 2 / 3), (-1.0, 3 / 2)])
def test_vespo_weight_is_1_on_policy_largest_at_k_over_lambda_and_has_no_gradient(advantage, peak):
    logprobs = (
        torch.tensor([1e-3, peak - 0.01, peak, peak + 0.01, 1.0, 100.0])
        .double()
        .log()
        .requires_grad_()
    )
    log_ratio, args = logprobs, flags(loss="vespo")  # the old log-probs are all 0
    gspo.policy_loss(log_ratio, torch.full((6,), advantage), logprobs, args).sum().backward()
    weights = (-advantage * logprobs.grad).tolist()
    assert weights[4] == 1 and max(weights) == weights[2] and max(weights[0], weights[5]) < 1e-4


def test_vespo_without_decay_does_not_overflow():
    args = flags(loss="vespo", vespo_lambda_positive=0.0, vespo_lambda_negative=0.0)
    assert gspo.policy_loss(
        torch.tensor([1e4, 50.0]), torch.zeros(2), torch.ones(2), args
    ).tolist() == [0, 0]


# ---- the loss of packed completions ----


@pytest.mark.parametrize("loss", ["gspo", "sequence_clip"])
def test_losses_of_whole_completions_equal_naive_code(loss):
    """arXiv:2507.18071 Eq. 5, and RLOO's: one ratio per completion, the mean over completions."""
    expected, slopes, outside = 0.0, [], []
    for mask, new, old, a in zip(MASKS, *make_logprobs(0.05), ADVANTAGES, strict=True):
        trained = [t for t in range(len(mask)) if mask[t]]
        power = 1 / max(1, len(trained)) if loss == "gspo" else 1.0
        ratio = math.exp(power * sum((new[t] - old[t]).item() for t in trained))
        outside.append(bool(trained) and ((ratio > 1.003 and a > 0) or (ratio < 0.998 and a < 0)))
        if trained:  # five completions have trained tokens
            expected -= min(ratio * a, min(max(ratio, 0.998), 1.003) * a) / 5
        slopes += [
            -ratio * a * power / 5 if mask[t] and not outside[-1] else 0.0 for t in range(len(mask))
        ]
    total, gradients = total_loss(dict(loss=loss, clip_low=0.002, clip_high=0.003), drift=0.05)
    assert 0 < sum(outside) < 5
    assert total == pytest.approx(expected, rel=1e-6) and flat(gradients) == pytest.approx(
        slopes, rel=1e-6
    )


def test_topr_weight_is_that_of_the_whole_completion():
    expected = []
    for mask, new, old, a in zip(MASKS, *make_logprobs(0.5), ADVANTAGES, strict=True):
        trained = [t for t in range(len(mask)) if mask[t]]
        weight = (
            1.0 if a >= 0 else min(1.0, math.exp(sum((new[t] - old[t]).item() for t in trained)))
        )
        expected += [-weight * a / 5 if mask[t] else 0.0 for t in range(len(mask))]
    assert flat(total_loss("topr", "sequence_sum")[1]) == pytest.approx(expected, rel=1e-6)


def test_sequence_clip_has_the_gradient_of_reinforce_with_sums_on_policy():
    _, expected = grpo_loss("reinforce", "sequence_sum", drift=0.0)
    assert flat(total_loss("sequence_clip", drift=0.0)[1]) == pytest.approx(
        flat(expected), rel=1e-6
    )


def test_topr_of_positive_completions_equals_reinforce_off_policy():
    good = [n for n, advantage in enumerate(ADVANTAGES) if advantage > 0]
    _, reinforce = grpo_loss("reinforce", drift=3.0)
    _, topr = total_loss("topr", drift=3.0)
    assert [topr[n] for n in good] == [reinforce[n] for n in good] and topr != reinforce


def test_clip_loss_with_one_ratio_per_completion_equals_sequence_clip():
    new, old = (
        [x[mask].sum() for x, mask in zip(xs, MASKS, strict=True)][:5] for xs in make_logprobs(0.05)
    )
    clip = grpo_flags(clip_low=0.2, clip_high=0.2)
    expected = grpo.policy_loss(
        torch.stack(new) - torch.stack(old), torch.tensor(ADVANTAGES[:5]), torch.zeros(5), clip
    ).mean()
    assert total_loss("sequence_clip", drift=0.05)[0] == pytest.approx(expected.item(), rel=1e-6)


def test_gmpo_loss_equals_naive_code():
    """arXiv:2507.20673: the geometric mean of ratios, each clipped in log space on the side of the
    advantage; a clipped token has no gradient, the others of its completion have one."""
    expected, slopes, clipped = 0.0, [], 0
    for mask, new, old, a in zip(MASKS, *make_logprobs(0.5), ADVANTAGES, strict=True):
        trained = [t for t in range(len(mask)) if mask[t]]
        d = [(x - y).item() for x, y in zip(new, old, strict=True)]
        kept = [max(x, -0.3) if a < 0 else min(x, 0.4) for x in d]
        ratio = math.exp(sum(kept[t] for t in trained) / max(1, len(trained)))
        expected -= ratio * a / 5 if trained else 0.0
        for t in range(len(mask)):
            free = bool(mask[t]) and kept[t] == d[t]
            clipped += bool(mask[t]) and not free
            slopes.append(-ratio * a / len(trained) / 5 if free else 0.0)
    total, gradients = total_loss(dict(loss="gmpo", clip_low=0.3, clip_high=0.4))
    assert total == pytest.approx(expected, rel=1e-6) and clipped > 10
    assert flat(gradients) == pytest.approx(slopes, rel=1e-6)


@given(rows)
def test_gmpo_of_one_token_is_clip_in_log_space(rows):
    """... whose bounds are exp(-low) and exp(high)."""
    new, old, A = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    mask, ids = torch.ones(len(A)).bool(), torch.arange(len(A))
    args = flags(loss="gmpo", clip_low=0.3, clip_high=0.4)
    clip = grpo_flags(clip_low=1 - math.exp(-0.3), clip_high=math.exp(0.4) - 1)
    found = []
    for loss in ("gmpo", "clip"):
        leaf = new.clone().requires_grad_()
        log_rho = leaf - old
        if loss == "gmpo":
            ratio = gspo.completion_log_ratio(log_rho, A, mask, ids, args)
            value = gspo.policy_loss(ratio, A, leaf, args)
        else:
            value = grpo.policy_loss(log_rho, A, leaf, clip)
        found.append((value, *torch.autograd.grad(value.sum(), leaf)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loss", ["gspo", "sequence_clip"])
def test_completions_of_one_token_have_the_loss_of_clip(loss):
    new, old = torch.tensor([-0.5, -2.0, -1.0]).double(), torch.tensor([-1.0, -1.0, -1.1]).double()
    A, mask, ids = torch.tensor([1.0, -2.0, 0.5]).double(), torch.ones(3).bool(), torch.arange(3)
    args = flags(loss=loss, clip_low=0.2, clip_high=0.3)
    ratio = gspo.completion_log_ratio(new - old, A, mask, ids, args)
    got = gspo.policy_loss(ratio, A, new, args)
    expected = grpo.policy_loss(new - old, A, new, grpo_flags(clip_low=0.2, clip_high=0.3))
    torch.testing.assert_close(got, expected)


def test_luspo_is_gspo_with_each_loss_times_its_length():
    """arXiv:2602.05261."""
    _, gspo_gradients = total_loss("gspo", drift=0.05)
    _, luspo_gradients = total_loss("gspo", "sequence_sum", drift=0.05)
    for mask, one, other in zip(MASKS, gspo_gradients, luspo_gradients, strict=True):
        assert other == pytest.approx([x * int(mask.sum()) for x in one], rel=1e-6)
    assert flat(gspo_gradients) != flat(luspo_gradients)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("reduction", ["sequence", "sequence_sum"])
def test_loss_and_gradient_do_not_depend_on_the_packing(loss, reduction):
    if reduction == "sequence_sum" and loss not in SUMS:
        with pytest.raises(ValueError, match="has no version times the length; use sequence"):
            total_loss(loss, reduction)
        return
    one = total_loss(loss, reduction, drift=0.1)
    many = total_loss(loss, reduction, drift=0.1, packs=MANY_PACKS)
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert flat(many[1]) == pytest.approx(flat(one[1]), rel=1e-6)
    masks = [trained for mask in MASKS for trained in mask.tolist()]
    assert all(g == 0 for g, trained in zip(flat(one[1]), masks, strict=True) if not trained)
    assert any(flat(one[1]))


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "topr", "vespo"])
def test_every_loss_has_the_gradient_of_reinforce_on_policy(loss):
    """The gradient of a mean log-prob on every token, averaged, is that of the mean over tokens."""
    _, expected = grpo_loss("reinforce", drift=0.0)
    assert flat(total_loss(loss, drift=0.0)[1]) == pytest.approx(flat(expected), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [1e4, 100.0, -100.0, -1e4])
def test_extreme_ratios_do_not_overflow(loss, advantage, log_ratio):
    """In float32 e^89 is infinite, and its product with an advantage or weight of 0 would be
    NaN."""
    logprobs = torch.tensor([-2.0 + min(log_ratio, 0.0)], requires_grad=True)
    A, mask, ids = torch.tensor([advantage]), torch.tensor([True]), torch.tensor([0])
    args = flags(**dict(loss=loss) | LOSSES[loss])
    log_rho = logprobs - (logprobs.detach() - log_ratio)
    ratio = gspo.completion_log_ratio(log_rho, A, mask, ids, args)
    value = gspo.policy_loss(ratio, A, logprobs, args)
    (slope,) = torch.autograd.grad(value.sum(), logprobs)
    assert value.isfinite().all() and slope.isfinite().all()
    assert advantage or (value, slope) == (0, 0)


@pytest.mark.parametrize("loss", ["gspo", "dual_clip", "sequence_clip", "gmpo"])
def test_stopped_tokens_are_those_without_gradient(loss):
    args = flags(**dict(loss=loss) | LOSSES[loss])
    new, old = make_logprobs(0.5)
    lengths = torch.tensor([len(mask) for mask in MASKS])
    ids, mask = torch.arange(len(MASKS)).repeat_interleave(lengths), torch.cat(MASKS)
    A = torch.tensor(ADVANTAGES).repeat_interleave(lengths)
    new, old = torch.cat(new), torch.cat(old)
    zeros, one = torch.zeros_like(new), torch.tensor(1)
    share, logged = gspo.loss(new, old, old, None, zeros, A, mask, ids, one, one, args)
    (slopes,) = torch.autograd.grad(share.sum(), new)
    stopped = logged["clip_ratio/region_mean"]
    moves = mask & (A != 0)
    assert (slopes == 0)[moves].equal(stopped[moves]) and stopped[moves].any()
    assert not stopped[A == 0].any()


def test_engine_correction_multiplies_the_policy_loss_but_not_the_kl():
    """The weight of a completion is that of all its tokens."""
    logprobs, ids = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.tensor([0, 0, 1])
    advantages, ratios = torch.tensor([1.0, 1.0, -2.0]).double(), torch.tensor([2.0, 1.5, 0.25])
    args = flags(correction="sequence", correction_high=2.5, beta=0.3, kl_estimator="k2")
    share_T, _ = gspo.loss(
        logprobs, logprobs, logprobs - ratios.double().log(), logprobs - 1, torch.zeros(3),
        advantages, ids >= 0, ids, torch.tensor(3), torch.tensor(2), args,
    )  # fmt: skip
    assert share_T.sum().item() == pytest.approx((-2.5 * 1.0 + 0.25 * 2.0) / 2 + 0.3 / 2)


def test_default_bounds_are_those_of_the_loss():
    found = {loss: (flags(loss=loss).clip_low, flags(loss=loss).clip_high) for loss in gspo.LOSSES}
    assert found == dict(gspo=(3e-4, 4e-4), sequence_clip=(0.2, 0.2), gmpo=(0.4, 0.4),
                         topr=(None, None), vespo=(None, None))  # fmt: skip


@pytest.mark.parametrize("name", gspo.Args.PRESETS)
def test_presets_have_a_finite_objective(name):
    total, _ = total_loss(
        {key: x for key, x in gspo.Args.PRESETS[name].items() if key != "reduction"},
        gspo.Args.PRESETS[name]["reduction"],
    )
    assert math.isfinite(total)


def test_advantages_equal_those_of_grpo():
    rewards = torch.tensor([[1.0, 0, 0.5, math.nan], [2, 2, 2, 2], [0, 0, 0, 3]]).double()
    for name in ("group", "group_mean", "leave_one_out"):
        expected = grpo.advantages(name, rewards, rewards[None], [1.0])
        assert torch.equal(gspo.advantages(name, rewards), expected)


# ---- whole runs ----


@pytest.mark.slow
def test_gradient_does_not_depend_on_ranks(main, small, sums, tmp_path):
    """With clipped tokens, weights of whole completions, a KL term and an entropy bonus."""
    (tmp_path / "reward.py").write_text(REWARD)
    flags = (
        *small, "--dataset", sums, "--reward", f"{tmp_path / 'reward.py'}:digits", "--loss", "gmpo",
        "--clip_low", 0.001, "--clip_high", 0.001, "--beta", 0.05, "--entropy_coef", 0.01,
        "--prompts_per_step", 4, "--samples_per_prompt", 4, "--minibatches", 2, "--lr", 1e-4,
        "--max_new_tokens", 12, "--max_steps", 2, "--eval_every", 0,
        "--engine", "transformers",
    )  # fmt: skip
    run(2, "gspo.py", *flags, "--output_dir", tmp_path / "two")
    main("gspo", *flags, "--pack_tokens", 40, "--output_dir", tmp_path / "one")
    assert samples(tmp_path / "two") == samples(tmp_path / "one")
    assert_close_metrics(tmp_path / "two", tmp_path / "one", ("loss", "kl"), rel=1e-4, floor=0.1)
    assert_close_metrics(tmp_path / "two", tmp_path / "one", SAME, rel=1e-4)
    assert any(line["clip_ratio/region_mean"] > 0 for line in metrics(tmp_path / "one"))
