"""The built-in models: their tokenizer restores every text, and their weights are the same on every
machine."""

import re
from pathlib import Path

import pytest
import torch
from helpers import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.data.tasks import arithmetic_rows
from common.model.tiny import tiny_model
from tools import make_tiny

TOKENIZER = tiny_tokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(texts)
def test_decoding_restores_every_text(text):
    """Characters outside the vocabulary become bytes."""
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert TOKENIZER.decode(ids) == text and None not in ids


@pytest.mark.parametrize("name", ["tiny", "tiny-sft"])
def test_tool_makes_the_folders(name, tmp_path, monkeypatch):
    """On this machine or another one, whose random numbers may be rounded otherwise."""
    monkeypatch.setattr(make_tiny, "train", lambda file: file.unlink())
    with torch.random.fork_rng():
        make_tiny.write(name, tmp_path)
    folder = Path(tiny_model(name))
    files = {file.name for file in tmp_path.iterdir()} | {"model.safetensors"}
    assert files == {file.name for file in folder.iterdir()}
    for file in files - {"model.safetensors"}:
        versions = [
            re.sub(r'"transformers_version": .*', "", (place / file).read_text())
            for place in (folder, tmp_path)
        ]
        assert versions[0] == versions[1]
    stored = load_file(folder / "model.safetensors")
    assert 1e6 < sum(x.numel() for x in stored.values()) < 1.5e6
    if name == "tiny":
        made = load_file(tmp_path / "model.safetensors")
        assert made.keys() == stored.keys()
        assert all(torch.allclose(made[n], x, atol=1e-6) for n, x in stored.items())


def test_tiny_sft_solves_two_of_five_held_out_questions():
    rows = arithmetic_rows("test")
    model = AutoModelForCausalLM.from_pretrained(tiny_model("tiny-sft"))
    ids = torch.tensor([TOKENIZER(row["prompt"])["input_ids"] for row in rows])
    texts = TOKENIZER.batch_decode(
        model.generate(ids, max_new_tokens=4)[:, 6:], skip_special_tokens=True
    )
    solved = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
    assert 0.35 < sum(solved) / len(solved) < 0.5
