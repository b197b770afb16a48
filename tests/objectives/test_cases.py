"""One case a test: the mistakes that people make in the objectives of the scripts, each with a test
that names it. course/exercises/ marks solutions with them."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import samples_of, tiny_tokenizer
from naive import double, tokens
from test_grpo_objective import weights_of

import dpo
import grpo
import kto
import ppo
import rloo
import rm
import sft
from common.config.groups import BaseArgs
from common.metrics.moments import moments
from common.model.logprobs import statistics as token_statistics
from common.objectives.advantages import gae
from common.objectives.divergence import forward_kl, reverse_kl
from common.objectives.importance import Correction, importance_weights
from common.objectives.kl import kl_estimate
from common.objectives.preference import Pairs, preference_loss
from common.objectives.reduction import sequence_mean
from common.packs.packing import count_trained, pack, pack_groups
from common.packs.sample import Sample
from common.parallel import distributed
from common.text.encode import Encoder

CPU, NAN = torch.device("cpu"), math.nan


def gradient(function, *xs):
    """Return the gradient of the sum of `function` with respect to its first argument, as a
    list."""
    x = double(xs[0]).requires_grad_()
    return torch.autograd.grad(function(x, *xs[1:]).sum(), x)[0].tolist()


# ---- rows: text -> token ids and their mask ----


@pytest.fixture
def row():
    """Return (token, trained) of each token of `1+1=2`."""
    tokenizer = tiny_tokenizer()
    encoder = Encoder(tokenizer, BaseArgs(prompt_format="plain"))
    (sample,) = encoder.sft(
        dict(prompt="1+1=", completion="2", _source="rows:1"), ("prompt", "completion")
    )
    return list(zip(tokenizer.convert_ids_to_tokens([*sample.ids]), sample.loss_mask, strict=True))


def test_row_ends_with_eos(row):
    assert row[-1][0] == "<|eos|>"


def test_eos_is_trained(row):
    assert all(trained for token, trained in row if token == "<|eos|>")


def test_prompt_of_a_row_is_not_trained(row):
    assert not any(trained for token, trained in row if token in "1+=") and dict(row)["2"]


# ---- log-probs and entropies of logits ----


def statistics_of(logits, targets):
    return token_statistics(double(logits), torch.tensor(targets))


def test_logprob_is_that_of_the_target():
    logp_C = statistics_of([[0.0, 2.0], [0.0, 2.0]], [0, 1])[0]
    assert (logp_C[1] - logp_C[0]).item() == pytest.approx(2)


def test_probabilities_of_all_targets_add_up_to_1():
    logp_C = statistics_of([[0.3, -1.0, 2.0]] * 3, [0, 1, 2])[0]
    assert logp_C.exp().sum().item() == pytest.approx(1)


def test_large_logits_have_finite_logprobs():
    logp_C = statistics_of([[5000.0, 5001.0], [-5000.0, -5001.0]], [0, 0])[0]
    assert logp_C.tolist() == pytest.approx([-math.log1p(math.e), -math.log1p(1 / math.e)])


def test_entropy_does_not_depend_on_the_target():
    one, other = statistics_of([[0.3, -1.0, 2.0]] * 2, [0, 2])[1].tolist()
    assert one == pytest.approx(other)


def test_entropy_is_never_negative():
    assert (statistics_of([[0.0, gap] for gap in (0.5, 2.0, 5.0)], [0, 0, 0])[1] >= 0).all()


def test_entropy_is_at_most_log_V():
    assert statistics_of([[0.0, 0.0, 1.0]], [0])[1].item() < math.log(3)


# ---- losses and weights of tokens ----


def test_sft_losses_fall_as_the_target_becomes_likelier():
    for name in ("nll", "dft"):
        assert max(gradient(lambda x, n=name: sft.loss(n, x), [-0.5, -0.1])) < 0


def test_dft_weighs_likely_tokens_more():
    unlikely, likely = gradient(lambda x: sft.loss("dft", x), [-5.0, -0.01])
    assert abs(unlikely) < abs(likely)


def test_dft_weight_has_no_gradient():
    assert gradient(lambda x: sft.loss("dft", x), [math.log(0.25)]) == pytest.approx([-0.25])


# Prompts of two tokens and 3, 1 and 0 trained ones.
SAMPLES = [Sample([0] * (2 + n), [False] * 2 + [True] * n) for n in (3, 1)] + [
    Sample([0] * 4, [False] * 4)
]


def test_denominators_count_trained_tokens_only():
    assert count_trained(pack(SAMPLES, 100, CPU))[0] == 4


def test_denominators_are_at_least_1():
    assert [int(x) for x in count_trained(pack(SAMPLES[2:], 100, CPU))] == [1, 1]


def test_denominators_count_all_ranks(monkeypatch):
    """Two ranks have the same samples."""
    monkeypatch.setattr(distributed, "all_sum", lambda x: 2 * torch.as_tensor(x))
    assert [int(x) for x in count_trained(pack(SAMPLES, 100, CPU))] == [8, 4]


def weights(reduction, samples, pack_tokens=100):
    """Return the sum of the weights of each sample in its loss, of `samples` in micro-batches, by
    number of tokens."""
    masks, found = [s.loss_mask for s in samples], {}
    counts = torch.tensor(sum(map(sum, masks))), torch.tensor(sum(map(any, masks)))
    for mb in pack(samples, pack_tokens, CPU):
        of_samples = mb.sequence_sums(weights_of(mb, reduction, *counts)).tolist()
        found |= {len(s.ids): w for s, w in zip(samples_of(mb), of_samples, strict=True)}
    return found


@pytest.mark.parametrize("pack_tokens", [100, 4])
def test_token_mean_is_one_mean_over_all_micro_batches(pack_tokens):
    assert weights("token", SAMPLES[:2], pack_tokens) == pytest.approx({5: 3 / 4, 3: 1 / 4})


def test_sequence_mean_counts_no_prompt():
    assert weights("sequence", SAMPLES[:2]) == pytest.approx({5: 1 / 2, 3: 1 / 2})


def test_masked_completion_has_weight_0():
    assert all(
        weights(name, SAMPLES)[4] == 0 for name in ("token", "sequence", "sequence_sum", "constant")
    )


def test_constant_reduction_is_a_mean_over_completions():
    one, two = weights("constant", SAMPLES[:1]), weights("constant", SAMPLES[:2])
    assert two[5] == pytest.approx(one[5] / 2)


def test_sequence_mean_divides_by_the_trained_tokens():
    mask_T = torch.tensor([False, True, True])
    assert sequence_mean(double([9, 1, 3]), mask_T, torch.zeros(3).long()).tolist() == [2, 2, 2]


def test_sequence_mean_ignores_other_sequences():
    mask_T = torch.ones(3).bool()
    assert sequence_mean(double([1, 3, 9]), mask_T, torch.tensor([0, 0, 1])).tolist() == [2, 2, 9]


# ---- preferences ----


def test_reward_loss_falls_as_the_chosen_reward_rises():
    by_chosen = gradient(rm.loss, [0.0], double([0.0]))
    by_rejected = gradient(lambda r, c: rm.loss(c, r), [0.0], double([0.0]))
    assert by_chosen < [0] < by_rejected


def test_margin_asks_for_a_larger_difference():
    assert rm.loss(double([1.0]), double([0.0]), 1.0).item() == pytest.approx(math.log(2))


def test_reward_loss_of_a_confident_mistake_is_finite():
    assert rm.loss(double([-1e4]), double([1e4])).tolist() == [2e4]


def pair(chosen, rejected, ref_chosen=0.0, ref_rejected=0.0, lengths=(1, 1)):
    """Return one pair, from log-probs of completions."""
    return Pairs(*(double([x]) for x in (chosen, rejected, ref_chosen, ref_rejected, *lengths)))


def dpo_loss(pairs, **flags):
    return dpo.loss(pairs, dpo.Args(beta=0.5, **flags))[0].item()


def test_dpo_is_ln_2_at_the_reference():
    assert dpo_loss(pair(-3.0, -7.0, -3.0, -7.0)) == pytest.approx(math.log(2))


def test_dpo_does_not_depend_on_lengths():
    assert dpo_loss(pair(-3.0, -7.0, -4.0, -5.0, (2, 9))) == pytest.approx(
        dpo_loss(pair(-3.0, -7.0, -4.0, -5.0))
    )


def test_smoothing_of_a_half_ignores_the_labels():
    """With the largest smoothing that is allowed, a swap of the sides changes almost nothing."""
    right, wrong = (
        dpo.loss(x, SimpleNamespace(**DPO, label_smoothing=0.5))[0]
        for x in (pair(-3, -7), pair(-7, -3))
    )
    assert right.item() == pytest.approx(wrong.item())


DPO = dict(loss=("sigmoid",), loss_weights=None, f_divergence="reverse_kl", beta=0.5)


def test_chosen_and_rejected_are_neighbours_in_a_pack():
    samples = [Sample([0] * (2 + n), [False] * 2 + [True] * n) for n in (1, 2, 3, 4)]
    (mb,) = pack_groups([samples[:2], samples[2:]], 100, CPU)
    ref_P2 = torch.arange(4.0).view(2, 2)
    pairs = dpo.make_pairs(mb, -torch.ones(len(mb.targets_T)), ref_P2)
    columns = zip(*(x.tolist() for x in vars(pairs).values()), strict=True)
    assert sorted(columns) == [(-3, -4, 2, 3, 3, 4), (-1, -2, 0, 1, 1, 2)]


def ipo(pairs):
    rest = dict(label_smoothing=0.0, f_divergence="reverse_kl")
    return preference_loss("ipo", pairs, beta=0.25, **rest).item()


def test_ipo_is_zero_at_its_target():
    assert ipo(pair(1.0, -1.0)) == 0  # 1 / (2 beta) is 2


def test_ipo_compares_log_ratios_per_token():
    assert ipo(pair(4.0, -3.0, lengths=(4, 3))) == 0


def test_ipo_quadruples_at_twice_the_distance():
    assert ipo(pair(5.0, -1.0)) == pytest.approx(4 * ipo(pair(3.0, -1.0)))


KTO = SimpleNamespace(beta=0.5, desirable_weight=3.0, undesirable_weight=1.0)


def test_kto_is_half_the_weight_at_the_baseline():
    loss = kto.loss(double([2.0, 2.0]), torch.tensor([True, False]), 2.0, KTO)
    assert sorted(loss.tolist()) == [0.5, 1.5]


def test_kto_raises_desirable_completions_and_lowers_others():
    desirable, other = gradient(
        lambda x: kto.loss(x, torch.tensor([True, False]), 0.5, KTO), [0.1, 0.2]
    )
    assert desirable < 0 < other


def test_kto_weights_belong_to_their_labels():
    """The loss of a hopeless completion is its weight."""
    loss = kto.loss(double([-1e4, 1e4]), torch.tensor([True, False]), 0.0, KTO)
    assert loss.tolist() == [3, 1]


def kto_baseline(logps, ref_logps):
    """Return z0 of completions with one trained token each."""
    samples = [Sample([0, 0], [False, True]) for _ in logps]
    (mb,) = pack(samples, 100, CPU)
    mb.shape_of_samples = (len(ref_logps),)  # of all ranks
    return kto.kl_baseline(lambda mb: (double(logps)[mb.index_N],), [mb], double(ref_logps)).item()


def test_kto_baseline_is_relative_to_the_reference():
    assert kto_baseline([-1.0, -2.0], [-3.0, -3.0]) == 1.5


def test_kto_baseline_is_not_below_0():
    assert kto_baseline([-3.0, -3.0], [-1.0, -2.0]) == 0


def test_kto_baseline_bounds_the_mean_not_each_number():
    assert kto_baseline([-1.0, -3.0], [-3.0, -2.0]) == 0.5


def test_kto_baseline_is_that_of_all_ranks(monkeypatch):
    """A second rank has the other two mismatches, with log-ratios of 3 and 3."""
    monkeypatch.setattr(distributed, "all_sum", lambda x: x + 6)
    assert kto_baseline([-1.0, -1.0], [-2.0, -2.0, -4.0, -4.0]) == 2


# ---- groups ----


def group(rewards):
    return grpo.advantages(double(rewards))


def test_group_std_divides_by_n_minus_1():
    assert group([[1.0, 0.0]])[0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


def test_equal_rewards_have_no_group_advantage():
    assert group([[1.0, 1.0, 1.0]]).tolist() == [[0, 0, 0]]


def test_leave_one_out_of_two_is_their_difference():
    assert rloo.advantages(double([[1.0, 0.0]])).tolist() == [[1, -1]]


def test_leave_one_out_ignores_missing_rewards():
    assert rloo.advantages(double([[1.0, NAN, 0.0]])).tolist() == [[1, 0, -1]]


def test_lone_reward_has_no_advantage():
    assert rloo.advantages(double([[1.0], [NAN]])).tolist() == [[0], [0]]


def moments_of(*packs):
    """Return mean and deviation of the numbers of packs; one more is not trained."""
    rows = (double([99.0, *numbers]) for numbers in packs)
    mbs = [SimpleNamespace(x_T=x_T, loss_mask_T=torch.arange(len(x_T)) > 0) for x_T in rows]
    return moments([mbs], lambda mb: mb.x_T)


def test_moments_are_over_tokens_not_packs():
    assert moments_of([1, 1, 1], [5])[0] == 2


def test_moments_have_a_sample_standard_deviation():
    assert moments_of([1, 2], [6]) == pytest.approx((3, 7**0.5)) and moments_of([4]) == (4, 0)


def test_moments_are_those_of_all_ranks(monkeypatch):
    """Two more ranks have the same tokens."""
    monkeypatch.setattr(distributed, "all_sum", lambda x: 3 * x)
    assert moments_of([1, 2], [6]) == pytest.approx((3, (42 / 8) ** 0.5))


# ---- ratios and clipping ----


def clip(rho, A):
    """Return loss and gradient by log rho of one token."""
    log_rho = double([rho]).log().requires_grad_()
    x = tokens(log_rho, double([0.0]), double([A]), 0.2, 0.3)
    loss = grpo.clip(x).loss_T
    return loss.item(), torch.autograd.grad(loss, log_rho)[0].item() if loss.requires_grad else 0.0


@pytest.mark.parametrize("A", [2.0, -2.0])
def test_clip_loss_has_the_gradient_of_rho_A_within_the_bounds(A):
    assert clip(1.1, A) == pytest.approx((-1.1 * A, -1.1 * A))


@pytest.mark.parametrize(("rho", "A", "bound"), [(1.5, 2.0, 1.3), (0.5, -2.0, 0.8)])
def test_clip_stops_a_ratio_that_moved_the_right_way(rho, A, bound):
    assert clip(rho, A) == pytest.approx((-bound * A, 0))


@pytest.mark.parametrize(("rho", "A"), [(0.5, 2.0), (1.5, -2.0)])
def test_clip_pulls_back_a_ratio_that_moved_the_wrong_way(rho, A):
    assert clip(rho, A) == pytest.approx((-rho * A, -rho * A))


# ---- KL ----


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_0_for_equal_policies(estimator):
    assert kl_estimate(double([-2.0]), double([-2.0]), estimator).item() == 0


def test_k1_is_positive_where_the_policy_is_likelier():
    assert kl_estimate(double([-1.0]), double([-3.0]), "k1").item() == 2


def test_k2_and_k3_agree_near_0():
    two, three = (
        kl_estimate(double([-1.0]), double([-1.001]), name).item() for name in ("k2", "k3")
    )
    assert two == pytest.approx(three, rel=1e-2)


# ---- values ----


def gae_of(rewards, values, gamma, lam):
    one_T = torch.ones(len(rewards))
    where = one_T.bool(), (0 * one_T).long()
    return gae(double(rewards), double(values), *where, lam, gamma).tolist()


def test_gae_with_lambda_0_is_the_error_of_one_step():
    assert gae_of([1.0, 8.0], [4.0, 8.0], 0.5, 0.0)[0] == 1 + 0.5 * 8 - 4


def test_gae_of_the_last_token_is_its_reward_minus_its_value():
    assert gae_of([0.0, 3.0], [5.0, 1.0], 0.5, 0.5)[1] == 3 - 1


def test_gae_decays_later_errors_by_gamma_lambda():
    assert gae_of([0.0, 0.0, 1.0], [0.0, 0.0, 0.0], 0.5, 0.5) == [1 / 16, 1 / 4, 1]


def test_value_loss_is_half_the_squared_error():
    assert ppo.value_loss(double([1.0]), double([0.9]), double([4.0])).item() == 4.5


@pytest.mark.parametrize("target", [-2.0, 0.5, 3.0])
def test_value_clip_never_lowers_the_loss(target):
    """The value has moved by 1; the clip is 0.2."""
    clipped = ppo.value_loss(double([1.0]), double([0.0]), double([target])).item()
    assert clipped >= (1 - target) ** 2 / 2


# ---- off-policy ----


def importance(log_ratio):
    mask_T, ids_T = torch.ones(len(log_ratio)).bool(), torch.arange(len(log_ratio))
    correction = Correction("token", 4.0)
    return importance_weights(log_ratio, 0 * log_ratio, mask_T, ids_T, correction)


def test_importance_weight_is_above_1_where_the_trainer_is_likelier():
    assert importance(double([1.0])).item() == pytest.approx(math.e)


def test_importance_weight_has_an_upper_bound_only():
    assert importance(double([0.1, 9.0]).log()).tolist() == pytest.approx([0.1, 4])


# ---- divergences ----

STUDENT = double([[0.0, 1.0, -1.0]]).log_softmax(-1)
TEACHER = double([[1.0, 0.5, -3.0]]).log_softmax(-1)
SURE = double([[0.0, -1e3, -1e3]]).log_softmax(-1)  # of one token


@pytest.mark.parametrize("divergence", [reverse_kl, forward_kl])
def test_divergences_are_never_negative(divergence):
    assert divergence(STUDENT, TEACHER)[0] > 0 < divergence(TEACHER, STUDENT)[0]


def test_reverse_kl_is_a_mean_over_the_student():
    """A student that always writes one token pays for this token only."""
    assert reverse_kl(SURE, TEACHER)[0].item() == pytest.approx(-TEACHER[0, 0].item())


def test_forward_kl_is_a_mean_over_the_teacher():
    assert forward_kl(STUDENT, SURE)[0].item() == pytest.approx(-STUDENT[0, 0].item())
