"""New weights of gpt-oss reach vLLM, whose own reload leaves its experts and sinks as they were."""

import pytest
from helpers import metrics, run

from bench.models import checkpoint
from extras.architectures.tests.test_mxfp4 import pack_experts


@pytest.mark.slow
def test_vllm_samples_from_the_trained_weights(sums, tmp_path):
    """In a run from packed experts whose weights change in every step."""
    pytest.importorskip("vllm")
    checkpoint("gpt_oss", tmp_path / "model")
    path = pack_experts(tmp_path / "model")
    flags = ("--model", path, "--dataset", sums, "--output_dir", tmp_path / "run",
             "--engine", "vllm", "--dtype", "float32", "--max_steps", 3, "--prompts_per_step", 4,
             "--samples_per_prompt", 2, "--max_new_tokens", 20, "--lr", 1e-2,
             "--eval_every", 0)  # fmt: skip
    run(1, "grpo.py", *flags)
    lines = metrics(tmp_path / "run")
    assert len(lines) == 3
    for line in lines:
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
