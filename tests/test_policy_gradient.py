"""The policy-gradient family: variants agree where theory says so, flags reach what they name, and known traps.

The scripts' own functions on samples whose log-probs are random numbers: no model, no engine.
"""

import dataclasses
import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import ROOT

import grpo
import ppo
import rloo
from common import distributed, losses, online
from common.advantages import gae
from common.losses import clip_policy_loss
from common.metrics import Meter
from common.packing import PackedBatch, Sample, pack

CPU, NAN = torch.device("cpu"), float("nan")
LENGTHS = (5, 30, 1, 12, 20, 7)  # of the completions; prompts have 3 tokens
WHOLE = dict(reduction="sequence", correction="sequence")  # what losses of whole completions ask for
ADVANTAGES = (1.5, -0.7, 0.0, -2.0, 0.4, -1.1)


def make_samples() -> list[Sample]:
    """A tool's output in the middle of the fourth; the last is not trained at all."""
    samples = []
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):
        mask = [False] * 3 + [True] * length
        samples.append(Sample([1] * (3 + length), mask, advantage=advantage, prompt_length=3))
    samples[3].loss_mask[6:9] = [False] * 3
    samples[5].loss_mask = [False] * len(samples[5].ids)
    return samples


def make_logprobs(samples, drift: float, seed: int = 3) -> tuple[list, list]:
    """Per sample: log-probs of its targets by the policy, with gradient, and those by the old policy. With this seed
    whole completions leave the clip bounds on both sides, and one with a negative advantage has become likelier."""
    generator = torch.Generator().manual_seed(seed)
    new, old = [], []
    for sample in samples:
        new.append((-3 * torch.rand(sample.num_targets, generator=generator, dtype=torch.float64)).requires_grad_())
        old.append(new[-1].detach() + drift * torch.randn(sample.num_targets, generator=generator, dtype=torch.float64))
    return new, old


def micro_batches(samples, old, pack_tokens: int = 8192, filler: bool = False) -> list[PackedBatch]:
    out = pack(samples, pack_tokens, CPU)
    for mb in out:
        mb.advantages_T = mb.per_token(mb.per_sequence(sample.advantage for sample in mb.samples))
    if filler:
        out += pack([], pack_tokens, CPU)
        out[-1].advantages_T = torch.ones(1)
    for mb in out:
        mb.old_logprobs_T = stream(mb, samples, old)
    return out


def stream(mb: PackedBatch, samples, values) -> torch.Tensor:
    """Per-sample tensors as the stream of a pack, which has its own order."""
    of = {id(sample): value for sample, value in zip(samples, values, strict=True)}
    return torch.cat([of[id(sample)] for sample in mb.samples] or [torch.zeros(1, dtype=torch.float64)])


def total_loss(args, pack_tokens: int, drift: float = 0.5, filler: bool = False) -> tuple[float, list[list[float]]]:
    """Loss of the global minibatch as grpo.py adds it up, and its gradient with respect to every sample's log-probs."""
    samples = make_samples()
    new, old = make_logprobs(samples, drift)
    packs = micro_batches(samples, old, pack_tokens, filler)
    tokens, sequences = sum(mb.loss_mask_T.sum() for mb in packs), torch.tensor(sum(any(s.loss_mask) for s in samples))
    total = 0.0
    for mb in packs:
        loss_T = grpo.policy_loss(Meter(), args, mb, stream(mb, samples, new))
        counts_T = losses.reduction_weights(mb, args.reduction, tokens, sequences, args.max_new_tokens)
        total += (loss_T * counts_T).sum()
    gradients = torch.autograd.grad(total, new, materialize_grads=True)
    return total.item(), [g.tolist() for g in gradients]


def flat(gradients) -> list[float]:
    return [x for gradient in gradients for x in gradient]


# ---- one gradient whatever the packing ----

TOKEN_LOSSES = ("clip", "reinforce", "cispo", "sapo", "topr")
EVERY_LOSS = [
    *itertools.product(TOKEN_LOSSES, ("token", "sequence", "sequence_sum", "constant")),
    ("gspo", "sequence"), ("sequence_clip", "sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "reduction"), EVERY_LOSS)
def test_loss_and_gradient_do_not_depend_on_the_packing(loss, reduction):
    args = grpo.Args(loss=loss, reduction=reduction, correction="sequence")
    one, many = total_loss(args, 8192), total_loss(args, 40, filler=True)
    assert many[0] == pytest.approx(one[0], rel=1e-6)
    assert flat(many[1]) == pytest.approx(flat(one[1]), rel=1e-6)
    masks = [trained for s in make_samples() for trained in s.loss_mask[1:]]
    assert all(gradient == 0 for gradient, trained in zip(flat(one[1]), masks, strict=True) if not trained)
    assert any(gradient != 0 for gradient in flat(one[1]))


def test_forty_tokens_are_several_packs_in_another_order():
    """What the test above relies on."""
    samples = make_samples()
    packs = pack(samples, 40, CPU)
    assert len(packs) > 2 and [id(s) for mb in packs for s in mb.samples] != [id(s) for s in samples]


@pytest.mark.parametrize("loss", ["gspo", "sequence_clip"])
def test_losses_of_whole_completions_equal_naive_ones(loss):
    """arXiv:2507.18071 Eq. 5, and RLOO's: one ratio per completion, the mean over completions."""
    args = grpo.Args(loss=loss, **WHOLE, clip_low=0.002, clip_high=0.003)
    samples = make_samples()
    expected, slopes, clipped = 0.0, [], 0
    for sample, new, old, a in zip(samples, *make_logprobs(samples, 0.05), ADVANTAGES, strict=True):
        trained = [t for t in range(sample.num_targets) if sample.loss_mask[t + 1]]
        power = 1 / max(1, len(trained)) if loss == "gspo" else 1.0
        ratio = math.exp(power * sum((new[t] - old[t]).item() for t in trained))
        outside = bool(trained) and ((ratio > 1.003 and a > 0) or (ratio < 0.998 and a < 0))
        clipped += outside
        if trained:  # five samples have trained tokens
            expected -= min(ratio * a, min(max(ratio, 0.998), 1.003) * a) / 5
        slope = 0.0 if outside else -ratio * a * power / 5
        slopes += [slope if t in trained else 0.0 for t in range(sample.num_targets)]
    total, gradients = total_loss(args, 8192, drift=0.05)
    assert 0 < clipped < 5
    assert total == pytest.approx(expected, rel=1e-6) and flat(gradients) == pytest.approx(slopes, rel=1e-6)


def test_topr_weighs_a_token_by_the_whole_completion():
    args = grpo.Args(loss="topr", reduction="sequence_sum")
    samples = make_samples()
    expected = []
    for sample, new, old, a in zip(samples, *make_logprobs(samples, 0.5), ADVANTAGES, strict=True):
        trained = [t for t in range(sample.num_targets) if sample.loss_mask[t + 1]]
        weight = 1.0 if a >= 0 else min(1.0, math.exp(sum((new[t] - old[t]).item() for t in trained)))
        expected += [-weight * a / 5 if t in trained else 0.0 for t in range(sample.num_targets)]
    assert flat(total_loss(args, 8192)[1]) == pytest.approx(expected, rel=1e-6)


def test_measured_clipping_is_the_fraction_of_trained_tokens_without_gradient():
    (mb,) = pack([Sample([0] * 10, [False] * 4 + [True] * 6, prompt_length=4)], 100, CPU)
    new = torch.tensor([9.0, 9, 9, 1.29, 1.27, 0.79, 0.81, 1.29, 0.79]).double().log().requires_grad_()
    mb.old_logprobs_T, mb.advantages_T = torch.zeros(9), torch.tensor([1.0, 1, 1, 1, 1, -1, -1, -1, 1])
    meter = Meter()
    loss_T = grpo.policy_loss(meter, grpo.Args(), mb, new) * mb.loss_mask_T
    (gradient,) = torch.autograd.grad(loss_T.sum(), new)
    without = ((gradient == 0) & mb.loss_mask_T).sum().item()
    assert without == 2 and meter.reduce()["clip_ratio/region_mean"] == pytest.approx(without / 6)


# ---- variants agree where theory says so ----


@pytest.mark.parametrize("loss", ["clip", "cispo", "sapo", "topr", "gspo"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss):
    """Of gspo too: the gradient of a mean log-prob on every token, averaged, is that of the tokens' mean."""
    _, expected = total_loss(grpo.Args(loss="reinforce", reduction="sequence"), 8192, drift=0.0)
    _, got = total_loss(grpo.Args(loss=loss, **WHOLE), 8192, drift=0.0)
    assert flat(got) == pytest.approx(flat(expected), rel=1e-6)


def test_on_policy_sequence_clip_has_the_gradient_of_reinforce_with_sums():
    _, expected = total_loss(grpo.Args(loss="reinforce", reduction="sequence_sum"), 8192, drift=0.0)
    _, got = total_loss(grpo.Args(loss="sequence_clip", **WHOLE), 8192, drift=0.0)
    assert flat(got) == pytest.approx(flat(expected), rel=1e-6)


def test_sapo_with_a_cold_gate_is_the_unclipped_ratio():
    """4 / tau (sigmoid(tau (r - 1)) - 1 / 2) -> r - 1 as tau -> 0."""
    cold = dict(loss="sapo", sapo_tau_positive=1e-3, sapo_tau_negative=1e-3)
    _, expected = total_loss(grpo.Args(clip_low=0.999, clip_high=1e9), 8192)
    _, got = total_loss(grpo.Args(**cold), 8192)
    assert flat(got) == pytest.approx(flat(expected), rel=1e-3)


def test_topr_of_good_completions_is_reinforce_however_far_off_policy():
    good = [i for i, advantage in enumerate(ADVANTAGES) if advantage > 0]
    (_, reinforce), (_, topr) = (total_loss(grpo.Args(loss=loss), 8192, drift=3.0) for loss in ("reinforce", "topr"))
    assert [topr[i] for i in good] == [reinforce[i] for i in good] and topr != reinforce


def test_constant_is_the_sum_divided_by_the_longest_completion():
    (sums, _), (constant, _) = (total_loss(grpo.Args(reduction=r), 8192) for r in ("sequence_sum", "constant"))
    assert constant == pytest.approx(sums / 256, rel=1e-6)


def test_rloo_of_whole_completions_is_sequence_clip():
    samples = make_samples()[:5]
    new, old = make_logprobs(samples, 0.05)
    (mb,) = micro_batches(samples, old)
    logps_N, old_N = mb.sequence_sums(stream(mb, samples, new)), mb.sequence_sums(mb.old_logprobs_T)
    expected = clip_policy_loss(logps_N, old_N, mb.per_sequence(s.advantage for s in mb.samples), 0.2, 0.28).mean()
    got_T = grpo.policy_loss(Meter(), grpo.Args(loss="sequence_clip", **WHOLE), mb, stream(mb, samples, new))
    counts_T = losses.reduction_weights(mb, "sequence", mb.loss_mask_T.sum(), torch.tensor(5), 256)
    torch.testing.assert_close((got_T * counts_T).sum(), expected, rtol=1e-6, atol=0)


# ---- PPO ----


def ppo_batch(seed: int = 0) -> tuple[PackedBatch, torch.Tensor]:
    """A pack with random values, and rewards with a score at the end of every completion."""
    samples, generator = make_samples(), torch.Generator().manual_seed(seed)
    (mb,) = pack(samples, 8192, CPU)
    mb.values_T = torch.randn(len(mb.targets_T), generator=generator)
    rewards_T = 0.1 * torch.randn(len(mb.targets_T), generator=generator)
    rewards_T[mb.ends_N] += mb.per_sequence(s.advantage for s in mb.samples).float()
    return mb, rewards_T


def test_without_values_and_discount_ppo_is_reinforce_with_the_score():
    samples = make_samples()
    new, old = make_logprobs(samples, 0.0)
    (mb,) = micro_batches(samples, old)
    mb.values_T = torch.zeros(len(mb.targets_T))
    rewards_T = torch.zeros_like(mb.values_T)
    rewards_T[mb.ends_N] = mb.per_sequence(s.advantage for s in mb.samples).float()
    advantages_T, returns_T = ppo.advantages_and_returns(ppo.Args(gae_lambda=1.0), mb, rewards_T)
    torch.testing.assert_close(advantages_T, mb.advantages_T * mb.loss_mask_T)
    torch.testing.assert_close(returns_T, advantages_T)
    logprobs_T = stream(mb, samples, new)
    loss_T = clip_policy_loss(logprobs_T, mb.old_logprobs_T, advantages_T, 0.2, 0.2) * mb.loss_mask_T
    gradient = torch.autograd.grad(loss_T.sum(), logprobs_T)[0]
    torch.testing.assert_close(gradient.float(), -mb.advantages_T * mb.loss_mask_T)


def test_policy_and_value_model_have_a_lambda_each():
    mb, rewards_T = ppo_batch()
    lengths_N = [sum(s.loss_mask) for s in mb.samples]

    def expected(lambdas):
        return gae(rewards_T, mb.values_T, mb.loss_mask_T, mb.sequence_ids_T, 0.9, torch.tensor(lambdas)).float()

    for flags, of_policy, of_value in (
        (dict(gae_lambda=0.7), [0.7] * 6, [0.7] * 6),
        (dict(gae_lambda=0.7, value_lambda=1.0), [0.7] * 6, [1.0] * 6),
        (dict(lambda_alpha=0.1), [1 - 1 / (0.1 * n) if n > 10 else 0.0 for n in lengths_N], [0.95] * 6),
    ):
        advantages_T, returns_T = ppo.advantages_and_returns(ppo.Args(gamma=0.9, **flags), mb, rewards_T)
        torch.testing.assert_close(advantages_T, expected(of_policy))
        torch.testing.assert_close(returns_T, expected(of_value) + mb.values_T)


def test_returns_with_lambda_1_are_what_was_still_to_come():
    mb, rewards_T = ppo_batch()
    _, returns_T = ppo.advantages_and_returns(ppo.Args(value_lambda=1.0), mb, rewards_T)
    for begin, end in itertools.pairwise(mb.offsets):
        trained = [t for t in range(begin, end) if mb.loss_mask_T[t]]
        for n, t in enumerate(trained):
            assert returns_T[t].item() == pytest.approx(rewards_T[trained[n:]].sum().item(), abs=1e-5)


def test_an_empty_pack_has_advantages_and_moments():
    (filler,) = pack([], 10, CPU)
    filler.values_T = torch.ones(1)
    advantages_T, returns_T = ppo.advantages_and_returns(ppo.Args(lambda_alpha=0.05), filler, torch.ones(1))
    assert advantages_T.tolist() == [0.0] and returns_T.shape == (1,)
    assert ppo.moments([filler], [torch.full((1,), NAN)]) == (0.0, 0.0)


def test_moments_are_of_the_trained_tokens_of_all_packs():
    (first,), (second,) = (pack([sample], 100, CPU) for sample in make_samples()[:2])
    xs = [torch.arange(len(mb.targets_T)).double() ** 2 for mb in (first, second)]
    flat_x = torch.cat([x[mb.loss_mask_T] for mb, x in zip((first, second), xs, strict=True)])
    expected = (flat_x.mean().item(), flat_x.std(correction=0).item())
    assert ppo.moments([first, second], xs) == pytest.approx(expected)


def test_measured_kl_and_clipping_are_of_the_trained_tokens():
    samples = make_samples()[:1]
    (mb,) = pack(samples, 100, CPU)
    mb.old_logprobs_T, mb.advantages_T = torch.full((7,), -1.0), torch.full((7,), samples[0].advantage)
    logprobs_T = torch.tensor([-9.0, -9.0, 0.0, -1.0, -1.5, -1.0, -1.0])  # ratio of 2.7 on the first trained token
    meter = Meter()
    moved = ppo.measure_update(meter, ppo.Args(), mb, logprobs_T, torch.ones(7))
    k3 = sum(math.exp(d) - 1 - d for d in (1.0, 0.0, -0.5, 0.0, 0.0))  # log(new / old): samples are of the old policy
    assert moved.item() == pytest.approx(k3, rel=1e-5)
    metrics = meter.reduce()
    assert metrics["policy/approx_kl"] == pytest.approx(k3 / 5, rel=1e-5)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(1 / 5)  # the advantage is positive: 0.6 is not clipped


# ---- flags reach what they name ----


def outcome(**flags):
    """Everything that reads loss flags, for far off-policy log-probs."""
    return total_loss(grpo.Args(**flags), 8192, drift=2.0)


@pytest.mark.parametrize(
    ("flags", "one", "other"),
    [
        ({}, dict(loss="clip"), dict(loss="reinforce")),
        *(({}, dict(loss=a), dict(loss=b)) for a, b in itertools.pairwise(TOKEN_LOSSES)),
        (WHOLE, dict(loss="gspo"), dict(loss="sequence_clip")),
        *(({}, dict(reduction=a), dict(reduction=b)) for a, b in
          itertools.pairwise(("token", "sequence", "sequence_sum", "constant"))),
        *((dict(loss=loss, **WHOLE), dict(dual_clip=0.0), dict(dual_clip=1.1))
          for loss in ("clip", "gspo", "sequence_clip")),
        *((dict(loss=loss, **WHOLE), {flag: 0.1}, {flag: 0.3})
          for loss in ("clip", "gspo", "sequence_clip") for flag in ("clip_low", "clip_high")),
        (dict(loss="cispo"), dict(cispo_high=1.0), dict(cispo_high=4.0)),
        (dict(loss="sapo"), dict(sapo_tau_positive=1.0), dict(sapo_tau_positive=2.0)),
        (dict(loss="sapo"), dict(sapo_tau_negative=1.0), dict(sapo_tau_negative=2.0)),
        (dict(reduction="constant"), dict(max_new_tokens=128), dict(max_new_tokens=256)),
    ],
)  # fmt: skip
def test_a_flag_of_the_loss_changes_it(flags, one, other):
    assert outcome(**flags, **one)[0] != pytest.approx(outcome(**flags, **other)[0], rel=1e-6)


@pytest.mark.parametrize("loss", ["clip", "sapo"])
def test_the_two_directions_have_a_flag_each(loss):
    """What is for positive advantages leaves the gradient of negative ones as it is."""
    positive, negative = dict(clip=("clip_high", "clip_low"), sapo=("sapo_tau_positive", "sapo_tau_negative"))[loss]
    _, base = outcome(loss=loss)
    for flag, sign in ((positive, 1), (negative, -1)):
        _, changed = outcome(loss=loss, **{flag: 0.6})
        moved = {math.copysign(1, a) for a, x, y in zip(ADVANTAGES, base, changed, strict=True) if x != y}
        assert moved == {sign}


REWARDS = torch.tensor([[1.0, 0, 0, 3], [2, 2, 1, 0], [0, 0, 0, 0]]).double()
PARTS = [REWARDS / 2, REWARDS.flip(1)]
TOKENS = torch.tensor([[4.0, 9, 2, 1], [8, 3, 1, 1], [5, 5, 5, 5]]).double()


def test_every_advantage_is_another_one():
    names = grpo.Args.__annotations__["advantage"].__args__
    parts = torch.stack([*PARTS, -TOKENS])
    got = {n: grpo.completion_advantages(grpo.Args(advantage=n), REWARDS, parts, [1.0] * 3, TOKENS) for n in names}
    for one, other in itertools.combinations(names, 2):
        assert not torch.allclose(got[one], got[other], rtol=1e-3), (one, other)
    zero = [name for name in names if (got[name][2].abs() < 1e-9).all()]
    assert zero == [name for name in names if name not in ("reinforce++", "reinforce++_baseline")]


def test_gdpo_gives_nothing_to_a_completion_whose_reward_could_not_be_computed():
    rewards, parts = REWARDS.clone(), torch.stack([*PARTS, -TOKENS])
    rewards[0, 1] = math.nan  # although all its parts but one are there
    args = grpo.Args(advantage="gdpo")
    got = grpo.completion_advantages(args, rewards, parts, [1.0] * 3, TOKENS)
    parts[:, 0, 1] = 7.0  # and those count in no statistic
    again = grpo.completion_advantages(args, rewards, parts, [1.0] * 3, TOKENS)
    assert got[0, 1] == 0 and got[0, 0] != 0 and torch.equal(got, again)


def test_gdpo_weighs_the_rewards_and_has_the_penalties_as_one_more():
    def advantages(weights, penalties):
        return grpo.completion_advantages(
            grpo.Args(advantage="gdpo"), REWARDS, torch.stack([*PARTS, penalties]), [*weights, 1.0], TOKENS
        )

    none = torch.zeros_like(TOKENS)
    assert not torch.allclose(advantages((1.0, 3.0), none), advantages((3.0, 1.0), none))
    assert not torch.allclose(advantages((1.0, 1.0), none), advantages((1.0, 1.0), -TOKENS))


@pytest.mark.parametrize("script", [grpo, ppo, rloo])
def test_every_flag_of_the_script_is_read_somewhere(script):
    shared = "".join(path.read_text() for path in Path(ROOT, "common").rglob("*.py"))
    for flag in dataclasses.fields(script.Args):
        if flag.name in script.Args.__annotations__ or flag.name in online.PolicyGradientArgs.__annotations__:
            if flag.name not in ("output_dir", "PRESETS"):
                assert re.search(rf"\bargs\.{flag.name}\b", inspect.getsource(script) + shared), flag.name


@pytest.mark.parametrize("name", grpo.PRESETS)
def test_presets_are_valid_and_name_flags(name):
    args = grpo.Args(preset=name, **grpo.PRESETS[name])
    for flag, value in grpo.PRESETS[name].items():
        assert getattr(args, flag) == value
    samples = make_samples()
    new, old = make_logprobs(samples, 0.0)
    (mb,) = micro_batches(samples, old)
    assert grpo.policy_loss(Meter(), args, mb, stream(mb, samples, new)).isfinite().all()
    parts = torch.stack([REWARDS, -TOKENS])
    assert grpo.completion_advantages(args, REWARDS, parts, [1.0, 1.0], TOKENS).isfinite().all()


# ---- rewards and penalties ----


def completion(length: int, finish_reason: str = "stop") -> Sample:
    return Sample([0] * (2 + length), [False] * 2 + [True] * length, prompt_length=2, finish_reason=finish_reason)


def test_rewards_are_scaled_then_clipped_and_missing_ones_stay_missing():
    rewards = torch.tensor([[1.0, -4.0, NAN, 0.25]]).double()
    for flags, expected in (
        ({}, [1, -4, NAN, 0.25]),
        (dict(reward_scale=2.0), [2, -8, NAN, 0.5]),
        (dict(reward_scale=2.0, reward_clip=1.5), [1.5, -1.5, NAN, 0.5]),
    ):
        got = online.shape_rewards(rewards, grpo.Args(**flags))[0].tolist()
        assert got == pytest.approx(expected, nan_ok=True)


def test_length_penalties():
    groups = [
        [completion(10), completion(10, "length")],
        [completion(8), completion(9)],
        [completion(1), completion(7)],
    ]
    for flags, expected in (
        ({}, [[0, 0], [0, 0], [0, 0]]),
        (dict(missing_eos_penalty=0.5), [[0, -0.5], [0, 0], [0, 0]]),
        (dict(overlong_buffer=0.4), [[-1, -1], [-0.5, -0.75], [0, -0.25]]),
        (dict(overlong_buffer=0.4, overlong_penalty=2.0), [[-2, -2], [-1, -1.5], [0, -0.5]]),
        (dict(overlong_buffer=0.2, missing_eos_penalty=1.0), [[-1, -2], [0, -0.5], [0, 0]]),
    ):
        got = online.length_penalties(groups, grpo.Args(max_new_tokens=10, **flags))
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_measured_rewards_leave_missing_ones_out():
    groups = [[completion(4), completion(2, "length"), completion(3)], [completion(6), completion(8), completion(1)]]
    rewards, meter = torch.tensor([[1.0, 3.0, NAN], [2.0, 2.0, 2.0]]).double(), Meter()
    online.measure_groups(meter, groups, rewards, dict(first=rewards))
    metrics = meter.reduce()
    assert metrics["reward"] == metrics["rewards/first/mean"] == 2
    assert metrics["reward_std"] == pytest.approx(math.sqrt(2) / 2) and metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["completions/mean_length"] == 4


# ---- groups of all ranks ----


def test_all_groups_are_in_the_order_of_their_positions(monkeypatch):
    ranks = [([0, 2], torch.tensor([[0.0], [2.0]])), ([1, 3], torch.tensor([[1.0], [3.0]])), ([], torch.zeros(0, 1))]
    monkeypatch.setattr(distributed, "gather_objects", lambda mine: ranks)
    assert online.all_groups(torch.zeros(0, 1), []).tolist() == [[0], [1], [2], [3]]


def test_equal_prompts_are_two_groups():
    """Two draws of one prompt with the same rewards, and a third group between them."""
    x_PG = torch.tensor([[0.0, 1.0], [5.0, 6.0], [0.0, 1.0]])
    assert online.all_groups(x_PG, [4, 0, 2]).tolist() == [[5, 6], [0, 1], [0, 1]]


# ---- KL coefficient ----


def coefficient(target: float = 2.0, horizon: int = 100) -> online.KLCoefficient:
    return online.KLCoefficient(grpo.Args(beta=0.1, kl_target=target, kl_horizon=horizon))


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(2.0, 0.1), (2.2, 0.1 * math.exp(0.1 * 50 / 100)), (1.8, 0.1 * math.exp(-0.1 * 50 / 100)),
     (1000.0, 0.1 * math.exp(0.2 * 50 / 100)), (-3.0, 0.1 * math.exp(-0.2 * 50 / 100))],
)  # fmt: skip
def test_beta_follows_the_kl_to_its_target(kl, expected):
    beta = coefficient()
    beta.update(kl, completions=50)
    assert beta.value == pytest.approx(expected, rel=1e-12)


def test_beta_without_a_target_stays_and_with_one_survives_a_checkpoint():
    constant = coefficient(target=0.0, horizon=10_000)
    constant.update(1000.0, 50)
    assert constant.value == 0.1
    beta, resumed = coefficient(), coefficient()
    beta.update(5.0, 50)
    resumed.load_state_dict(beta.state_dict())
    assert resumed.value == beta.value != 0.1


# ---- engine against trainer ----


def engine_batch() -> PackedBatch:
    """Two completions with trainer / engine ratios 1, 4, 1/2 and 3, 3. Prompts have absurd ones."""
    samples = [
        Sample([0] * 5, [False] * 2 + [True] * 3, rollout_logprobs=[0.0] * 5, prompt_length=2),
        Sample([0] * 4, [False] * 2 + [True] * 2, rollout_logprobs=[0.0] * 4, prompt_length=2),
    ]
    (mb,) = pack(samples, 100, CPU)
    mb.old_logprobs_T = torch.tensor([9.0, 1, 4, 0.5, 9, 3, 3]).log()
    return mb


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (dict(correction="none"), [1, 1, 1, 1, 1]),
        ({}, [1, 2, 0.5, 2, 2]),
        (dict(correction_high=3.5), [1, 3.5, 0.5, 3, 3]),
        (dict(correction_low=0.8), [1, 2, 0.8, 2, 2]),
        (dict(correction_mode="mask"), [1, 0, 0.5, 0, 0]),
        (dict(correction_mode="mask", correction_low=0.8, correction_high=5.0), [1, 4, 0, 3, 3]),
        (dict(correction="sequence", correction_high=100.0), [2, 2, 2, 9, 9]),
        (dict(correction="sequence", correction_high=4.0), [2, 2, 2, 4, 4]),
        (dict(correction="sequence", correction_mode="mask", correction_high=4.0), [2, 2, 2, 0, 0]),
        (dict(correction_filter=(0.5, 2.0), correction_high=5.0), [1, 4, 0.5, 0, 0]),  # 2^(1/3) and 3
        (dict(correction_filter=(1.5, 4.0), correction_high=5.0), [0, 0, 0, 3, 3]),
        (dict(correction="sequence", correction_high=100.0, correction_filter=(0.5, 2.0)), [2, 2, 2, 0, 0]),
    ],
)
def test_correction_weights(flags, expected):
    mb = engine_batch()
    weights_T = online.correction_weights(mb, grpo.Args(**flags))
    assert weights_T[mb.loss_mask_T].tolist() == pytest.approx(expected, rel=1e-5)
    assert not weights_T.requires_grad


def test_correction_weights_of_an_empty_pack_are_finite():
    (filler,) = pack([], 10, CPU)
    filler.old_logprobs_T, filler.rollout_logprobs_T = torch.full((1,), -3.0), torch.zeros(1)
    for flags in (dict(correction="token"), dict(correction="sequence"), dict(correction_filter=(0.5, 2.0))):
        assert online.correction_weights(filler, grpo.Args(**flags)).isfinite().all()


def test_measured_sampling_is_of_the_trained_tokens():
    meter, mb = Meter(), engine_batch()
    online.measure_sampling(meter, mb, online.correction_weights(mb, grpo.Args(correction_mode="mask")))
    metrics = online.effective_sample_size(meter.reduce())
    ratios = torch.tensor([1, 4, 0.5, 3, 3]).double()
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(4)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/ess"] == pytest.approx((ratios.mean() ** 2 / ratios.square().mean()).item())
    assert metrics["sampling/kept_fraction"] == pytest.approx(2 / 5)


# ---- entropy ----


def test_top_entropy_threshold_keeps_its_fraction_of_the_trained_tokens_of_all_packs():
    packs = [pack([completion(n)], 100, CPU)[0] for n in (4, 6)]
    packs[0].entropy_T = torch.tensor([99, 0.1, 0.2, 0.3, 0.4])  # the first is of the prompt
    packs[1].entropy_T = torch.tensor([99, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    packs += pack([], 100, CPU)
    packs[2].entropy_T = torch.tensor([99.0])
    for fraction, kept in ((0.2, 2), (0.25, 3), (0.5, 5), (0.95, 10), (1.0, 10)):
        threshold = grpo.top_entropy_threshold(packs, fraction)
        assert sum(((mb.entropy_T >= threshold) & mb.loss_mask_T).sum().item() for mb in packs) == kept
    assert grpo.top_entropy_threshold(packs[2:], 0.2) == math.inf
