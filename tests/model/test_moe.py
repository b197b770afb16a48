"""Mixtures of experts: files name each expert, the model has two parameters per layer, and the
numbers are equal. test_coverage.py tests the rows of docs/models.md; this file tests the properties
of experts."""

import json
from pathlib import Path

import pytest
import torch
from processes import run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.completions import complete
from bench.models import ARGS, checkpoint, rows
from common.model.loading import whole
from common.model.policy import load_policy, load_scalar_model
from common.packs.packing import pack
from common.packs.sample import Sample
from common.rollout.transformers_engine import TransformersEngine
from common.rollout.weights import sync_weights, whole_weights
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

DOWN = dict(
    qwen3_moe="model.layers.0.mlp.experts.3.down_proj.weight",
    mixtral="model.layers.0.block_sparse_moe.experts.3.w2.weight",
)  # names in hub checkpoints

# Program of a rank.
RANK = """
import sys
from bench.models import *
path, folder = sys.argv[1:]
device, rank, world_size = distributed.setup(0)
policy = load_policy(path, ARGS, device)
export_hf(policy, load_tokenizer(path), Path(folder))
forward, gradient = against_transformers(path, policy, device)
assert world_size == 3 and forward < 1e-5 and gradient < 1e-5, (world_size, forward, gradient)
distributed.cleanup()
"""


@pytest.fixture(
    scope="module",
    params=[t if t == "mixtral" else pytest.param(t, marks=pytest.mark.slow) for t in DOWN],
)
def model_type(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(model_type, tmp_path_factory) -> str:
    return checkpoint(model_type, tmp_path_factory.mktemp(model_type))


def same(one: dict, other: dict) -> bool:
    equal = (torch.equal(whole(one[name]), whole(other[name])) for name in one)
    return one.keys() == other.keys() and all(equal)


# ---- files ----


def test_hub_names_are_read_and_written(model_type, path, tmp_path, device):
    """A file with a name for each expert gives transformers' own weights. Exports have the same
    names; tests/model/test_checkpoints.py has checkpoints."""
    stored = load_file(Path(path) / "model.safetensors")
    assert DOWN[model_type] in stored
    policy = load_policy(path, ARGS, device)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert same(policy.hf.state_dict(), plain.state_dict())
    export_hf(policy, load_tokenizer(path), tmp_path / "hf")
    assert same(stored, load_file(tmp_path / "hf" / "model.safetensors"))


def test_transformers_names_are_read(path, tmp_path, device):
    """Transformers has one parameter for all experts of a layer."""
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "model.safetensors")
    assert same(load_policy(str(tmp_path), ARGS, device).hf.state_dict(), plain.state_dict())


def test_missing_or_misshaped_expert_is_refused_by_name(model_type, path, tmp_path, device):
    name, stored = DOWN[model_type], load_file(Path(path) / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(path) / "config.json").read_text())
    save_file(stored | {name: torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    layer = name.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
    with pytest.raises(ValueError, match=rf"^--model .*{layer}.experts.* \[2, 3\]"):
        load_policy(str(tmp_path), ARGS, device)
    del stored[name]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"^--model .*{layer}.experts.* the model needs"):
        load_policy(str(tmp_path), ARGS, device)


def test_scalar_model_with_experts_loads_from_its_export(model_type, path, tmp_path, device):
    """Only the head is new."""
    value = load_scalar_model(path, ARGS, device)
    export_hf(value, load_tokenizer(path), tmp_path / "hf")
    again = load_scalar_model(str(tmp_path / "hf"), ARGS, device, trainable=False)
    assert same(value.hf.state_dict(), again.hf.state_dict())


# ---- numbers ----


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mixtral", "gemma2"], indirect=True)
def test_gradient_and_export_do_not_depend_on_ranks(path, tmp_path):
    """Four experts, or soft caps and windows, on three ranks. The gradient equals that of
    transformers in one process, and the export equals the checkpoint."""
    run(3, RANK, path, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert same(load_file(Path(path) / "model.safetensors"), exported)


def test_router_noise_is_disabled(tmp_path, device):
    """Mixtral's configuration may enable router noise, but log-probs must be deterministic. Router
    logits of every layer would only take memory."""
    path = checkpoint("mixtral", tmp_path)
    enabled = dict(router_jitter_noise=0.5, output_router_logits=True)
    config = json.loads((tmp_path / "config.json").read_text()) | enabled
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = load_policy(path, ARGS, device)
    assert not policy.hf.config.output_router_logits
    (mb,) = pack([Sample(rows()[0], [True] * len(rows()[0]))], 100, device)
    assert torch.equal(policy(mb)[0], policy(mb)[0])


# ---- engines ----


@torch.no_grad()
def test_transformers_engine_samples_from_the_trained_weights(path, device):
    policy, tokenizer = load_policy(path, ARGS, device), load_tokenizer(path)
    engine = TransformersEngine(path, ARGS, tokenizer, device, True)
    for parameter in policy.parameters():
        parameter.mul_(1.1)
    sync_weights(engine, whole_weights(policy, engine.dtype))
    groups = complete(engine, rows()[:2], 2, [1, 2], 0.7)
    (mb,) = pack([sample for group in groups for sample in group], 1000, device)
    difference_T = policy(mb, temperature=0.7)[0] - mb.rollout_logprobs_T
    assert (difference_T.abs() * mb.loss_mask_T).max() < 3e-5
