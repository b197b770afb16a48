"""Properties of single families. test_coverage.py compares their numbers with transformers'."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import stored
from model.architectures import require_vllm_keeps_nothing
from safetensors.torch import load_file, save_file

from bench.models import ARGS, checkpoint
from common.model.policy import load_policy
from common.rollout.transformers_engine import TransformersEngine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
def test_vllm_keeps_nothing_of_old_weights(model_type, tmp_path):
    """Gemma 2 has both soft caps, alternating windows, and a tied head. vLLM packs experts for its
    kernel."""
    require_vllm_keeps_nothing(model_type, tmp_path)


# ---- GLM-4.5 ----


@torch.no_grad()
def test_router_bias_keeps_its_precision(tmp_path, device):
    """In bfloat16 too: files, transformers and the trainer have it in float32."""
    path = checkpoint("glm4_moe", tmp_path / "model")
    generator = torch.Generator().manual_seed(6)
    for file in (tmp_path / "model").glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            weights[name] = weight.bfloat16()
            if name.endswith("e_score_correction_bias"):
                weights[name] = 7 + torch.rand(weight.shape, generator=generator)
        save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | dict(dtype="bfloat16")))
    policy = load_policy(path, replace(ARGS, dtype="bfloat16"), device)
    biases = {n: w for n, w in stored(path).items() if n.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    args = replace(ARGS, dtype="bfloat16")
    engine = TransformersEngine(path, args, load_tokenizer(path), device, True)
    sync_weights(engine, whole_weights(policy, engine.dtype))
    export_hf(policy, load_tokenizer(path), tmp_path / "hf")
    exported = stored(tmp_path / "hf")
    sent = dict(whole_weights(policy, torch.bfloat16))
    for name, bias in biases.items():
        assert exported[name].dtype == torch.float32
        for weights in (policy.hf.state_dict(), engine.replica.state_dict(), exported, sent):
            assert torch.equal(weights[name].float().cpu(), bias), name
