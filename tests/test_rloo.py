"""rloo.py: the estimator is unbiased, one gradient whatever the ranks, exact resume with an adapted beta."""

import itertools

import inprocess
import pytest
import torch
from helpers import assert_close_metrics, metrics, run
from test_grpo import REWARD, samples

from common.objectives.advantages import leave_one_out
from common.objectives.policy import clip_policy_loss

main = inprocess.main
SAME = ("grad_norm", "reward", "entropy", "completions/mean_length", "num_tokens", "epoch", "beta")


def test_expected_gradient_is_that_of_the_expected_reward():
    """A bandit with two actions of which one pays: all draws of k samples, each with its probability."""
    pays = torch.tensor([0.3, 1.0], dtype=torch.float64)
    logits = torch.tensor([0.4, -0.2], dtype=torch.float64, requires_grad=True)
    (analytic,) = torch.autograd.grad((logits.softmax(0) * pays).sum(), logits)
    for k in (2, 3):
        expected = torch.zeros(2, dtype=torch.float64)
        for actions in map(list, itertools.product((0, 1), repeat=k)):
            logps_N = logits.log_softmax(0)[actions]
            advantages_N = leave_one_out(pays[actions][None])[0]
            loss = clip_policy_loss(logps_N - logps_N.detach(), advantages_N, clip_low=0.2, clip_high=0.2).mean()
            expected -= torch.autograd.grad(loss, logits)[0] * logps_N.detach().sum().exp()
        torch.testing.assert_close(expected, analytic, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def flags(small, tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        *small, "--reward", f"{reward}:digits", "--max_steps", 3, "--prompts_per_step", 4, "--samples_per_prompt", 4,
        "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0, "--log_every", 1,
        "--beta", 0.05, "--kl_target", 0.02, "--kl_horizon", 100, "--max_logprob_difference", 1e-4,
        "--engine", "transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "rloo.py", *flags, "--output_dir", folder)
    return folder


@pytest.mark.slow
def test_one_gradient_whatever_the_ranks_and_packing_also_when_resumed(two_ranks, flags, main, tmp_path, capsys):
    """Beta goes on from what it had become."""
    flags = (*flags, "--pack_tokens", 40, "--output_dir", tmp_path)
    main("rloo", *flags, "--max_steps", 2)
    main("rloo", *flags)
    assert "resuming from" in capsys.readouterr().out
    for one, other in zip(samples(two_ranks, 1), samples(tmp_path, 1), strict=True):
        assert one | dict(advantage=0) == other | dict(advantage=0)  # the same completions and scores
        assert one["advantage"] == pytest.approx(other["advantage"], abs=1e-6)  # the KL is the reference's float32
    # Loss and KL are small differences of float32 numbers of size 1: 1e-5 of 0.1 is what their digits can tell.
    assert_close_metrics(two_ranks, tmp_path, ("loss", "kl"), rel=1e-5, floor=0.1)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)
    lines = metrics(two_ranks)
    assert lines[0]["kl"] == 0 and lines[-1]["kl"] != 0
    assert lines[0]["beta"] == 0.05 and len({line["beta"] for line in lines}) > 2, "beta adapts"


@pytest.mark.slow
def test_learns(flags, main, tmp_path):
    """From scratch, to write digits."""
    extra = ("--max_steps", 13, "--prompts_per_step", 16, "--samples_per_prompt", 8, "--minibatches", 1, "--lr", 5e-3)
    extra += ("--beta", 0.01, "--kl_target", 0, "--kl_horizon", 10_000, "--max_new_tokens", 4, "--output_dir", tmp_path)
    main("rloo", *flags, *extra)
    rewards = [line["reward"] for line in metrics(tmp_path)]
    assert rewards[0] < 0.1 and rewards[-1] > 0.6, rewards  # 0.8 is to be had
