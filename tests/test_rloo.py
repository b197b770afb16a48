"""rloo.py: the estimator is unbiased, one gradient whatever the ranks, exact resume."""

import itertools
import json

import helpers
import pytest
import torch
from helpers import assert_close_metrics, assert_same_weights, metrics, run
from test_grpo import REWARD

from common.advantages import leave_one_out
from common.losses import clip_policy_loss

SAME = ("grad_norm", "reward", "entropy", "completions/mean_length", "num_tokens", "epoch")


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
def flags(tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        "--reward", f"{reward}:digits", "--max_steps", 6, "--prompts_per_step", 4, "--samples_per_prompt", 4,
        "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0, "--log_every", 1,
        "--save_every", 2, "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "rloo.py", *flags, "--output_dir", folder)
    return folder


def samples(folder, step):
    lines = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] == step]


@pytest.mark.slow
def test_one_gradient_whatever_the_ranks_and_packing(two_ranks, flags, tmp_path):
    run(1, "rloo.py", *flags, "--pack_tokens", 40, "--output_dir", tmp_path)
    for one, other in zip(samples(two_ranks, 1), samples(tmp_path, 1), strict=True):
        assert one | dict(advantage=0) == other | dict(advantage=0)  # the same completions and scores
        assert one["advantage"] == pytest.approx(other["advantage"], abs=1e-6)  # the KL is the reference's float32
    # Loss and KL are small differences of float32 numbers of size 1: 1e-5 of 0.1 is what their digits can tell.
    assert_close_metrics(two_ranks, tmp_path, ("loss", "kl"), rel=1e-5, floor=0.1)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)
    assert metrics(two_ranks)[0]["kl"] == 0 and metrics(two_ranks)[-1]["kl"] != 0


@pytest.mark.slow
def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(two_ranks, flags, tmp_path):
    flags = (*flags, "--output_dir", tmp_path)
    helpers.run_and_kill(2, "rloo.py", *flags, folder=tmp_path, after_step=3, delay=0)
    assert not (tmp_path / "hf").exists(), "killed too late"
    assert "resuming from" in run(2, "rloo.py", *flags).stdout
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, ("loss", "kl", *SAME), rel=0)
