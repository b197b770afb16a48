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


def micro_batches(samples, old) -> list[PackedBatch]:
    out = pack(samples, 8192, CPU)
    for mb in out:
        mb.advantages_T = mb.per_token(mb.per_sequence(sample.advantage for sample in mb.samples))
        mb.old_logprobs_T = stream(mb, samples, old)
    return out


def stream(mb: PackedBatch, samples, values) -> torch.Tensor:
    """Per-sample tensors as the stream of a pack, which has its own order."""
    of = {id(sample): value for sample, value in zip(samples, values, strict=True)}
    return torch.cat([of[id(sample)] for sample in mb.samples])


# ---- GRPO ----


def test_measured_clipping_is_the_fraction_of_trained_tokens_without_gradient():
    (mb,) = pack([Sample([0] * 10, [False] * 4 + [True] * 6, prompt_length=4)], 100, CPU)
    new = torch.tensor([9.0, 9, 9, 1.29, 1.27, 0.79, 0.81, 1.29, 0.79]).double().log().requires_grad_()
    mb.old_logprobs_T, mb.advantages_T = torch.zeros(9), torch.tensor([1.0, 1, 1, 1, 1, -1, -1, -1, 1])
    meter = Meter()
    loss_T = grpo.policy_loss(meter, grpo.Args(), mb, new) * mb.loss_mask_T
    (gradient,) = torch.autograd.grad(loss_T.sum(), new)
    without = ((gradient == 0) & mb.loss_mask_T).sum().item()
    assert without == 2 and meter.reduce()["clip_ratio/region_mean"] == pytest.approx(without / 6)


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
    loss_T = (
        clip_policy_loss(logprobs_T - mb.old_logprobs_T, advantages_T, clip_low=0.2, clip_high=0.2) * mb.loss_mask_T
    )
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


def outcome(**flags) -> float:
    """The loss as grpo.py adds it up, for far off-policy log-probs: it reads everything that is for the loss."""
    args, samples = grpo.Args(**flags), make_samples()
    new, old = make_logprobs(samples, drift=2.0)
    (mb,) = micro_batches(samples, old)
    loss_T = grpo.policy_loss(Meter(), args, mb, stream(mb, samples, new))
    lengths_T = losses.sequence_sum(mb.loss_mask_T, mb.loss_mask_T, mb.sequence_ids_T)
    counts = mb.loss_mask_T, lengths_T, mb.loss_mask_T.sum(), torch.tensor(sum(any(s.loss_mask) for s in samples))
    flags = dict(reduction=args.reduction, max_new_tokens=args.max_new_tokens)
    return (loss_T * losses.reduction_weights(*counts, **flags)).sum().item()


@pytest.mark.parametrize(
    ("flags", "one", "other"),
    [
        ({}, dict(loss="clip"), dict(loss="reinforce")),
        *(({}, dict(loss=a), dict(loss=b)) for a, b in
          itertools.pairwise(("clip", "reinforce", "cispo", "sapo", "topr"))),
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
    assert outcome(**flags, **one) != pytest.approx(outcome(**flags, **other), rel=1e-6)


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


# ---- rewards ----


def completion(length: int, finish_reason: str = "stop") -> Sample:
    return Sample([0] * (2 + length), [False] * 2 + [True] * length, prompt_length=2, finish_reason=finish_reason)


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


def test_measured_sampling_is_of_the_trained_tokens():
    meter, mb = Meter(), engine_batch()
    online.measure_sampling(meter, mb, torch.tensor([1.0, 1, 0, 0.5, 1, 0, 0]))
    metrics = online.effective_sample_size(meter.reduce())
    ratios = torch.tensor([1, 4, 0.5, 3, 3]).double()
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(4)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/ess"] == pytest.approx((ratios.mean() ** 2 / ratios.square().mean()).item())
    assert metrics["sampling/kept_fraction"] == pytest.approx(2 / 5)
