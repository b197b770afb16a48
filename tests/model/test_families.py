"""Properties of single families. test_coverage.py compares their numbers with transformers'."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import stored
from processes import run
from safetensors.torch import load_file, save_file

from bench.models import ARGS, checkpoint
from common.model.policy import load_policy
from common.rollout.transformers_engine import TransformersEngine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

# Program of a rank: vLLM samples the same prompts again and again, with other weights each time.
AGAIN = """
import sys
from model.test_families import *
from bench.completions import complete
from bench.delta_vllm import prepare
from bench.models import rows
from common.packs.packing import pack
from common.parallel import distributed
from common.rollout.engines import make_engine
path, has_delta_nets = sys.argv[1:]
device, _, _ = distributed.setup(0)
if has_delta_nets == "True":
    prepare()
policy, tokenizer = load_policy(path, ARGS, device), load_tokenizer(path)
args = replace(ARGS, engine="vllm")
engine = make_engine(path, args, tokenizer, device)
worst = []
with torch.no_grad():
    for turn in range(4):
        sync_weights(engine, whole_weights(policy, engine.dtype))
        groups = complete(engine, rows()[1:4], 2, [1, 2, 3], 0.7)
        (mb,) = pack([sample for group in groups for sample in group], 2000, device)
        difference_T = policy(mb, temperature=0.7)[0] - mb.rollout_logprobs_T
        worst.append((difference_T * mb.loss_mask_T).abs().max().item())
        policy.reshard()
        for number, parameter in enumerate(policy.parameters()):
            parameter.mul_(1 + 0.05 * (number % 3))
engine.close()
print(worst)
assert max(worst) < 1e-4, worst
"""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
def test_vllm_keeps_nothing_of_old_weights(model_type, tmp_path):
    """Gemma 2 has both soft caps, alternating windows, and a tied head. vLLM packs experts for its
    kernel."""
    require_vllm_keeps_nothing(model_type, tmp_path)


def require_vllm_keeps_nothing(model_type: str, folder: Path) -> None:
    """It samples the same prompts four times, with other weights each time: neither a weight, nor
    a cached prefix, nor a state of a delta net is left from before."""
    pytest.importorskip("vllm")
    path = checkpoint(model_type, folder / "model")
    run(1, AGAIN, path, model_type.startswith("qwen3_5"))


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
