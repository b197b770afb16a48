"""grpo.py with vLLM and its default flags: agreement of engine and trainer, ranks and packing,
tensor parallelism, real data. tests/test_grpo_objective.py has the formulas."""

from pathlib import Path

import pytest
from helpers import (
    GSM8K,
    ROOT,
    assert_close_metrics,
    metrics,
    needs_gsm8k,
    run,
    samples,
)

pytestmark = pytest.mark.slow
SAME = ("grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "num_tokens",
        "epoch")  # fmt: skip


@pytest.fixture(scope="module")
def flags(reward_file, sums):
    return (
        "--dataset", sums, "--reward", f"{reward_file}:digits", "--max_steps", 2,
        "--prompts_per_step", 4, "--samples_per_prompt", 4, "--minibatches", 2,
        "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0,
        "--save_every", 100, "--max_logprob_difference", 1e-4, "--share_prefix", 1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def with_vllm(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_vllm")
    run(2, "grpo.py", *flags, "--output_dir", folder)
    return folder


def test_gradient_does_not_depend_on_ranks_or_packing_and_the_engine_agrees(
    with_vllm, flags, tmp_path
):
    run(1, "grpo.py", *flags, "--share_prefix", 0, "--pack_tokens", 40, "--output_dir", tmp_path)
    # completions, rewards and advantages, exactly
    assert samples(with_vllm, step=1) == samples(tmp_path, step=1)
    # The loss is a mean of terms of size 1 that nearly cancel, in float32: 1e-5 of 0.1 is its
    # precision.
    assert_close_metrics(with_vllm, tmp_path, ("loss",), rel=1e-5, floor=0.1)
    assert_close_metrics(with_vllm, tmp_path, SAME, rel=1e-5)
    for line in metrics(with_vllm):
        assert line["sampling/sampling_logp_difference/max"] <= 1e-4
        assert abs(line["sampling/ess"] - 1) < 1e-6


def test_tensor_parallel_engine_gives_the_same_completions(with_vllm, flags, tmp_path):
    more = ("--tensor_parallel_size", 2, "--max_steps", 1, "--output_dir", tmp_path)
    run(2, "grpo.py", *flags, *more)
    # With AVX-512 vLLM's ranks share memory, under one name for all launches.
    assert not list(Path("/dev/shm").glob("*cpushm*"))
    one, other = ([s["completion"] for s in samples(run, 1)] for run in (with_vllm, tmp_path))
    assert one == other


def test_disagreement_stops_the_run_before_the_first_update(flags, small, tmp_path):
    extra = ("--max_logprob_difference", 1e-12, "--engine", "transformers")
    done = run(2, "grpo.py", *flags, *small, *extra, "--output_dir", tmp_path, code=1)
    assert done.stderr.count("error: engine and trainer log-probs differ: mean ") == 1
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "metrics.jsonl").exists()


@needs_gsm8k
def test_gsm8k_recipe_runs_one_step(main, tmp_path):
    """A step of the recipe on the real file, with an untrained model; docs/log.md has the full
    run."""
    main(
        "grpo", "--config", ROOT / "configs/gsm8k_grpo.yaml", "--dataset", GSM8K, "--model", "tiny",
        "--output_dir", tmp_path, "--max_steps", 1, "--max_new_tokens", 32, "--eval_size", 4,
        "--prompts_per_step", 4, "--samples_per_prompt", 4, "--engine", "transformers",
    )  # fmt: skip
    names = {"rewards/gsm8k/mean", "rewards/format/mean", "completions/clipped_ratio"}
    assert names <= metrics(tmp_path)[-1].keys()
