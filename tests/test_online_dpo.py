"""online_dpo.py: which completions make a pair, one gradient whatever the ranks, exact resume."""

import math

import inprocess
import pytest
import torch
from helpers import assert_close_metrics, metrics, run
from hypothesis import given
from hypothesis import strategies as st
from test_grpo import REWARD, samples

from common.data.packing import Sample
from common.metrics.meter import Meter
from online_dpo import best_and_worst, measure_pairs

main = inprocess.main
NAN = math.nan
SAME = ("grad_norm", "reward", "entropy", "pairs/win_margin", "pairs/skipped_fraction", "rewards/accuracies",
        "logps/chosen", "logps/rejected", "num_tokens", "epoch")  # fmt: skip
SMALL = ("loss", "kl", "rewards/margins", "rewards/chosen")  # differences of float32 numbers of size 1


def chosen(*rewards: float) -> list[int]:
    """Which of a group's completions are chosen and rejected."""
    group = [Sample(ids=[i], loss_mask=[True]) for i in range(len(rewards))]
    (pair,) = best_and_worst([group], torch.tensor([rewards], dtype=torch.float64))
    return [sample.ids[0] for sample in pair]


def test_best_and_worst_the_first_of_equals_and_nothing_of_all_equal_ones():
    assert chosen(0.1, 0.7, 0.3) == [1, 0]
    assert chosen(0.0, 1.0, 1.0, 0.0) == [1, 0]
    assert chosen(0.5, 0.5) == chosen(NAN, NAN) == chosen(NAN, 0.3) == []
    assert chosen(NAN, -5.0, 2.0) == [2, 1], "what has no reward is neither the worst nor the best"
    assert chosen(-3.0, -2.0) == [1, 0]


@given(st.lists(st.one_of(st.integers(-3, 3), st.just(NAN)), min_size=2, max_size=6))
def test_a_pair_spans_the_rewards(rewards):
    valid = [r for r in rewards if not math.isnan(r)]
    pair = chosen(*map(float, rewards))
    if len(set(valid)) < 2:
        assert pair == []
    else:
        assert [rewards[i] for i in pair] == [max(valid), min(valid)]
        assert pair == [rewards.index(max(valid)), rewards.index(min(valid))]


def test_ties_and_skipped_groups_are_counted():
    meter = Meter()
    measure_pairs(meter, torch.tensor([[0, 1, 1], [2, 2, 2], [0, 1, 5], [NAN, 3, 3], [0, 0, NAN]]).double())
    numbers = meter.reduce()
    assert numbers["pairs/win_margin"] == pytest.approx((1 + 5) / 2)
    assert numbers["pairs/skipped_fraction"] == pytest.approx(3 / 5)
    assert numbers["pairs/tied_fraction"] == pytest.approx(1 / 5), "among the pairs that are trained on"


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        *small, "--reward", f"{reward}:digits", "--max_steps", 3, "--prompts_per_step", 8, "--samples_per_prompt", 3,
        "--minibatches", 2, "--epochs_per_rollout", 2, "--loss", "sigmoid", "ipo", "--loss_weights", 1, 0.01,
        "--sft_weight", 0.1, "--missing_eos_penalty", 0.2, "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0,
        "--log_every", 1, "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "online_dpo.py", *flags, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_one_gradient_whatever_the_ranks_and_packing_also_when_resumed(two_ranks, flags, main, tmp_path, capsys):
    flags = (*flags, "--pack_tokens", 60, "--output_dir", tmp_path)
    main("online_dpo", *flags, "--max_steps", 2)
    main("online_dpo", *flags)
    assert "resuming from" in capsys.readouterr().out
    assert samples(two_ranks, 1) == samples(tmp_path, 1)
    assert {sample["advantage"] for sample in samples(tmp_path, 1)} == {-1, 0, 1}
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)
    assert_close_metrics(two_ranks, tmp_path, SMALL, rel=1e-5, floor=0.1)


@pytest.mark.slow
def test_learns(flags, main, tmp_path):
    """From scratch, to write digits."""
    extra = ("--loss", "sigmoid", "--loss_weights", "--sft_weight", 0, "--missing_eos_penalty", 0, "--max_steps", 11)
    extra += ("--prompts_per_step", 32, "--samples_per_prompt", 4, "--minibatches", 1, "--epochs_per_rollout", 1)
    main("online_dpo", *flags, *extra, "--lr", 5e-3, "--max_new_tokens", 4, "--output_dir", tmp_path)
    rewards = [line["reward"] for line in metrics(tmp_path)]
    assert rewards[0] < 0.1 and rewards[-1] > 0.3, rewards  # 0.8 is to be had


@pytest.mark.slow
def test_the_first_loss_is_that_of_equal_models_and_equal_rewards_teach_nothing(flags, main, tmp_path):
    """-log sigmoid(0) before the first update; with one reward for all no weight moves, whatever the rank."""
    extra = ("--loss", "sigmoid", "--loss_weights", "--sft_weight", 0, "--max_steps", 2, "--epochs_per_rollout", 1)
    flags = (*flags, *extra, "--minibatches", 1)
    main("online_dpo", *flags, "--output_dir", tmp_path / "a")
    assert metrics(tmp_path / "a")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics(tmp_path / "a")[0]["kl"] == pytest.approx(0, abs=1e-5)
    (tmp_path / "reward.py").write_text("def same(completion, row):\n    return 1.0\n")
    reward = ("--reward", f"{tmp_path / 'reward.py'}:same", "--missing_eos_penalty", 0, "--output_dir", tmp_path / "b")
    run(2, "online_dpo.py", *flags, *reward)
    assert all(line["pairs/skipped_fraction"] == 1 and "grad_norm" not in line for line in metrics(tmp_path / "b"))
