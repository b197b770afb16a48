"""Frozen models take half of the memory, and `--offload` changes no number."""

import shutil

import pytest
import torch
from helpers import assert_same_weights, metrics
from model.checkpoints import ARCHITECTURES, samples, write_checkpoint

from common.config.groups import TrainArgs
from common.model.policy import load_policy, load_scalar_model
from common.model.tiny import tiny_model
from common.packs.packing import pack
from common.text.tokenizer import load_tokenizer
from common.train.checkpoint import export_hf

# ---- frozen models ----


@pytest.mark.parametrize("kind", ["policy", "scalar"])
@torch.no_grad()
def test_frozen_models_use_the_compute_dtype_and_give_equal_numbers(tmp_path, device, kind):
    """Numbers are equal bit for bit, for float32 weights that bfloat16 cannot represent."""
    args, load = TrainArgs(dtype="bfloat16"), load_policy if kind == "policy" else load_scalar_model
    path = tiny_model()
    if kind == "scalar":
        model = load(path, TrainArgs(dtype="float32"), device)
        export_hf(model, load_tokenizer(path), tmp_path / "hf")
        path = str(tmp_path / "hf")
    models = [load(path, args, device, trainable=trained) for trained in (False, True)]
    frozen, masters = ([p.to_local() for p in model.parameters()] for model in models)
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in masters} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in masters)
    one, other = (dict(model.named_buffers()) for model in models)
    assert all(
        x.dtype == one[name].dtype and torch.equal(x, one[name]) for name, x in other.items()
    )
    (mb,) = pack(samples(vocabulary=300), 1000, device)
    outputs = (model(mb) for model in models)
    outputs = [(out,) if torch.is_tensor(out) else out for out in outputs]
    assert all(map(torch.equal, *outputs))


def test_buffers_of_a_frozen_model_stay_float32(tmp_path, device):
    """Gemma multiplies its embedding by a buffer."""
    path = write_checkpoint(ARCHITECTURES["gemma3"](), tmp_path)
    frozen = load_policy(path, TrainArgs(dtype="bfloat16"), device, trainable=False)
    assert {b.dtype for b in frozen.buffers() if b.is_floating_point()} == {torch.float32}


# ---- --offload ----

SHORT = "--max_steps 2 --save_every 1 --eval_every 0 --dtype float32".split()
SFT = ("--batch_size", 8, "--lr", 3e-3, "--weight_decay", 0.1, *SHORT)


@pytest.mark.slow
def test_offload_changes_no_number_and_may_change_at_a_resume(main, small, tmp_path):
    """A run resumed with another `--offload` ends with the same weights, bit for bit.
    tests/packs/test_placement.py has several ranks."""
    for offload in ("none", "optimizer", "all"):
        main("sft", *small, *SFT, "--offload", offload, "--output_dir", tmp_path / offload)
        assert_same_weights(tmp_path / "none", tmp_path / offload)
        losses = [line["loss"] for line in metrics(tmp_path / offload)]
        assert len(losses) == 2 and losses == [line["loss"] for line in metrics(tmp_path / "none")]
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "optimizer", again, ignore=lambda *_: ["hf", "step_000002"])
    main("sft", *small, *SFT, "--offload", "all", "--output_dir", again)
    assert_same_weights(tmp_path / "none", again)
