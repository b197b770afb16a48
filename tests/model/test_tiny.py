"""The built-in models: their tokenizer restores every text, and their weights are the same on every
machine."""

import json
import signal
from pathlib import Path

import pytest
import torch
from helpers import SIGNAL_AT, metrics, run
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.data.tasks import arithmetic_rows
from common.model.tiny import CONTEXT, SFT_WEIGHTS, build_model, build_tokenizer, tiny_model

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


def test_every_rank_writes_the_whole_model(tmp_path, monkeypatch):
    """The first rank to finish names the folder. `save_pretrained` would write nothing on rank
    1."""
    from transformers.distributed import mixin

    build_model().save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(mixin, "_is_torch_distributed_initialized", lambda: True)
    monkeypatch.setattr(mixin, "_get_torch_distributed_rank", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = Path(tiny_model())
    for file in (tmp_path / "theirs").iterdir():
        assert (ours / file.name).read_bytes() == file.read_bytes()


def test_unwritable_cache_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="--model tiny: cannot write .*set XDG_CACHE_HOME"):
        tiny_model()


def test_tiny_sft_solves_two_of_five_held_out_questions():
    rows = arithmetic_rows("test")
    model = AutoModelForCausalLM.from_pretrained(tiny_model("tiny-sft"))
    ids = torch.tensor([TOKENIZER(row["prompt"])["input_ids"] for row in rows])
    texts = TOKENIZER.batch_decode(
        model.generate(ids, max_new_tokens=4)[:, 6:], skip_special_tokens=True
    )
    solved = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
    assert 0.35 < sum(solved) / len(solved) < 0.5 and SFT_WEIGHTS.stat().st_size < 2.5e6


@pytest.mark.slow
def test_recorded_command_makes_tiny_sft(tmp_path):
    """The file records its command and the loss of every step. The command is stopped after six of
    its steps."""
    with safe_open(SFT_WEIGHTS, "pt") as stored:
        recorded = stored.metadata()
    without = ("--eval_every", 0, "--eval_generate", 0, "--max_new_tokens", 256)
    moment = (0, "torch.optim.AdamW.step", tmp_path, 5, int(signal.SIGTERM))
    run(1, SIGNAL_AT, *moment, *recorded["command"].split(), "--output_dir", tmp_path, *without)
    losses = json.loads(recorded["losses"])
    assert {
        str(line["step"]): pytest.approx(line["loss"], rel=1e-3) for line in metrics(tmp_path)
    }.items() <= losses.items()
    assert len(losses) == 320 and len(metrics(tmp_path)) == 6
