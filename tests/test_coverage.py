"""Every architecture of docs/models.md has the properties that bench/models.py measures, within
limits."""

import json
import re

import pytest
import torch
from helpers import ROOT
from model.architectures import WITH_DELTA_NETS, require_exact
from transformers import FalconConfig

import common.model.policy
from bench.models import ARCHITECTURES, ARGS, checkpoint
from common.model.logprobs import Logits, token_logprobs
from common.model.policy import load_policy

QUICK = ("qwen3", "gemma2", "mixtral")  # the slow tests cover the others


@pytest.mark.parametrize(
    "model_type",
    [
        t if t in QUICK else pytest.param(t, marks=pytest.mark.slow)
        for t in ARCHITECTURES
        if t not in WITH_DELTA_NETS  # extras/architectures/tests
    ],
)
def test_architecture_is_exact(model_type, tmp_path, device):
    require_exact(model_type, tmp_path, device)


def test_page_names_every_architecture():
    table = re.findall(r"^\| .*", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(table))) - {"model_type"} == set(ARCHITECTURES)


@pytest.mark.parametrize("left_out", ["scale", "softcap", "bias_V"])
def test_incomplete_head_is_refused(left_out, tmp_path, device, monkeypatch):
    """The check at load notices that log-probs lack one of the model's operations on logits."""

    def without(logits, *rest):
        return token_logprobs(
            logits._replace(**{left_out: Logits._field_defaults[left_out]}), *rest
        )

    monkeypatch.setattr(common.model.policy, "token_logprobs", without)
    model_type = dict(scale="cohere", softcap="gemma2", bias_V="phi")[left_out]
    with pytest.raises(ValueError, match=f"{model_type} has a head that is not supported"):
        load_policy(checkpoint(model_type, tmp_path), ARGS, device)


def test_irreplaceable_attention_is_refused(tmp_path, device):
    config = FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="falcon with packed attention: 'packed'"):
        load_policy(str(tmp_path), ARGS, device)


def test_attention_to_later_tokens_is_refused(tmp_path, device):
    path = checkpoint("gemma3_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | dict(
        use_bidirectional_attention=True
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError,
        match="gemma3_text has no packed forward: Gemma3Attention attends to later tokens",
    ):
        load_policy(path, ARGS, device)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_mix_sequences_are_refused(kind, tmp_path, device):
    """Gemma 3 has rotary embeddings for each type of layer; one of them is replaced."""
    path = checkpoint("gemma3_text", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    lengths = dict(
        original_max_position_embeddings=64, short_factor=[1.0] * 16, long_factor=[2.0] * 16
    )
    config["rope_parameters"]["full_attention"] |= dict(rope_type=kind, factor=2.0) | lengths
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{kind} rotary embeddings mix packed sequences"):
        load_policy(path, ARGS, device)


def test_loading_draws_no_random_numbers(tmp_path, device):
    """Loading must rebuild a buffer of Gemma's embedding, but not initialise the weight again."""
    path = checkpoint("gemma2", tmp_path)
    before = torch.get_rng_state()
    load_policy(path, ARGS, device)
    assert torch.equal(torch.get_rng_state(), before)
