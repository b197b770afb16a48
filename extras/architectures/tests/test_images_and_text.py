"""tests/model/test_images_and_text.py, for families with gated delta nets and for vLLM."""
# ruff: noqa: F401, F811 (tests and fixtures)

import shutil
from pathlib import Path

import pytest
import torch
from helpers import stored
from model.test_images_and_text import (
    QUICK,
    STEPS,
    exported,
    opens_whole,
    path,
    require_engine_has_the_weights,
    test_classifier_of_each_family_opens_or_is_refused,
    test_export_changes_the_language_model_alone,
    test_weights_for_an_engine_are_those_of_the_policy,
)

from bench.models import checkpoint
from common.model.loading import open_model


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def family(request) -> str:
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("model_type", QUICK)
def test_vllm_samples_from_the_trained_weights(model_type, sums, tmp_path):
    pytest.importorskip("vllm")
    require_engine_has_the_weights("vllm", model_type, sums, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("--lora_rank", 2)])
def test_stacked_experts_stay_stacked(lora, sums, tmp_path, main):
    path = checkpoint("qwen3_5_moe", tmp_path / "files")
    stacked = Path(shutil.copytree(path, tmp_path / "stacked"))
    for file in stacked.glob("*.safetensors*"):
        file.unlink()
    open_model(path, torch.float32).save_pretrained(stacked, save_original_format=False)
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert experts in stored(stacked)
    flags = (*STEPS, "--model", stacked, "--dataset", sums, "--output_dir", tmp_path / "run")
    main("sft", *flags, *lora)
    assert stored(tmp_path / "run" / "hf").keys() == stored(stacked).keys()
    opens_whole(tmp_path / "run" / "hf")
