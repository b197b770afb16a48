"""grpo.py as a whole, with the real engine: one gradient, exact resume, engine = trainer, two nodes, real data."""

import json
import random
import shutil

import helpers
import pytest
from helpers import GSM8K, ROOT, assert_close_metrics, assert_same_weights, metrics, needs_gsm8k, run

pytestmark = pytest.mark.slow

REWARD = '''
def digits(completion, row):
    """Varies among the completions of an untrained model, so there is something to learn from the first step."""
    return sum(c.isdigit() for c in completion) / (1 + len(completion))
'''
SAME = ("grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "num_tokens", "epoch")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    reward = tmp_path_factory.mktemp("reward") / "reward.py"
    reward.write_text(REWARD)
    return (
        "--reward", f"{reward}:digits", "--max_steps", 10, "--prompts_per_step", 4, "--samples_per_prompt", 4,
        "--minibatches", 2, "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0, "--log_every", 1,
        "--save_every", 4, "--max_logprob_difference", 1e-4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    run(2, "grpo.py", *flags, "--output_dir", folder)
    return folder


def samples(folder, step=None):
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if step is None or line["step"] == step]


@pytest.mark.parametrize(("ranks", "pack_tokens"), [(1, 8192), (2, 40)])
def test_one_gradient_whatever_the_ranks_and_packing(two_ranks, flags, tmp_path, ranks, pack_tokens):
    run(ranks, "grpo.py", *flags, "--pack_tokens", pack_tokens, "--output_dir", tmp_path)
    assert samples(two_ranks, step=1) == samples(tmp_path, step=1)  # completions, rewards and advantages, exactly
    # The loss is a mean of terms of size 1 that nearly cancel, in float32: 1e-5 of 0.1 is what its digits can tell.
    assert_close_metrics(two_ranks, tmp_path, ("loss",), rel=1e-5, floor=0.1)
    assert_close_metrics(two_ranks, tmp_path, SAME, rel=1e-5)


@pytest.fixture(scope="module")
def killed(flags, tmp_path_factory):
    """The folder of a run on two ranks that was killed after its fifth step."""
    folder = tmp_path_factory.mktemp("killed")
    delay = random.uniform(0, 0.2)
    helpers.run_and_kill(2, "grpo.py", *flags, "--output_dir", folder, folder=folder, after_step=5, delay=delay)
    assert not (folder / "hf").exists(), "killed too late"
    return folder


def test_killed_and_resumed_is_bitwise_the_uninterrupted_run(two_ranks, killed, flags, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert "resuming from" in run(2, "grpo.py", *flags, "--output_dir", tmp_path).stdout
    assert_same_weights(two_ranks, tmp_path)
    assert_close_metrics(two_ranks, tmp_path, ("loss", *SAME), rel=0)
    assert samples(two_ranks) == samples(tmp_path)


def test_resumed_on_another_number_of_ranks(two_ranks, killed, flags, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert "resuming from" in run(1, "grpo.py", *flags, "--output_dir", tmp_path).stdout
    assert [s["prompt"] for s in samples(two_ranks)] == [s["prompt"] for s in samples(tmp_path)]
    assert_close_metrics(two_ranks, tmp_path, ("loss",), rel=1e-4, floor=0.1)


def test_engine_and_trainer_agree_on_every_step(two_ranks):
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics(two_ranks)) <= 1e-4
    assert all(abs(line["sampling/ess"] - 1) < 1e-6 for line in metrics(two_ranks))


def test_disagreement_stops_the_run_before_anything_is_learned(flags, tmp_path):
    extra = ("--max_logprob_difference", 1e-12, "--engine", "transformers")
    done = run(2, "grpo.py", *flags, *extra, "--output_dir", tmp_path, code=1)
    assert done.stderr.count("error: engine and trainer differ by") == 1
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "metrics.jsonl").exists()


def test_the_transformers_engine_samples_the_same_distribution(flags, tmp_path):
    """Agreement with the trainer is checked at its first step by the flag; another engine draws other samples."""
    done = run(2, "grpo.py", *flags, "--engine", "transformers", "--max_steps", 2, "--output_dir", tmp_path)
    assert "TransformersEngine" in done.stdout
    assert max(line["sampling/sampling_logp_difference/max"] for line in metrics(tmp_path)) <= 1e-4


def test_tensor_parallel_engine_gives_the_same_completions(two_ranks, flags, tmp_path):
    extra = ("--tensor_parallel_size", 2, "--max_steps", 2, "--output_dir", tmp_path)
    run(2, "grpo.py", *flags, *extra, torchrun=True)  # vLLM unlinks its shared memory when Python exits, not a fork
    assert [s["completion"] for s in samples(two_ranks, 1)] == [s["completion"] for s in samples(tmp_path, 1)]


def test_kl_penalty_and_dr_grpo_run(flags, tmp_path):
    extra = ("--preset", "dr_grpo", "--beta", 0.1, "--max_steps", 2)
    done = run(1, "grpo.py", *flags, *extra, "--output_dir", tmp_path)
    first, second = metrics(tmp_path)
    assert 0 <= first["kl"] < second["kl"], "the policy starts at the reference and moves away"
    assert "off-policy, 2 updates per rollout" in done.stdout


@needs_gsm8k
def test_gsm8k_form_data_goes_through(tmp_path):
    """Two steps of the recipe on the real file, over an untrained model; docs/grpo.md has the full run."""
    run(2, "grpo.py", "--config", ROOT / "configs/gsm8k_grpo.yaml", "--dataset", GSM8K, "--model", "tiny",
        "--output_dir", tmp_path, "--max_steps", 2, "--max_new_tokens", 32, "--eval_size", 4,
        "--engine", "transformers")  # fmt: skip
    assert {"rewards/gsm8k/mean", "rewards/format/mean", "completions/clipped_ratio"} <= metrics(tmp_path)[-1].keys()


def test_one_gradient_with_every_part_of_the_family(flags, tmp_path):
    """Whole-batch whitening, KL in the reward, adaptive beta, penalties, masks, sequence ratios, dynamic sampling."""
    reward = tmp_path / "first.py"
    reward.write_text("def first(completion, row):\n    return float(completion[:1].isdigit())\n")
    extra = (
        "--loss", "topr", "--reduction", "sequence", "--advantage", "reinforce++_baseline", "--beta", 0.05,
        "--kl_in", "reward", "--kl_estimator", "k1", "--kl_target", 0.01, "--kl_horizon", 100, "--max_draws", 2,
        "--top_entropy", 0.5, "--entropy_coef", 0.01, "--positive_nll", 0.1, "--correction", "sequence",
        "--overlong_buffer", 0.5, "--missing_eos_penalty", 0.1, "--reward", f"{reward}:first", "--max_steps", 4,
        "--prompts_per_step", 12, "--minibatches", 3, "--samples_per_prompt", 3, "--engine", "transformers",
    )  # fmt: skip
    for ranks, pack_tokens in ((2, 8192), (1, 60)):
        run(ranks, "grpo.py", *flags, *extra, "--pack_tokens", pack_tokens, "--output_dir", tmp_path / str(ranks))
    one, two = tmp_path / "1", tmp_path / "2"
    assert [s["completion"] for s in samples(one)] == [s["completion"] for s in samples(two)]
    assert_close_metrics(one, two, ("loss", "kl"), rel=1e-4, floor=0.1)
    assert_close_metrics(one, two, (*SAME, "beta", "dynamic_sampling/unequal_fraction"), rel=1e-4)
    lines = metrics(one)
    assert all(0 < line["dynamic_sampling/unequal_fraction"] < 1 for line in lines) and lines[-1]["beta"] != 0.05
    for group in zip(*[iter(samples(one))] * 3, strict=True):
        assert len({sample["reward"] for sample in group}) > 1, "a group without unequal rewards was kept"


def test_no_unequal_rewards_after_all_draws_is_an_error(flags, tmp_path):
    reward = tmp_path / "same.py"
    reward.write_text("def same(completion, row):\n    return 1.0\n")
    extra = ("--reward", f"{reward}:same", "--max_draws", 2, "--engine", "transformers", "--max_new_tokens", 2)
    done = run(2, "grpo.py", *flags, *extra, "--output_dir", tmp_path / "run", code=1)
    assert done.stderr.count("error: step 1: no group has unequal rewards after --max_draws 2") == 1
