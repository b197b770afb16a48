"""online_dpo.py: which completions form a pair, and the loss against naive formulas."""

import math

import pytest
import torch
from helpers import metrics, samples_of
from hypothesis import given
from hypothesis import strategies as st

from common.metrics.meter import Meter
from common.packs.packing import pack_groups
from common.packs.sample import Sample
from online_dpo import Args, loss, make_pairs, measure_pairs, preferences

NAN = math.nan
# ---- pairs ----


def chosen(*rewards: float) -> list[int]:
    """Return the places of chosen and rejected in a group, or an empty list if it has no pair."""
    (signs,) = preferences(torch.tensor([rewards], dtype=torch.float64)).tolist()
    assert set(signs) <= {1, 0, -1} and signs.count(1) == signs.count(-1) <= 1
    return [signs.index(1), signs.index(-1)] if any(signs) else []


@given(st.lists(st.one_of(st.integers(-3, 3), st.just(NAN)), min_size=2, max_size=6))
def test_pair_has_the_maximum_and_minimum_reward(rewards):
    valid = [r for r in rewards if not math.isnan(r)]
    pair = chosen(*map(float, rewards))
    if len(set(valid)) < 2:
        assert pair == []
    else:
        assert [rewards[i] for i in pair] == [max(valid), min(valid)]
        assert pair == [rewards.index(max(valid)), rewards.index(min(valid))]


def test_rounding_makes_no_pair():
    assert chosen(0.1 + 0.2, 0.3) == [] and chosen(0.3, 0.1 + 0.2, 0.1) == [0, 2]


def test_ties_and_skipped_groups_are_counted():
    meter = Meter()
    rewards_PG = torch.tensor([[0, 1, 1], [2, 2, 2], [0, 1, 5], [NAN, 3, 3], [0, 0, NAN]])
    measure_pairs(meter, rewards_PG.double())
    numbers = meter.reduce()
    assert numbers["pairs/win_margin"] == pytest.approx((1 + 5) / 2)
    assert numbers["pairs/skipped_fraction"] == pytest.approx(3 / 5)
    assert numbers["pairs/tied_fraction"] == pytest.approx(1 / 5)  # of the trained pairs


# ---- the loss ----

LENGTHS = [(3, 5), (1, 4), (6, 2)]  # of chosen and rejected completions, without prompts


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("referenced", [True, False])
@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
def test_loss_and_gradient_equal_naive_code(referenced, sft_weight):
    """The loss is DPO's and, with another weight, SPPO's, plus the chosen's log-likelihood."""
    groups = [
        [Sample([1] * (2 + n), [False] * 2 + [True] * n, prompt_length=2) for n in pair]
        for pair in LENGTHS
    ]
    (mb,) = pack_groups(groups, 100, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    logprobs_T, ref_T = -2 * torch.rand(
        2, len(mb.targets_T), generator=generator, dtype=torch.float64
    )
    args = Args(loss=("sigmoid", "sppo_hard"), loss_weights=(1.0, 0.3), beta=0.7,
                sft_weight=sft_weight, label_smoothing=0.1)  # fmt: skip
    mb = mb.with_streams(ref_logprobs_T=ref_T) if referenced else mb
    got_W = loss(make_pairs(mb, logprobs_T.requires_grad_()), args)

    trained = {
        n: [t for t in range(mb.offsets[n], mb.offsets[n + 1]) if mb.loss_mask_T[t]]
        for n in range(6)
    }
    place = {id(sample): n for n, sample in enumerate(samples_of(mb))}
    expected, slopes = [0.0] * 3, [0.0] * len(mb.targets_T)
    for (chosen, rejected), (nc, _) in zip(groups, LENGTHS, strict=True):
        c, r = place[id(chosen)], place[id(rejected)]
        logp = [sum(logprobs_T[t].item() for t in trained[n]) for n in (c, r)]
        ref = [sum(ref_T[t].item() for t in trained[n]) if referenced else 0.0 for n in (c, r)]
        z = 0.7 * (logp[0] - ref[0] - logp[1] + ref[1])
        gaps = (logp[0] - ref[0] - 1 / 1.4, logp[1] - ref[1] + 1 / 1.4)
        expected[c // 2] = -0.9 * math.log(sigmoid(z)) - 0.1 * math.log(sigmoid(-z))
        expected[c // 2] += 0.3 * (gaps[0] ** 2 + gaps[1] ** 2) - sft_weight * logp[0] / nc
        slope = 0.7 * (sigmoid(z) - 0.9)  # of DPO with respect to the log-prob of the chosen
        for n, sign, gap in ((c, 1, gaps[0]), (r, -1, gaps[1])):
            for t in trained[n]:
                of_sft = sft_weight / nc if n == c else 0.0
                slopes[t] = sign * slope + 0.3 * 2 * gap - of_sft
    assert got_W.tolist() == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.grad(got_W.sum(), logprobs_T)[0].tolist() == pytest.approx(
        slopes, rel=1e-9
    )


# ---- whole runs ----


@pytest.mark.slow
def test_first_loss_is_ln_2_and_equal_rewards_change_nothing(online, main, tmp_path):
    """The first loss is -log sigmoid(0). If all rewards are equal there is no update."""
    flags = (*online, "--minibatches", 1)
    main("online_dpo", *flags, "--max_steps", 1, "--output_dir", tmp_path / "a")
    assert metrics(tmp_path / "a")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics(tmp_path / "a")[0]["kl"] == pytest.approx(0, abs=1e-5)
    (tmp_path / "reward.py").write_text("def same(completion, row):\n    return 1.0\n")
    reward = ("--reward", f"{tmp_path / 'reward.py'}:same", "--output_dir", tmp_path / "b")
    main("online_dpo", *flags, *reward)
    for line in metrics(tmp_path / "b"):
        assert line["pairs/skipped_fraction"] == 1 and "grad_norm" not in line
