"""ppo.py: one gradient whatever the ranks, exact resume of both models, reward models, warm-up and early stop."""

import helpers
import pytest
from helpers import assert_close_metrics, assert_same_weights, metrics, run
from test_grpo import REWARD, samples

from common.checkpoint import export_hf
from common.config import RunArgs
from common.hub import load_tokenizer, resolve_model
from common.models import load_scalar_model

pytestmark = pytest.mark.slow

SAME = ("grad_norm", "value_grad_norm", "value_loss", "reward", "entropy", "beta", "num_tokens", "epoch", "updates")
SMALL = ("loss", "objective/kl", "explained_variance", "policy/approx_kl")  # differences of float32 numbers of size 1


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        "--reward", f"{reward}:digits", "--max_steps", 7, "--prompts_per_step", 16, "--samples_per_prompt", 2,
        "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4, "--value_lr", 3e-4, "--value_lambda", 1,
        "--kl_target", 0.01, "--kl_horizon", 100, "--missing_eos_penalty", 0.1, "--eval_every", 0, "--log_every", 1,
        "--value_warmup_steps", 3, "--save_every", 100, "--max_logprob_difference", 1e-4, "--engine", "transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "ppo.py", *flags, "--output_dir", folder)
    return folder


def test_one_gradient_whatever_the_ranks_and_packing(two_ranks, flags, tmp_path):
    run(1, "ppo.py", *flags, "--pack_tokens", 60, "--output_dir", tmp_path)
    for one, other in zip(samples(two_ranks, 1), samples(tmp_path, 1), strict=True):
        assert one | dict(advantage=0) == other | dict(advantage=0)  # the same completions and rewards
        assert one["advantage"] == pytest.approx(other["advantage"], abs=1e-4)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)
    assert_close_metrics(two_ranks, tmp_path, SMALL, rel=1e-5, floor=0.1)


def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(two_ranks, flags, tmp_path):
    """Also one that saves while the policy waits: its optimizer has no state yet."""
    flags = (*flags, "--save_every", 2, "--output_dir", tmp_path)
    helpers.run_and_kill(2, "ppo.py", *flags, folder=tmp_path, after_step=3, delay=0)
    assert not (tmp_path / "hf").exists(), "killed too late"
    assert "resuming from" in run(2, "ppo.py", *flags).stdout
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, (*SAME, *SMALL), rel=0)  # value model, both optimizers, adapted beta


def test_values_are_learned_and_beta_adapts(two_ranks):
    first, *_, last = metrics(two_ranks)
    assert last["value_loss"] < first["value_loss"] / 2
    assert last["beta"] > first["beta"] == 0.05, "the KL is above its target"


def test_reward_model_value_model_warm_up_and_early_stop(flags, device, tmp_path):
    tiny = resolve_model("tiny")
    export_hf(load_scalar_model(tiny, RunArgs(), device), load_tokenizer(tiny), tmp_path / "rm")
    extra = ("--reward", f"model:{tmp_path / 'rm'}", "--value_model", tmp_path / "rm", "--max_steps", 2)
    extra += ("--value_warmup_steps", 1, "--kl_stop", 1e-9, "--max_new_tokens", 4, "--output_dir", tmp_path / "run")
    run(1, "ppo.py", *flags, *extra)
    warm_up, first = metrics(tmp_path / "run")
    assert "grad_norm" not in warm_up and warm_up["value_grad_norm"] > 0 and warm_up["updates"] == 2
    assert first["updates"] == 1, "the first update moves the policy off its samples, the second would be too far"
    assert warm_up["rewards/model/mean"] == warm_up["reward"]
