"""The built-in model: its tokenizer restores every text, and its weights are the same on every machine."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from common.model.tiny import CONTEXT, build_model, build_tokenizer, tiny_model

TOKENIZER = build_tokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(texts)
def test_decoding_restores_every_text(text):
    """Characters outside the vocabulary become bytes."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text and None not in ids


def test_weights_do_not_depend_on_the_global_generator(tmp_path, monkeypatch):
    """The generator's state is unchanged. The folder is created once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    folder = Path(tiny_model())
    assert torch.equal(torch.get_rng_state(), state) and folder.parent == tmp_path / "onefile"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model() == str(folder) and (folder / "model.safetensors").stat().st_mtime_ns == made
    stored, model = load_file(folder / "model.safetensors"), build_model()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())
    assert 1e6 < model.num_parameters() < 1.5e6
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == CONTEXT and config["vocab_size"] == len(TOKENIZER)
    assert list(folder.parent.iterdir()) == [folder]


def test_unwritable_cache_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="--model tiny: cannot write .*set XDG_CACHE_HOME"):
        tiny_model()
