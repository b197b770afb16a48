"""ppo.py: rewards of tokens, advantages and the value loss, by hand."""

import json
import math

import pytest
import torch
from helpers import ROOT, samples_of
from hypothesis import given
from hypothesis import strategies as st
from naive import check, double

import ppo
from common.metrics.meter import Meter
from common.metrics.moments import explained_variance, moments
from common.objectives.advantages import gae
from common.packs.packing import PackedBatch, pack
from common.packs.sample import Completion

CPU, NAN = torch.device("cpu"), math.nan
LENGTHS = (5, 30, 1, 12, 20, 7)  # lengths of the completions; prompts have 3 tokens
SCORES = torch.tensor([1.5, -0.7, 0.0, -2.0, 0.4, -1.1]).double()


def make_samples() -> list[Completion]:
    """Return six completions: the fourth has tool output in it, the last one is not trained."""
    made = [
        Completion([1] * (3 + length), [False] * 3 + [True] * length, prompt_length=3)
        for length in LENGTHS
    ]
    made[3].loss_mask[6:9] = [False] * 3
    made[5].loss_mask = [False] * len(made[5].ids)
    return made


def make_batch(seed: int = 0) -> tuple[PackedBatch, torch.Tensor]:
    """Return a pack with random values, and rewards with a score at each completion's end."""
    (mb,), generator = pack(make_samples(), 8192, CPU), torch.Generator().manual_seed(seed)
    mb = mb.with_streams(values_T=torch.randn(len(mb.targets_T), generator=generator))
    return mb, 0.1 * torch.randn(len(mb.targets_T), generator=generator) + token_rewards(
        mb, SCORES, 0.0
    )


def token_rewards(
    mb: PackedBatch, scores: torch.Tensor, turn_weight: float, beta: float = 0.0, **flags
):
    return ppo.token_rewards(mb, scores, turn_weight, ppo.Args(beta=beta, **flags))


def advantages(
    mb: PackedBatch, rewards_T: torch.Tensor, gae_lambda: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    return ppo.advantages(rewards_T, mb.values_T, mb.loss_mask_T, mb.sequence_ids_T, gae_lambda)


# ---- token rewards ----


def test_turn_rewards_are_placed_on_the_last_token_of_their_turn():
    """The rewards of a completion add up to its score."""
    mask = [False, False, True, True, False, True, True, False, True]
    one = Completion([*range(9)], mask, prompt_length=2, turns=3)
    one.turn_rewards = [(3, 1.0), (6, -2.0), (8, 0.25)]
    two = Completion([1, 2, 3], [False, True, True], prompt_length=1)
    three = Completion(
        [1, 2, 3, 4], [False, True, False, True], prompt_length=1, turns=2, turn_rewards=[(1, 1.0)]
    )
    for sample in (one, two, three):
        sample.streams["turn_rewards"] = sample.rewards_before_last_turn()
    scores = torch.tensor([4.0, -1.0, 2.0])
    for packed in (pack([one, two, three], 100, CPU), pack([one, two, three], 8, CPU)):
        got = {}
        for mb in packed:
            rewards_T = token_rewards(mb, scores, 0.5)
            assert (rewards_T[~mb.loss_mask_T] == 0).all()
            ends = zip(samples_of(mb), mb.offsets, mb.offsets[1:], strict=False)
            got |= {len(sample.ids): rewards_T[a:b].tolist() for sample, a, b in ends}
        assert got == {9: [0, 0, 0.5, 0, 0, -1.0, 0, 4.5], 3: [0, -1.0], 4: [0.5, 0, 1.5]}


KL = dict(k1=lambda d: d, k2=lambda d: d * d / 2, k3=lambda d: math.exp(-d) - 1 + d)


@pytest.mark.parametrize("estimator", KL)
def test_kl_to_the_reference_is_subtracted_from_each_token(estimator):
    """The tokens' log-ratios to the reference are 0, 0, 0, 1/2, -1/2, 1 and 8."""
    (mb,) = pack(make_samples()[:1], 100, CPU)
    old_T, ref_T = torch.tensor([[0.0, 0, -1, -1, -1, -1, -1], [0, 0, -1, -1.5, -0.5, -2, -9]])
    mb = mb.with_streams(old_logprobs_T=old_T, ref_logprobs_T=ref_T)
    expected = [-0.2 * KL[estimator](d) for d in (0, 0, 0, 0.5, -0.5, 1, 8)]
    expected[-1] += 1.5
    got_T = token_rewards(mb, SCORES[:1], 0.0, beta=0.2, kl_estimator=estimator)
    assert got_T.tolist() == pytest.approx(expected, abs=1e-6)


def test_logged_kl_is_the_log_ratio_for_every_estimator_of_the_penalty():
    """The metric rlhf_reward is the score less the penalty, which the estimator does change."""
    (mb,) = pack(make_samples()[:1], 100, CPU)
    old_T, ref_T = torch.tensor([[0.0, 0, -1, -1, -1, -1, -1], [0, 0, -1, -1.5, -0.5, -2, -9]])
    mb = mb.with_streams(
        old_logprobs_T=old_T, ref_logprobs_T=ref_T, rollout_logprobs_T=old_T, values_T=0 * old_T
    )
    for estimator in KL:
        args, meter = ppo.Args(beta=0.2, kl_estimator=estimator), Meter()
        ppo.with_advantages(mb, SCORES[:1], 0.0, args, meter)
        numbers = meter.reduce()
        assert numbers["objective/kl"] == pytest.approx(0.5 - 0.5 + 1 + 8)
        penalty = 0.2 * sum(KL[estimator](d) for d in (0, 0.5, -0.5, 1, 8))
        assert numbers["objective/rlhf_reward"] == pytest.approx(1.5 - penalty, abs=1e-5)


# ---- advantages and returns ----


def test_advantages_and_returns_are_those_of_gae():
    mb, rewards_T = make_batch()
    expected_T = gae(rewards_T, mb.values_T, mb.loss_mask_T, mb.sequence_ids_T, 0.7).float()
    advantages_T, returns_T = advantages(mb, rewards_T, gae_lambda=0.7)
    torch.testing.assert_close(advantages_T, expected_T)
    torch.testing.assert_close(returns_T, expected_T + mb.values_T)


def test_completion_without_a_score_has_no_advantage_and_changes_no_other():
    mb, _ = make_batch()
    for scores in (SCORES, torch.cat([SCORES[:5], torch.tensor([NAN])])):  # the last is masked
        advantages_T, returns_T = advantages(mb, token_rewards(mb, scores, 0.0))
        assert advantages_T.isfinite().all() and returns_T.isfinite().all()
        assert (advantages_T[mb.on_tokens(SCORES) == SCORES[5].float()] == 0).all()
        assert moments([[mb]], lambda _, x_T=advantages_T: x_T)[1] > 0


def test_empty_pack_has_finite_advantages_rewards_and_moments():
    (filler,) = pack([], 10, CPU)
    filler = filler.with_streams(values_T=torch.ones(1))
    advantages_T, returns_T = advantages(filler, torch.ones(1))
    assert advantages_T.tolist() == [0.0] and returns_T.shape == (1,)
    assert token_rewards(filler, torch.zeros(0), 1.0).tolist() == [0.0]
    assert moments([[filler]], lambda _: torch.full((1,), NAN)) == (0.0, 0.0)


# ---- losses ----


number = st.floats(-3, 3)


@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=8))
def test_value_loss_equals_naive_code(rows):
    def naive(value, old, target):
        nearer = min(max(value, old - 0.2), old + 0.2)
        plain, clipped = (value - target) ** 2 / 2, (nearer - target) ** 2 / 2
        return (clipped, 0.0) if clipped > plain else (plain, value - target)

    smooth = [row for row in rows if abs(abs(row[0] - row[1]) - 0.2) > 1e-6]  # not at a kink
    check(ppo.value_loss, naive, smooth or [(0.0, 0.1, 1.0)])


def test_value_loss_has_no_gradient_beyond_the_clip_except_towards_it():
    values = double([1.0, 1.0]).requires_grad_()  # moved by 1 from 0; the clip is 0.2
    losses = ppo.value_loss(values, torch.zeros(2), torch.tensor([2.0, -2.0]))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([1.8**2 / 2, 3**2 / 2])
    assert values.grad.tolist() == [0, 3]  # towards the return: clipped; past it: pulled back


def test_value_gradient_is_that_of_a_mean_over_trained_tokens(device):
    """Values are clipped around those of the rollout."""
    mb, rewards_T = make_batch()
    mb = mb.with_streams(returns_T=advantages(mb, rewards_T)[1])
    values_T = (mb.values_T + 0.5 * torch.randn(len(mb.targets_T))).requires_grad_()
    total = ppo.add_value_gradient(lambda _: values_T, [mb, mb], torch.tensor(100))
    loss_T = ppo.value_loss(values_T, mb.values_T, mb.returns_T)
    expected = 2 * loss_T[mb.loss_mask_T].sum() / 100
    assert total.item() == pytest.approx(expected.item())
    torch.testing.assert_close(values_T.grad, torch.autograd.grad(expected, values_T)[0])


def test_advantages_are_whitened_and_perfect_values_explain_all_variance():
    mb, rewards_T = make_batch()
    advantages_T, returns_T = advantages(mb, rewards_T)
    mb = mb.with_streams(advantages_T=advantages_T, returns_T=returns_T)
    [[whitened]] = ppo.whiten([[mb]])
    assert moments([[whitened]], lambda mb: mb.advantages_T) == pytest.approx((0, 1), abs=1e-5)
    assert not whitened.advantages_T[~mb.loss_mask_T].any()
    assert explained_variance([[mb]]) < 1
    assert explained_variance([[mb.with_streams(values_T=returns_T - 3)]]) == pytest.approx(1)
    assert explained_variance([[mb.with_streams(values_T=returns_T / 3)]]) == pytest.approx(5 / 9)
    assert explained_variance([[mb.with_streams(returns_T=torch.ones_like(returns_T))]]) == 0


# ---- whole runs ----


@pytest.fixture(scope="module")
def flags(online):
    extra = "--samples_per_prompt 2 --missing_eos_penalty 0.1 --value_lr 3e-4 --beta 0.05"
    return (*online, *extra.split())


@pytest.mark.slow
def test_completion_without_a_reward_has_no_advantage_in_strict_json(flags, main, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def some(completion, row):\n"
        "    return None if row['answer'][0] in '13579' else len(completion)\n"
    )
    flags = (*flags, "--reward", f"{tmp_path / 'reward.py'}:some", "--max_steps", 1)
    main("ppo", *flags, "--max_reward_errors", 1, "--output_dir", tmp_path / "run")
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    missing = [line for line in read if line["reward"] is None]
    assert 0 < len(missing) < len(read)
    assert all((line["advantage"] == 0) == (line["reward"] is None) for line in read)


def test_the_page_has_the_numbers_of_its_picture():
    values, kl = [0.3, 0.4, 0.4, 0.5, 0.6, 0.8, 0.9], [0.1, 0.0, 0.2, 0.1, 0.0, 0.3, 0.0]
    values_T, rewards_T = torch.tensor(values), -0.1 * torch.tensor(kl)
    rewards_T[-1] += 1
    mask_T, ids_T = torch.ones(7, dtype=torch.bool), torch.zeros(7)
    A_T, R_T = ppo.advantages(rewards_T, values_T, mask_T, ids_T, gae_lambda=0.9)
    whitened_T = (A_T - A_T.mean()) / A_T.std()
    assert [f"{x:.2f}" for x in (A_T[0], R_T[0])] == ["0.45", "0.75"]
    assert [f"{x:.2f}" for x in (whitened_T[0], whitened_T[-1])] == ["0.86", "-1.62"]
    v_T = torch.tensor([0.3, 0.45, 0.55, 0.95, 1.05], requires_grad=True)
    loss_T = ppo.value_loss(v_T, torch.full_like(v_T, 0.3), R_T[:1].expand(5))
    loss_T.sum().backward()
    assert [f"{x:.2f}" for x in loss_T] == ["0.10", "0.04", "0.03", "0.03", "0.05"]
    assert [g != 0 for g in v_T.grad.tolist()] == [True, True, False, False, True]
    page = (ROOT / "docs/ppo.md").read_text()
    for number in ("0.45 + 0.3 = 0.75", "/ 2 = 0.10 to 0.03", "v = 1.0", "0.86", "-1.62"):
        assert number in page
