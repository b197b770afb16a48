"""Models that vLLM does not take as they are: it samples from the trained weights."""

import pytest
from helpers import metrics
from processes import run

from bench.models import checkpoint
from extras.architectures.tests.test_mxfp4 import pack_experts


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gpt_oss"])
def test_vllm_samples_from_the_trained_weights(model_type, sums, tmp_path):
    """Weights change in every step. Qwen3-VL's language model has no class of its own in vLLM, and
    vLLM's reload forgets gpt-oss's experts and sinks."""
    pytest.importorskip("vllm")
    path = checkpoint(model_type, tmp_path / "model")
    if model_type == "gpt_oss":
        pack_experts(tmp_path / "model")
    flags = ("--model", path, "--dataset", sums, "--engine", "vllm", "--dtype", "float32",
             "--max_steps", 2, "--prompts_per_step", 2, "--samples_per_prompt", 2,
             "--max_new_tokens", 16, "--lr", 1e-2, "--eval_every", 0)  # fmt: skip
    run(1, "grpo.py", *flags, "--output_dir", tmp_path / "run")
    gaps = [line["sampling/sampling_logp_difference/max"] for line in metrics(tmp_path / "run")]
    assert len(gaps) == 2 and max(gaps) < 1e-4
