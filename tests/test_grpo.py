"""grpo.py with vLLM and its default flags: each rank has an engine, all ranks share one, or one
rank only samples. tests/test_grpo_objective.py has the formulas."""

from pathlib import Path

import pytest
from helpers import assert_close_metrics, metrics, samples, weights
from processes import run

pytestmark = pytest.mark.slow
SAME = ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length",
        "num_tokens", "epoch")  # fmt: skip


@pytest.fixture(scope="module")
def flags(reward_file, sums):
    return (
        "--dataset", sums, "--reward", f"{reward_file}:digits", "--max_steps", 2,
        "--prompts_per_step", 8, "--samples_per_prompt", 4, "--minibatches", 2,
        "--max_new_tokens", 12, "--lr", 1e-4, "--eval_every", 0,
        "--save_every", 100, "--max_logprob_difference", 1e-4, "--share_prefix", 1,
        "--top_p", 0.9, "--top_k", 20,
    )  # fmt: skip


@pytest.fixture(scope="module")
def with_vllm(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_vllm")
    run(2, "grpo.py", *flags, "--output_dir", folder)
    return folder


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        (4, "--tensor_parallel_size 2"),
        (3, "--rollout_ranks 1 --max_staleness 0 --share_prefix 0 --pack_tokens 40"),
    ],
)
def test_run_does_not_depend_on_where_vllm_samples(ranks, where, with_vllm, flags, tmp_path):
    """Weights go from the shards, one parameter after the other, to two engines on two ranks, or to
    a rank that does not train. With AVX-512, vLLM's ranks share memory under one name."""
    run(ranks, "grpo.py", *flags, *where.split(), "--output_dir", tmp_path)
    assert not list(Path("/dev/shm").glob("*cpushm*"))
    one, other = ([s["completion"] for s in samples(folder)] for folder in (with_vllm, tmp_path))
    assert one == other
    # The loss is a mean of terms of size 1 that nearly cancel: 1e-5 of 0.1 is its precision.
    assert_close_metrics(with_vllm, tmp_path, SAME, rel=1e-5, floor=0.1)
    one, other = weights(with_vllm), weights(tmp_path)
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-5
    for line in metrics(with_vllm) + metrics(tmp_path):
        assert line["sampling/sampling_logp_difference/max"] <= 1e-4
        assert abs(line["sampling/ess"] - 1) < 1e-6
        assert line.get("sampling/staleness/max", 0) == 0


def test_disagreement_stops_the_run_before_the_first_update(flags, small, tmp_path):
    extra = ("--max_logprob_difference", 1e-12, "--engine", "transformers")
    done = run(2, "grpo.py", *flags, *small, *extra, "--output_dir", tmp_path, code=1)
    assert done.stderr.count("error: engine and trainer log-probs differ: mean ") == 1
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "metrics.jsonl").exists()
